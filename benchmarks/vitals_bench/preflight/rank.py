"""One rank of a measured preflight. It starts its fault after torch was loaded.

No control group or name space shifts the clock of a process, so a skew is added where it is read.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from vitals_plugins.lab.preflight import program

SLOW_RANK = "VITALS_BENCH_SLOW_RANK"
GROUP = "VITALS_BENCH_GROUP"
"""File of a control group that the slow rank joins."""
SKEW = "VITALS_BENCH_SKEW"
"""Seconds that the clock of this node is ahead."""

if __name__ == "__main__":
    if os.environ["RANK"] == os.environ.get(SLOW_RANK):
        Path(os.environ[GROUP]).write_text(str(os.getpid()))
    skew = float(os.environ.get(SKEW, "0"))
    program.main(sys.argv[1], wall_clock=lambda: time.time() + skew)
