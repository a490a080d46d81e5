"""A prompt whose head is in the prefix cache: time to the first output, cold against warm."""

from __future__ import annotations

from benchmarks.engine_driver import Setup, make_request, seconds_to_first_output
from benchmarks.engine_report import Check, Section
from benchmarks.load import filler, median

NUM_TAIL = 16
HEADER = ("prompt", "time to first token, ms", "tokens cached")


def compare_prefix(setup: Setup) -> Section:
    num_prefix = 200 if setup.is_quick else 1000
    engine = setup.build((setup.num_rounds + 1) * (num_prefix + 64))
    cold: list[float] = []
    warm: list[float] = []
    cached = [0, 0]
    for number in range(setup.num_rounds):
        prefix = filler(num_prefix, number)
        for is_warm, times in enumerate((cold, warm)):
            request = make_request(f"r{number}-{is_warm}", prefix + filler(NUM_TAIL, 100 + 2 * number + is_warm), 1)
            times.append(seconds_to_first_output(engine, request))
            cached[is_warm] = request.num_cached_tokens or 0
    ratio = median([a / b for a, b in zip(cold, warm, strict=True)])
    return Section(
        title=f"prefix: {num_prefix} shared tokens, {NUM_TAIL} of its own",
        meaning="The second request with the same head computes its own tail and the head's last, partial block only.",
        header=HEADER,
        rows=[
            ["cold", f"{median(cold) * 1e3:.1f}", str(cached[0])],
            ["warm", f"{median(warm) * 1e3:.1f}", str(cached[1])],
        ],
        checks=[Check("time to first token, cold over warm", ratio, 10.0, "x")],
    )
