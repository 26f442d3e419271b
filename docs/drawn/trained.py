"""Detector results on real trainings with legitimate loss increases, and on a fault in each.

The trainings' logs are in ``real/`` next to this file. The benchmark writes them
(`benchmarks/vitals_bench/judgement/series.py`); ``python -m docs.drawn.trained`` re-creates them.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from docs.drawn.svg import Line, Mark, Panel
from trainvitals.detect.detector_set import DetectorSet
from trainvitals.detect.outliers import LossKind
from trainvitals.judged_log import EXPECTED_STEPS, LoggedStep, judge_history
from trainvitals.policy import JudgeConfig
from trainvitals.records import Finding, StepRecord

FOLDER = Path(__file__).parent / "real"
FAULT = 400
"""Step at which the damaged twin of each training loses the second moments of Adam."""
AFTER = 30
"""Steps after the fault within which it must be found."""
EPISODE = 20
"""Maximum distance of a detector's findings in one episode, in steps."""
BEFORE = 100
"""Steps drawn before the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A real small training of the page."""

    name: str
    """Name of its file and its image."""
    of: str
    """Its name in the benchmarks."""
    seed: int = 0
    """Random seed; for the GANs, the first one whose fault shows in loss or norm."""
    title: str
    about: str
    loss_kind: LossKind = "minimize"
    change: int = -1
    """Step of the announced change; -1 for none."""
    declared: str = ""
    """Declaration in the run."""
    every: int = 2
    """Draw every Nth step."""
    log: bool = False
    """Draw the logarithm of the loss."""


TRAININGS = (
    Training(
        name="rl",
        of="ppo",
        title="Reinforcement learning",
        about="PPO learns to balance a pole; its loss is the policy loss plus the value loss, and "
        "rises while the episodes get longer.",
        loss_kind="rl",
        declared="loss_kind=rl",
    ),
    Training(
        name="gan",
        of="gan",
        seed=1,
        title="GAN",
        about="A generator learns a ring of eight points; the loss is the sum of both players' "
        "losses and is not minimized.",
        loss_kind="adversarial",
        declared="loss_kind=adversarial",
    ),
    Training(
        name="curriculum",
        of="curriculum",
        title="Curriculum",
        about="A small GPT trains on an easily predicted series, and from step 250 on real text.",
        change=250,
        declared="expect before step 250",
    ),
    Training(
        name="optimizer_spikes",
        of="spikes",
        title="Large optimizer spikes",
        about="AdamW at a learning rate of 3e-2 on four repeating batches: the optimizer itself "
        "causes spikes of one step to dozens of steps, up to 80 times the usual loss, and recovers "
        "each time. There is nothing to declare.",
        log=True,
    ),
)


