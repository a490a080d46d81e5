"""Shows that KV blocks travel while prefill still runs, and that output 0 does not wait for the last block.

    python benchmarks/overlap.py [--tokens 1000] [--link-megabytes 5]

Prints the timeline of one request over the local link, and of one over a link of the given speed (a relay between the
two nodes). Exits with 1 when no block arrived before prefill's end, or, on the slow link, when output 0 came last.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import load  # noqa: E402
from benchmarks.service import Node, Service, free_port  # noqa: E402
from benchmarks.slow_link import SlowLink  # noqa: E402

POLL_SECONDS = 0.02
FLAGS = ["--num-threads", "1", "--max-num-batched-tokens", "128", "--log-level", "debug"]
Moment = tuple[float, str]
_LOG_LINE = re.compile(r"(\S+) debug \S+ (chunk_computed|fetch_granted|hidden_arrived|fetch_ended) (.*)")
_RECEIVED = re.compile(r'tandem:transfer_bytes_total\{direction="received",side="client"\} (\S+)')


@contextmanager
def service_over(model: str, bytes_per_second: float | None) -> Iterator[Service]:
    """A service whose decode node reaches the prefill node directly, or through a relay of this speed."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        service = Service(model, Path(folder), FLAGS)
        relay = None
        try:
            service.start_proxy()
            service.start_node("decode")
            if bytes_per_second is None:
                service.start_node("prefill")
            else:
                port = free_port()
                relay = SlowLink("127.0.0.1", port, bytes_per_second=bytes_per_second)
                relay.__enter__()
                advertise = f"tcp://127.0.0.1:{relay.port}"
                service.start_node("prefill", "--fetch-port", str(port), "--fetch-advertise", advertise)
            service.wait_ready()
            yield service
        finally:
            service.close()
            if relay is not None:
                relay.__exit__(None, None, None)


def received_bytes(decode: Node) -> float:
    with urllib.request.urlopen(f"{decode.url}/metrics", timeout=5) as reply:
        match = _RECEIVED.search(reply.read().decode())
    return float(match[1]) if match else 0.0


class Arrivals:
    """Polls how many bytes the decode node has received, while a request runs."""

    def __init__(self, decode: Node, expected: float) -> None:
        self._decode = decode
        self._expected = expected
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self.moments: list[Moment] = []
        self.first = self.last = 0.0

    def __enter__(self) -> Arrivals:
        self._before = received_bytes(self._decode)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _poll(self) -> None:
        shown = seen = 0.0
        while not self._stop.wait(POLL_SECONDS):
            share = (received_bytes(self._decode) - self._before) / self._expected
            if share <= seen:
                continue
            seen = share
            self.last = time.time()
            if share > 0.01:  # more than the answer to the request
                self.first = self.first or self.last
            if share >= shown + 0.1 or share >= 0.99:
                shown = share
                self.moments.append((self.last, f"decode: {min(share, 1):4.0%} of the KV bytes are in"))


def log_moments(node: Node, since: float) -> list[Moment]:
    found = []
    for line in node.log.read_text(errors="replace").splitlines():
        if match := _LOG_LINE.match(line):
            at = datetime.fromisoformat(match[1]).timestamp()
            fields = " ".join(f for f in match[3].split() if not f.startswith("request_id"))
            if at >= since:
                found.append((at, f"{node.role}: {match[2].replace('_', ' ')} {fields}"))
    return found


def show(title: str, service: Service, num_tokens: int, salt: int, *, is_slow: bool) -> bool:
    """Runs one request and prints what happened when; whether it overlapped as it should."""
    asyncio.run(load.run(service.url, [load.filler(64, 3)], 2, 1))  # warm, and the connection is up
    decode, prefill = (next(n for n in service.nodes if n.role == role) for role in ("decode", "prefill"))
    token_bytes = 46_080  # of this model in float32
    start, start_perf = time.time(), time.perf_counter()
    with Arrivals(decode, -(-num_tokens // 16) * 16 * token_bytes) as arrivals:
        samples, _ = asyncio.run(load.run(service.url, [load.filler(num_tokens, salt)], 4, 1))
    outputs = [(start + at - start_perf, f"client: output {i}") for i, at in enumerate(samples[0].token_times)]
    moments = sorted(arrivals.moments + log_moments(decode, start) + log_moments(prefill, start) + outputs)
    print(f"\n{title}, {num_tokens} tokens\n")
    for at, what in moments:
        print(f"  {at - start:7.3f} s  {what}")
    prefill_end = max(at for at, what in moments if what.startswith("prefill"))
    early = arrivals.first and arrivals.first < prefill_end
    print(f"\n  first KV bytes {prefill_end - arrivals.first:.3f} s before prefill's end")
    print(f"  last KV bytes {arrivals.last - outputs[0][0]:.3f} s after output 0")
    return bool(early) and (not is_slow or outputs[0][0] < arrivals.last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--link-megabytes", type=float, default=5.0, help="speed of the slow link, MB/s")
    options = parser.parse_args()
    with service_over(options.model, None) as service:
        is_good = show("local link", service, options.tokens, 11, is_slow=False)
    with service_over(options.model, options.link_megabytes * 1e6) as service:
        title = f"link of {options.link_megabytes:g} MB/s"
        is_good &= show(title, service, options.tokens, 12, is_slow=True)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
