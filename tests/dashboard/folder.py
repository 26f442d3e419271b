"""A folder of runs as agents leave it: real spools with a real run, and no server anywhere."""

import math
import time
from pathlib import Path

from tests.collector.rows import RUN, SECOND, Writer
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.records import Decision, DecisionMade, RunInfo, RunStarted

NAN_STEP, SPIKE_STEP, NUM_STEPS = 60, 120, 200


def write_run(folder: Path, *, name: str) -> str:
    """Write a run of two ranks with a NaN step and a spike, both skipped; return its id."""
    spool = Spool(
        RunDir.create(folder, RUN).agent_dir("node-a") / "spool", max_bytes=1 << 24, keep=True
    )
    started = time.time_ns() - NUM_STEPS * SECOND  # a step a second, the last one just now
    first, second = Writer("rank:0", started=started), Writer("rank:1", started=started)
    loss = [2 + 3 * math.exp(-step / 50) for step in range(NUM_STEPS)]
    loss[NAN_STEP], loss[SPIKE_STEP] = math.nan, 9.0
    spool.append(first.events(RunStarted(info=RunInfo(name=name, project="demo", world_size=2))))
    columns = {
        "loss": loss,
        "rank_loss": loss,
        "grad_norm": [value / 3 for value in loss],
        "loss_limit": 6.0,
        "learning_rate": 3e-4,
        "tokens_per_second": 41_000.0,
        "step_duration_seconds": 0.05,
    }
    spool.append(first.steps(range(NUM_STEPS), **columns))
    spool.append(second.steps(range(NUM_STEPS), rank_loss=loss, step_duration_seconds=0.06))
    for seq, (step, why) in enumerate(
        ((NAN_STEP, "gradients of rank 1 are NaN"), (SPIKE_STEP, "loss 9 is above its limit 6")), 1
    ):
        made = Decision(
            ledger_seq=seq,
            action="skip_step",
            step=step,
            decided_at_step=step + 1,
            attempt=1,
            reason=why,
            rule="skip",
            cause="data",
            cost_steps=1,
        )
        spool.append(first.events(DecisionMade(decision=made), step=step))
    spool.sync()
    spool.close()
    return RUN
