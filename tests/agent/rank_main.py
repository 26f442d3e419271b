"""A rank for tests: writes its journal until it is told to stop, or is killed.

    python -m tests.agent.rank_main BASE VITALS_DIR RANK [--agent] [--every SECONDS]

Prints ``ready`` after the first step. After each step the number of steps lies in RANK.progress of
the run directory. A line on stdin ends it with a goodbye; ``--agent`` starts an agent as its child.
"""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from tests.agent.builders import NODE, RUN, STEPS, Rank, identity
from trainvitals.io.rundir import RunDir
from trainvitals.records import RunEnded


def row(number: int) -> list[float | int | None]:
    """The values of one step: everything follows from its number."""
    values = {"step": number, "attempt": 1, "loss": number / 7, "tokens_seen": number * 64}
    return [values.get(column.name) for column in STEPS.columns]


def main() -> None:
    base, vitals_dir, rank = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    run_dir = RunDir.create(vitals_dir, RUN)
    writer = Rank(base, run_dir, identity(rank=rank, pid=os.getpid()))
    if "--agent" in sys.argv:
        where = ["--dir", str(vitals_dir), "--run", RUN, "--node", NODE, "--child"]
        subprocess.Popen([sys.executable, "-m", "vitals_agent", *where], stdin=subprocess.DEVNULL)
    progress = os.open(run_dir.path / f"{rank}.progress", os.O_RDWR | os.O_CREAT, 0o600)
    every = float(sys.argv[sys.argv.index("--every") + 1]) if "--every" in sys.argv else 0.002
    number = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        writer.steps.append(row(number))
        number += 1
        os.pwrite(progress, number.to_bytes(8, "little"), 0)
        if number == 1:
            print("ready", flush=True)
        time.sleep(every)
    writer.say(RunEnded(state="finished"), step=number)
    writer.close()


if __name__ == "__main__":
    main()
