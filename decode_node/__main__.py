"""`python -m decode_node`: starts a decode node."""

import os
import sys

from common.installation import missing_engine_text

# Before torch is loaded: its threads must sleep at barriers, not spin. Nodes share cores, and a spinning thread keeps
# the one that everybody waits for from running (a decode step of 2 threads on a busy machine: 1.8 s instead of 0.09 s).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if __name__ == "__main__":
    if (text := missing_engine_text()) is not None:
        sys.exit(f"tandem decode: {text}")
    from decode_node.main import main

    main()
