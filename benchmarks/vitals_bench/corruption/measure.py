"""Real gloo trainings of 2, 3 and 4 ranks in which one bit flips, and some in which none does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainvitals.errors import VitalsError
from vitals_bench.corruption.rank import BITS, EVERY, TARGETS, Healthy, Outcome
from vitals_bench.rows import Cell, Grid, Row, at_least, exactly

WORLDS = (2, 3, 4)
_SECONDS = 3600


def play(part: str, *, ranks: int, number: int, kind: Any) -> Any:
    """Return what came of one part on so many ranks, as a list of ``kind``."""
    with tempfile.TemporaryDirectory(prefix="vitals-corruption-", dir="/dev/shm") as folder:
        (Path(folder) / "shm").mkdir()
        environ = {
            **os.environ,
            "VITALS_SHM": str(Path(folder) / "shm"),
            "VITALS_AGENT": "off",
            "VITALS_QUIET": "1",
            "VITALS_LADDER_MARGIN": "3",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", "-m", "vitals_bench.corruption.rank"]
        done = subprocess.run(
            [*command, part, folder, str(number)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        outcomes = Path(folder, "outcomes.json")
        if done.returncode or not outcomes.exists():
            raise VitalsError(f"the ranks failed: {done.stderr[-2000:]}")
        return msgspec.json.decode(outcomes.read_bytes(), type=list[kind])


def measure_flips(*, quick: bool) -> Iterator[Row | Grid]:
    """Yield what became of single flipped bits: seen, placed, named, healed."""
    outcomes: list[Outcome] = []
    for ranks in (2, 3) if quick else WORLDS:
        outcomes += play("flips", ranks=ranks, number=1 if quick else 3, kind=Outcome)
    traced = [o for o in outcomes if o.left_trace]
    guarded = [o for o in traced if not o.trial.heals]
    healed = [o for o in traced if o.trial.heals]
    yield _grid(guarded)
    num_traceless = len(outcomes) - len(traced)
    note = f"{num_traceless} of {len(outcomes)} left no trace: rounded away, or the update skipped"
    yield _share(
        "flips that changed a state: seen", [o.seen_after is not None for o in guarded], note
    )
    direct = [o for o in guarded if o.trial.target == "weight" and o.seen_after is not None]
    yield _share(
        f"of a weight: seen within one round of {EVERY} steps",
        [(o.seen_after or 0) <= EVERY for o in direct],
    )
    moments = [o for o in guarded if o.trial.target == "moment" and o.seen_after is not None]
    yield _share(
        "of a moment: within ten rounds", [(o.seen_after or 0) <= 10 * EVERY for o in moments]
    )
    yield _share(
        "the parameter is right", [o.is_tensor_right for o in guarded if o.seen_after is not None]
    )
    many = [o for o in guarded if o.ranks > 2 and o.seen_after is not None]
    yield _share("3 or 4 ranks: the rank is right", [o.named == o.trial.rank for o in many])
    two = [o for o in healed if o.ranks == 2 and o.seen_after is not None]
    points = [1.0 if o.named == o.trial.rank else 0.5 if o.named < 0 else 0.0 for o in two]
    wrong = sum(point == 0.0 for point in points)
    yield Row(
        name="2 ranks, after the replay: the rank is right (either counts as half)",
        ours=sum(points) / max(1, len(points)),
        unit="",
        goal=at_least(0.95),
        note=f"{len(two)} trials, {wrong} named the wrong one",
    )
    yield _share("healed: ends as the clean run, bit for bit", [o.is_as_clean for o in healed])


def _share(name: str, hits: Sequence[bool], note: str = "") -> Row:
    share = sum(hits) / len(hits) if hits else None
    words = f"{len(hits)} trials" + (f"; {note}" if note else "")
    return Row(name=name, ours=share, unit="", goal=exactly(1.0), note=words)


def _grid(guarded: Sequence[Outcome]) -> Grid:
    lines: list[tuple[Cell, ...]] = []
    for target in TARGETS:
        for bits in BITS:
            mine = [o for o in guarded if (o.trial.target, o.trial.bits) == (target, bits)]
            seen = [o for o in mine if o.seen_after is not None]
            many = [o for o in seen if o.ranks > 2]
            lines.append(
                (
                    target,
                    bits,
                    f"{len(seen)} of {len(mine)}",
                    max((o.seen_after or 0 for o in seen), default=None),
                    f"{sum(o.is_tensor_right for o in seen)} of {len(seen)}",
                    f"{sum(o.named == o.trial.rank for o in many)} of {len(many)}",
                )
            )
    return Grid(
        title="Single flipped bits: seen, after how many steps at most, and where",
        columns=("flipped", "bit", "seen", "steps", "parameter right", "rank right, 3 and 4 ranks"),
        rows=tuple(lines),
        note=f"A round has {EVERY} steps here, 50 for users. Flips that changed no state are left "
        "out. Without rollbacks.",
    )


def measure_clean(*, quick: bool) -> Iterator[Row | Grid]:
    """Yield alarms of trainings without any fault."""
    trainings: list[Healthy] = []
    for ranks in (2,) if quick else WORLDS:
        number = 20 if quick else 1000
        trainings += play("healthy", ranks=ranks, number=number, kind=Healthy)
    yield Grid(
        title="Trainings without a fault",
        columns=("training", "ranks", "checks", "alarms"),
        rows=tuple((t.kind, t.ranks, t.checks, t.alarms) for t in trainings),
        note="A check is a parameter compared between all ranks; here each is at every step.",
    )
    yield Row(
        name="alarms",
        ours=float(sum(t.alarms for t in trainings)),
        unit="",
        goal=exactly(0.0),
        note=f"{sum(t.checks for t in trainings):,} checks",
    )
