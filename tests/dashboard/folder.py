"""A folder of runs as agents leave it: real spools with a real run, and no server anywhere."""

import math
import time
from pathlib import Path

from tests.collector.lookback import LAYERS, layer_rows
from tests.collector.rows import OTHER_RUN, RUN, SECOND, Writer
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.records import (
    CheckpointChanged,
    Decision,
    DecisionMade,
    NamesDefined,
    RunEnded,
    RunInfo,
    RunStarted,
)

NAN_STEP, SPIKE_STEP, NUM_STEPS = 60, 120, 200
LONG_STEPS = 6_000


class OpenRun:
    """A run of two ranks with a NaN step and a spike, both skipped; its agent still writes."""

    def __init__(self, folder: Path, *, name: str) -> None:
        self._spool = open_spool(folder, RUN)
        # A step a second, the last one just now.
        started = time.time_ns() - NUM_STEPS * SECOND
        self._ranks = [Writer(f"rank:{rank}", started=started) for rank in range(2)]
        self._num_decisions = 0
        self.last_step = NUM_STEPS - 1
        loss = [2 + 3 * math.exp(-step / 50) for step in range(NUM_STEPS)]
        loss[NAN_STEP], loss[SPIKE_STEP] = math.nan, 9.0
        head = self._ranks[0]
        info = RunInfo(name=name, project="demo", world_size=2)
        self._spool.append(head.events(RunStarted(info=info)))
        named = NamesDefined(stream="layers", names=dict(enumerate(LAYERS)))
        self._spool.append(head.events(named))
        self._spool.append(layer_rows(head, range(0, NUM_STEPS, 10)))
        self._train(range(NUM_STEPS), loss)
        saved = CheckpointChanged(
            checkpoint_id="step-100", checkpoint_step=100, state="healthy", where="disk"
        )
        self._spool.append(head.events(saved, step=100))
        self._skip(NAN_STEP, "gradients of rank 1 are NaN")
        self._skip(SPIKE_STEP, "loss 9 is above its limit 6")
        self._spool.sync()

    def skip_next(self, why: str) -> int:
        """Train one step more, which is skipped; return its number."""
        self.last_step += 1
        self._train(range(self.last_step, self.last_step + 1), [8.0])
        self._skip(self.last_step, why)
        self._spool.sync()
        return self.last_step

    def close(self) -> None:
        """Write no more."""
        self._spool.close()

    def _train(self, steps: range, loss: list[float]) -> None:
        first, second = self._ranks
        columns = {
            "loss": loss,
            "rank_loss": loss,
            "grad_norm": [value / 3 for value in loss],
            "loss_limit": 6.0,
            "learning_rate": 3e-4,
            "tokens_per_second": 41_000.0,
            "step_duration_seconds": 0.05,
        }
        self._spool.append(first.steps(steps, **columns))
        self._spool.append(second.steps(steps, rank_loss=loss, step_duration_seconds=0.06))

    def _skip(self, step: int, why: str) -> None:
        self._num_decisions += 1
        made = Decision(
            ledger_seq=self._num_decisions,
            action="skip_step",
            step=step,
            decided_at_step=step + 1,
            attempt=1,
            reason=why,
            rule="skip",
            cause="data",
            cost_steps=1,
        )
        self._spool.append(self._ranks[0].events(DecisionMade(decision=made), step=step))


def write_run(folder: Path, *, name: str) -> str:
    """Write a run of two ranks with a NaN step and a spike, both skipped; return its id."""
    OpenRun(folder, name=name).close()
    return RUN


def write_long_run(folder: Path) -> str:
    """Write a finished run of more steps than a chart has points; return its id."""
    spool = open_spool(folder, OTHER_RUN)
    writer = Writer(run=OTHER_RUN, started=time.time_ns() - LONG_STEPS * SECOND, world_size=1)
    spool.append(writer.events(RunStarted(info=RunInfo(name="long", project="demo"))))
    for start in range(0, LONG_STEPS, 1_000):
        steps = range(start, start + 1_000)
        spool.append(writer.steps(steps, loss=[2 + math.sin(step) / 9 for step in steps]))
    spool.append(writer.events(RunEnded(state="finished"), step=LONG_STEPS - 1))
    spool.close()
    return OTHER_RUN


def write_troubled_run(folder: Path, num_incidents: int) -> str:
    """Write a finished run with skips that are 200 steps apart, and many snapshots."""
    spool, num_steps = open_spool(folder, OTHER_RUN), 200 * num_incidents
    writer = Writer(run=OTHER_RUN, started=time.time_ns() - num_steps * SECOND, world_size=1)
    config: dict[str, str | int | float | bool | None] = {f"key{i}": i for i in range(60)}
    spool.append(writer.events(RunStarted(info=RunInfo(name="troubled", config=config))))
    spool.append(writer.steps(range(num_steps), loss=2.0, grad_norm=1.0, loss_limit=6.0))
    for step in range(0, num_steps, 20):
        saved = CheckpointChanged(
            checkpoint_id=f"s{step}", checkpoint_step=step, state="healthy", where="memory"
        )
        spool.append(writer.events(saved, step=step))
    for number in range(num_incidents):
        made = Decision(
            ledger_seq=number + 1,
            action="skip_step",
            step=200 * number,
            decided_at_step=200 * number + 1,
            attempt=1,
            reason="loss 9 is above its limit 6",
            rule="skip",
            cause="data",
        )
        spool.append(writer.events(DecisionMade(decision=made), step=made.step))
    spool.append(writer.events(RunEnded(state="finished"), step=num_steps - 1))
    spool.close()
    return OTHER_RUN


def open_spool(folder: Path, run_id: str) -> Spool:
    directory = RunDir.create(folder, run_id).agent_dir("node-a") / "spool"
    return Spool(directory, max_bytes=1 << 24, keep=True)
