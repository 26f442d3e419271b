"""A run to be mirrored: it has a NaN, an infinity, numbers of 64 bits, and a rollback."""

import math
import time
from pathlib import Path

from msgspec.structs import replace

from tests.collector.rows import RUN, Writer
from tests.support.follow import SKIP
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.records import (
    AttemptStarted,
    DecisionMade,
    NamesDefined,
    RunEnded,
    RunInfo,
    RunStarted,
)

SECRET = "sk-1234567890abcdefghij1234"
CONFIG = {"lr": 3e-4, "optimizer": "adamw", "api_key": SECRET}
HOSTILE = "tiny <script>alert(1)</script>/../x"
FORK = 20


class Scene:
    """Writes the run as an agent would: ``first`` up to the rollback, ``then`` to the end."""

    def __init__(self, folder: Path, name: str = "tiny", *, is_live: bool = False) -> None:
        self.run_dir = RunDir.create(folder, RUN)
        self._spool = Spool(self.run_dir.agent_dir("a") / "spool", max_bytes=1 << 24, keep=True)
        # A run of which nothing was heard for minutes is lost, and its mirror ends.
        self.rank = Writer(started=time.time_ns() - (0 if is_live else 10**12))
        info = RunInfo(name=name, project="lab", world_size=1, config=CONFIG, tags=("seed-1",))
        start = AttemptStarted(id=1, parent=None, fork_step=0, reason="start")
        names = NamesDefined(stream="scalars", names={0: "val_loss", 1: "sampled/best"})
        self.write(self.rank.events(RunStarted(info=info), start, names))
        self.values: dict[tuple[int, int, str], float] = {}
        """What was measured: by attempt, step and name."""

    def write(self, *batches: bytes) -> None:
        for batch in batches:
            self._spool.append(batch)

    def steps(self, first: int, last: int, *, attempt: int = 1) -> None:
        span = range(first, last)
        losses = [_loss(step, attempt) for step in span]
        norms = [1.0 / (step + 3) for step in span]
        skipped = [int(not math.isfinite(loss)) for loss in losses]
        self.write(
            self.rank.steps(span, attempt=attempt, loss=losses, grad_norm=norms, skipped=skipped)
        )
        for step, loss, norm in zip(span, losses, norms, strict=True):
            self.values[attempt, step, "train/loss"] = loss
            self.values[attempt, step, "train/grad_norm"] = norm

    def scalars(self, values: dict[int, float], *, attempt: int = 1, name: int = 0) -> None:
        self.write(self.rank.scalars(name, values, attempt=attempt))
        tag = ("val_loss", "sampled/best")[name]
        self.values |= {(attempt, step, tag): value for step, value in values.items()}

    def first(self) -> None:
        self.steps(0, 41)
        self.scalars({10: 0.1 + 0.2, 20: math.inf, 30: -math.inf, 40: math.nan})
        self.write(self.rank.events(DecisionMade(decision=replace(SKIP, step=40)), step=40))

    def back(self) -> None:
        made = replace(
            SKIP,
            ledger_seq=2,
            action="rollback",
            step=40,
            rollback_to_step=FORK,
            new_attempt=2,
            reason="NaN weights",
        )
        forked = AttemptStarted(id=2, parent=1, fork_step=FORK, reason="rollback")
        self.write(self.rank.events(DecisionMade(decision=made), step=40))
        self.write(self.rank.events(forked, step=FORK, attempt=2, at=self.rank.time_of(41)))
        self.rank.started += 50 * 10**9  # the same steps, later

    def then(self, last: int = 60) -> None:
        self.steps(FORK, last, attempt=2)
        self.scalars({30: 0.7, 50: 5e-324, 55: 1.7976931348623157e308}, attempt=2)
        self.scalars({59: 16777217.0}, attempt=2, name=1)

    def end(self) -> None:
        self.write(self.rank.events(RunEnded(state="finished", reason=""), at=time.time_ns()))

    def whole(self) -> None:
        self.first()
        self.back()
        self.then()
        self.end()

    def lineage(self) -> dict[tuple[int, str], float]:
        """What stands in the end: by step and name."""
        return {
            (step, name): value
            for (attempt, step, name), value in sorted(self.values.items())
            if attempt == 2 or step < FORK
        }


def _loss(step: int, attempt: int) -> float:
    if (attempt, step) == (1, 40):
        return math.nan
    if (attempt, step) == (2, 33):
        return math.inf
    return attempt + 1.0 / (step + 1.1)


def same(a: dict, b: dict) -> bool:
    """Say whether both hold the same numbers, bit by bit, NaN included."""
    return a.keys() == b.keys() and all(
        x == y or (math.isnan(x) and math.isnan(y)) for x, y in ((a[key], b[key]) for key in a)
    )
