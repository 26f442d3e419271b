"""One rank of a preflight, each on a node of its own; rank 1 has a clock that is 60 s ahead."""

import os
import sys
import time

from vitals_plugins.lab.preflight import program

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    os.environ["VITALS_NODE"] = f"n{rank}"
    program.main(sys.argv[1], wall_clock=lambda: time.time() + 60 * rank)