def read(training: Training, *, damaged: bool = False) -> list[StepRecord]:
    """Return the records of a training, or of its damaged twin until some steps after the fault."""
    with (FOLDER / f"{training.name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    if damaged:
        rows = rows[: FAULT + 2 * AFTER]
    columns = ["damaged_" if damaged and int(row["step"]) >= FAULT else "" for row in rows]
    return [
        StepRecord(
            step=int(row["step"]),
            attempt=1,
            loss=float(row[f"{column}loss"]),
            grad_norm=float(row[f"{column}grad_norm"]),
        )
        for row, column in zip(rows, columns, strict=True)
    ]


@cache
def heard(training: Training, *, declared: bool, damaged: bool = False) -> tuple[Finding, ...]:
    """Return the findings of a rank's detectors in a training: the first of each episode."""
    detectors = DetectorSet(loss_kind=training.loss_kind if declared else "minimize")
    findings: list[Finding] = []
    for record in read(training, damaged=damaged):
        if declared and record.step == training.change:
            detectors.rebaseline(EXPECTED_STEPS)
        findings += detectors.update(record)
    return tuple(_episodes(findings))


def _episodes(findings: Iterable[Finding]) -> Iterator[Finding]:
    last: dict[tuple[str, str], int] = {}
    for finding in findings:
        key = (finding.detector, finding.kind)
        if key not in last or finding.step - last[key] > EPISODE:
            yield finding
        last[key] = finding.step


def is_found(training: Training, detector: str) -> bool:
    """Return whether a detector finds the fault in a run with its declarations."""
    return any(
        finding.detector == detector and FAULT <= finding.step <= FAULT + AFTER
        for finding in heard(training, declared=True, damaged=True)
    )


@cache
def withheld(training: Training, *, declared: bool, clips: bool = True) -> int:
    """Return the number of withheld updates in the healthy training."""
    log = [LoggedStep(r.step, r.step, r.loss, r.grad_norm) for r in read(training)]
    config = JudgeConfig(loss_kind=training.loss_kind if declared else "minimize")
    expected = [training.change] if declared and training.change >= 0 else []
    history = judge_history(log, config=config, expected=expected, clips=clips)
    return sum(judged.record.withheld for judged in history)


# ------------------------------------------------------------------------------------ drawing


def panels(training: Training) -> list[Panel]:
    """Return the training's panels: without declarations, with them, and with the fault."""
    healthy = read(training)
    drawn = [_panel(training, "nothing is declared", healthy, heard(training, declared=False))]
    if training.declared:
        findings = heard(training, declared=True)
        drawn.append(_panel(training, training.declared, healthy, findings))
    findings = [
        finding
        for finding in heard(training, declared=True, damaged=True)
        if FAULT <= finding.step <= FAULT + AFTER
    ]
    damaged = read(training, damaged=True)[FAULT - BEFORE :]
    title = f"a fault at step {FAULT}"
    return [*drawn, _panel(training, title, damaged, findings, column="grad_norm")]


def _panel(
    training: Training,
    title: str,
    records: Sequence[StepRecord],
    findings: Sequence[Finding],
    *,
    column: Literal["loss", "grad_norm"] = "loss",
) -> Panel:
    heights = {record.step: getattr(record, column) for record in records}
    spoken = {finding.step for finding in findings}
    every = training.every if column == "loss" else 1
    kept = [step for step in heights if step % every == 0 or step in spoken]
    label = {"loss": "loss", "grad_norm": "gradient norm"}[column]
    return Panel(
        title=_with_counts(title, findings),
        x_label="step",
        y_label=label,
        lines=[Line(label=label, points=[(step, heights[step]) for step in kept])],
        marks=[Mark(x=f.step, y=heights[f.step], level=f.level, word="") for f in findings],
        findings=tuple(findings),
        log=training.log or column == "grad_norm",
    )


def _with_counts(title: str, findings: Sequence[Finding]) -> str:
    """Return the title with the counts of findings: marks are too close for labels."""
    counts = Counter(finding.kind.replace("_", " ") for finding in findings)
    words = ", ".join(f"{kind} x{n}" if n > 1 else kind for kind, n in counts.items())
    return f"{title}: {words or 'silent'}"


# ------------------------------------------------------------------------------ the trainings


def write() -> None:
    """Train, and write the logs: half a minute."""
    from vitals_bench.judgement.series import make_log

    FOLDER.mkdir(exist_ok=True)
    for training in TRAININGS:
        healthy = make_log(training.of, "", training.seed).points
        damaged = make_log(training.of, "moments", training.seed).points
        with (FOLDER / f"{training.name}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["step", "loss", "grad_norm", "damaged_loss", "damaged_grad_norm"])
            for a, b in zip_longest(healthy, damaged):
                twin = (b.loss, b.grad_norm) if FAULT <= a.step < FAULT + 2 * AFTER else ()
                numbers = [f"{number:.4g}" for number in (a.loss, a.grad_norm, *twin)]
                writer.writerow([a.step, *numbers, *[""] * (4 - len(numbers))])


if __name__ == "__main__":
    write()
