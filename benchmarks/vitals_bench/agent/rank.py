"""A rank that writes steps at a pace until its stdin ends.

python -m vitals_bench.agent.rank RUN_DIR RANK STEPS_PER_SECOND
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

from trainvitals.catalog import steps_schema
from trainvitals.identity import Identity, new_incarnation, safe_node_id
from trainvitals.io.journal import JournalWriter, announce_run, journal_directory
from trainvitals.io.mailbox import Mailbox
from trainvitals.io.private import private_base
from trainvitals.rows import Value

NODE = safe_node_id("bench")


def main() -> None:
    """Write until told to end."""
    run_dir, rank, pace = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    identity = Identity(
        run_id=run_dir.name,
        incarnation=new_incarnation(),
        source=f"rank:{rank}",
        node=NODE,
        pid=os.getpid(),
        rank=rank,
        local_rank=rank,
        world_size=8,
        started_unix_ns=time.time_ns(),
        started_monotonic_ns=time.monotonic_ns(),
    )
    folder = announce_run(private_base(os.environ), run_dir.name, run_dir)
    if rank == 0:
        Mailbox.create(folder / "mailbox").close()
    schema = steps_schema()
    journal = JournalWriter(journal_directory(folder, identity), identity)
    stream = journal.open_stream(schema)
    step = 0
    while not select.select([sys.stdin], [], [], 1 / pace)[0]:
        row: list[Value] = [i if c.kind == "i8" else i / 7 for i, c in enumerate(schema.columns)]
        row[0] = step
        stream.append(row)
        if step == 0:
            print("ready", flush=True)  # noqa: T201
        step += 1
    journal.close()


if __name__ == "__main__":
    main()
