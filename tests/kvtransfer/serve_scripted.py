"""A process that serves a ScriptedStore, to be killed by tests: prints its endpoints, then serves until then.

python serve_scripted.py INSTANCE_ID ENDPOINT NUM_BLOCKS_BEFORE_IT_STALLS
"""

from __future__ import annotations

import json
import sys
import threading

from kvtransfer.server import FetchServer
from kvtransfer.store import FetchKey, FetchRequest, StoreEvents
from tests.kvtransfer.doubles import ScriptedStore, layout_blocks


class StallingStore(ScriptedStore):
    """Computes so many blocks of each fetch and no more; 0: all of them."""

    def __init__(self, num_blocks_before_stall: int) -> None:
        super().__init__(is_automatic=False)
        self._limit = num_blocks_before_stall

    def open(self, key: FetchKey, request: FetchRequest, events: StoreEvents) -> None:
        super().open(key, request, events)
        events.accepted(0)
        wanted = layout_blocks(self.layout, request)
        self.fill(key, min(wanted, self._limit or wanted))
        if not self._limit:
            self.finish(key)


def main() -> None:
    instance_id, endpoint, limit = sys.argv[1:]
    server = FetchServer(StallingStore(int(limit)), instance_id, [endpoint])
    print(json.dumps(server.start()), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
