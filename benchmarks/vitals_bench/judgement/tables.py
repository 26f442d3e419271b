"""Results of the trainings: families of worlds compared with the clean run, and the goals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vitals_bench.judgement.faults import Course
from vitals_bench.judgement.jobs import KIND_CLIPS, Job, key_of
from vitals_bench.judgement.run import Clip, Outcome, Policy
from vitals_bench.judgement.worlds import WORLDS, Label
from vitals_bench.rows import Cell, Goal, Grid, Row, at_least, at_most, exactly

HALVES: Mapping[str, int] = {"set": 0, "held out": 1}
"""Seeds by their remainder of two: even ones may set thresholds, odd ones only report."""
HARMFUL = 0.3
"""Share of its gain that the unwatched run must lose by a damage that the probe is to see."""
UNTOUCHED = 95.0
"""Percent of the healthy runs that must be bit for bit those of the unwatched loop."""
MAX_WITHHELD, MAX_IN_A_ROW = 8, 2
"""Updates that a healthy run may lose, and how many of them in a row."""
MAX_MESSAGES = 1.0
"""Messages per 10,000 steps of healthy training."""
ENOUGH_SEEDS = 10
"""Unwatched runs of a world from which on their spread says something."""
WORST = 1e6
"""What a ratio is cut to: a run that ended in NaN has none."""


@dataclass(frozen=True, slots=True)
class Results:
    """All outcomes, by what was run."""

    by_job: Mapping[Job, Outcome]

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Results:
        """Return the outcomes that came to an end.

        A training of the healthy ones is left out with a seed and a clip with which it diverges
        unwatched: it is not healthy.
        """
        ended = {key_of(outcome): outcome for outcome in outcomes if not outcome.error}
        diverged = {
            job._replace(policy="none")
            for job, outcome in ended.items()
            if job.policy == "none"
            and WORLDS[job.world].label == "healthy"
            and not math.isfinite(outcome.final)
        }
        return cls({j: o for j, o in ended.items() if j._replace(policy="none") not in diverged})

    def watched(self, label: Label | None = None) -> list[Outcome]:
        """Return the runs of worlds of this label that were watched by what acts."""
        return [
            outcome
            for outcome in self.by_job.values()
            if outcome.policy not in ("none", "oracle")
            and (label is None or WORLDS[outcome.world].label == label)
        ]

    def clean(self, outcome: Outcome) -> Outcome | None:
        """Return the unwatched run of the world without its fault."""
        base = WORLDS[outcome.world].base
        return self.by_job.get(Job(base, outcome.clip, "none", outcome.seed, outcome.ranks))

    def ratio(self, outcome: Outcome) -> float | None:
        """Return the final loss over the clean run's."""
        return _ratio(outcome, self.clean(outcome))

    def to_oracle(self, outcome: Outcome) -> float | None:
        """Return the final loss over that of the run without the poisoned batches."""
        job = key_of(outcome)._replace(policy="oracle")
        return _ratio(outcome, self.by_job.get(job))

    def is_identical(self, outcome: Outcome) -> bool | None:
        """Return whether the parameters are bit for bit those of the unwatched run."""
        other = self.by_job.get(key_of(outcome)._replace(policy="none"))
        return None if other is None else other.digest == outcome.digest

    def is_beyond_seeds(self, outcome: Outcome) -> bool:
        """Return whether it ended worse than the world's unwatched runs of every seed."""
        finals = [
            other.final
            for other in self.by_job.values()
            if (other.world, other.clip, other.policy) == (outcome.world, outcome.clip, "none")
        ]
        return len(finals) >= ENOUGH_SEEDS and outcome.final > max(finals)

    def costs(self, outcome: Outcome) -> float:
        """Return the final loss of the unwatched run with the fault over the clean run's."""
        bare = self.by_job.get(key_of(outcome)._replace(policy="none"))
        return 1.0 if bare is None else self.ratio(bare) or 1.0

    def is_harmful(self, outcome: Outcome) -> bool:
        """Return whether the damage costs the unwatched run much of what it had gained."""
        job = key_of(outcome)._replace(policy="none")
        bare, clean = self.by_job.get(job), self.clean(outcome)
        if bare is None or clean is None:
            return False
        gain = clean.first - clean.final
        return not bare.final - clean.final <= HARMFUL * gain


def _ratio(outcome: Outcome, other: Outcome | None) -> float | None:
    if other is None:
        return None
    ratio = outcome.final / max(other.final, 1e-9)
    return min(ratio, WORST) if math.isfinite(ratio) else WORST


def grids(results: Results) -> Iterator[Grid]:
    """Yield a table of each label on each half of the seeds, and one of the clips."""
    if (by_clip := clip_grid(results)) is not None:
        yield by_clip
    labels: Mapping[Label, str] = {
        "healthy": "healthy trainings",
        "poisoned": "trainings with poisoned batches",
        "damaged": "trainings with a damaged state or rate",
    }
    for label, title in labels.items():
        for half, remainder in HALVES.items():
            outcomes = [o for o in results.by_job.values() if WORLDS[o.world].label == label]
            outcomes = [o for o in outcomes if o.seed % 2 == remainder]
            rows = tuple(_rows(results, label, outcomes))
            if rows:
                yield Grid(
                    title=f"{title}, seeds {half}", columns=COLUMNS, rows=rows, note=NOTES[label]
                )


def clip_grid(results: Results) -> Grid | None:
    """Return final losses without a clip, with a fixed one and an automatic one, without Vitals."""
    by_world: dict[str, dict[Clip, list[float]]] = {}
    for outcome in results.by_job.values():
        if outcome.policy != "none" or outcome.seed % 2 != HALVES["held out"]:
            continue
        clean = Job(WORLDS[outcome.world].base, None, "none", outcome.seed, outcome.ranks)
        ratio = _ratio(outcome, results.by_job.get(clean))
        if ratio is not None:
            by_world.setdefault(outcome.world, {}).setdefault(outcome.clip, []).append(ratio)
    whole = {name: clips for name, clips in by_world.items() if len(clips) == len(KIND_CLIPS)}
    rows = [
        (name, *(_text(math.exp(_mean_log(clips[clip]))) for clip in KIND_CLIPS))
        for name, clips in whole.items()
    ]
    return (
        Grid(
            title="final loss by clip, without Vitals, held-out seeds",
            columns=("training", *(f"clip: {_CLIPS[clip]}" for clip in KIND_CLIPS)),
            rows=tuple(rows),
            note="Ratios to the same training without a clip and without a fault: geometric means.",
        )
        if rows
        else None
    )


COLUMNS = (
    "worlds", "clip", "policy", "runs", "bit for bit", "median", "mean", "worst",
    "to the oracle", "withheld", "most in a run", "rollbacks", "halts", "reported", "after",
    "paged", "messages", "probe right", "wrong", "abstained",
)  # fmt: skip
NOTES: Mapping[Label, str] = {
    "healthy": "Ratios are of the final loss to that of the unwatched run of the same seed: "
    "median, geometric mean and worst. Bit for bit: parameters equal to that run's. Seeds with "
    "which a training diverges unwatched are left out. Messages include those of fleet detectors "
    "on numbers (optimizer settings, layers, weights), as a collector raises them, without "
    "those on speed and memory, which depend on the machine.",
    "poisoned": "Ratios are to the run without the fault; `to the oracle` is the median to the run "
    "that leaves exactly the poisoned batches out. Reported: runs with a finding or decision from "
    "the fault on, also of a fleet detector on numbers, and its median delay in steps.",
    "damaged": "Ratios are to the run without the fault. The policy `none` is that of no monitor.",
}


def _rows(
    results: Results, label: Label, outcomes: Sequence[Outcome]
) -> Iterator[tuple[Cell, ...]]:
    skipped = ("none",) if label == "healthy" else ()
    families = dict.fromkeys(WORLDS[o.world].family for o in outcomes)
    for family in [*families, "all"]:
        for clip in KIND_CLIPS:
            for policy in dict.fromkeys(o.policy for o in outcomes):
                chosen = [
                    o
                    for o in outcomes
                    if o.clip == clip
                    and o.policy == policy
                    and family in ("all", WORLDS[o.world].family)
                ]
                if chosen and policy not in skipped:
                    yield _line(results, family, chosen)


_FAULTY: tuple[Label, ...] = ("poisoned", "damaged")
_WITH_CLIPS: Mapping[Clip, str] = {
    1.0: "with a clip", "auto": "with an automatic clip", None: "without a clip"
}  # fmt: skip
_GOALS_OF_FAULTS: tuple[tuple[Course, Policy, Goal], ...] = (
    ("NaN", "guard", at_most(1.02)),
    ("NaN", "heal+probe", at_most(1.02)),
    ("poison", "guard", at_most(1.10)),
    ("poison", "heal+probe", at_most(1.10)),
    ("damage", "heal+probe", at_most(1.05)),
)
"""Faults and policies whose geometric mean of final losses has a goal."""
_COSTLY = 1.10
"""Final loss to the clean run's from which a fault must be reported."""
_CLIPS: Mapping[Clip, str] = {1.0: "yes", None: "no", "auto": "auto"}


def _line(results: Results, family: str, outcomes: Sequence[Outcome]) -> tuple[Cell, ...]:
    ratios = [ratio for o in outcomes if (ratio := results.ratio(o)) is not None]
    oracle = [ratio for o in outcomes if (ratio := results.to_oracle(o)) is not None]
    same = [same for o in outcomes if (same := results.is_identical(o)) is not None]
    right, wrong, abstained = verdicts(outcomes)
    after = [o.reported for o in outcomes if o.reported is not None]
    return (
        family, _CLIPS[outcomes[0].clip], outcomes[0].policy, len(outcomes),
        f"{sum(same)}/{len(same)}" if same else None,
        *(_three(statistics.median(ratios), math.exp(_mean_log(ratios)), max(ratios))
          if ratios else (None, None, None)),
        _text(statistics.median(oracle)) if oracle else None,
        sum(o.withheld for o in outcomes), max(o.withheld for o in outcomes),
        sum(len(o.rollbacks) for o in outcomes), sum(bool(o.halted) for o in outcomes),
        *((len(after), statistics.median(after)) if after else (0, None)),
        sum(bool(o.pages) for o in outcomes), sum(sum(o.messages.values()) for o in outcomes),
        right, wrong, abstained,
    )  # fmt: skip


def _mean_log(ratios: Sequence[float]) -> float:
    return statistics.fmean(math.log(max(ratio, 1e-9)) for ratio in ratios)


def _three(*ratios: float) -> tuple[str, ...]:
    return tuple(_text(ratio) for ratio in ratios)


def _text(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 100 else f"{ratio:.3g}"


def verdicts(outcomes: Iterable[Outcome]) -> tuple[int, int, int]:
    """Return in how many trainings the verdict on the state was right, wrong, and missing.

    The first verdict of a training counts. For a jump of the rate it is requested before any
    training with it, so these verdicts do not count.
    """
    right = wrong = abstained = 0
    for outcome in outcomes:
        asked = [r for r in outcome.readings if r[1] in ("row", "nonfinite", "evaluation")]
        answers = [(verdict, damaged) for _, _, verdict, _, damaged in asked]
        first = next((answer for answer in answers if answer[0] != "abstained"), None)
        if first is not None:
            is_right = (first[0] == "state") == first[1]
            right, wrong = right + is_right, wrong + (not is_right)
        elif asked:
            abstained += 1
    return right, wrong, abstained


# ------------------------------------------------------------------------------------- goals


def goals(results: Results) -> Iterator[Row]:
    """Yield what healthy and faulty trainings must reach, on each half of the seeds."""
    for half, remainder in HALVES.items():
        part = Results({job: o for job, o in results.by_job.items() if job.seed % 2 == remainder})
        yield from _healthy_goals(part, half)
        yield from _faulty_goals(part, half)


def _healthy_goals(results: Results, half: str) -> Iterator[Row]:
    healthy = results.watched("healthy")
    if not healthy:
        return
    same = [same for o in healthy if (same := results.is_identical(o)) is not None]
    touched = [o for o in healthy if results.is_identical(o) is False]
    beyond = [o for o in healthy if o.withheld > MAX_WITHHELD or o.longest > MAX_IN_A_ROW]
    worse = [o for o in healthy if results.is_identical(o) is False and results.is_beyond_seeds(o)]
    if same:
        name = f"healthy, {half}: bit for bit untouched"
        yield _row(name, _share(same), "%", at_least(UNTOUCHED), _names(touched))
    yield _row(
        f"healthy, {half}: more than {MAX_WITHHELD} withheld, or {MAX_IN_A_ROW} in a row",
        len(beyond), "runs", exactly(0.0), _names(beyond),
    )  # fmt: skip
    yield _row(
        f"healthy, {half}: runs touched that ended worse than every seed's",
        len(worse), "runs", exactly(0.0), _names(worse),
    )  # fmt: skip
    back = [o for o in healthy if o.rollbacks]
    halted = [o for o in healthy if o.halted]
    yield _row(f"healthy, {half}: rolled back", len(back), "runs", exactly(0.0), _names(back))
    yield _row(f"healthy, {half}: halted", len(halted), "runs", exactly(0.0), _names(halted))
    paged = [o for o in healthy if o.pages]
    yield _row(f"healthy, {half}: paged", len(paged), "runs", exactly(0.0), _names(paged))
    messages = 1e4 * sum(sum(o.messages.values()) for o in healthy)
    name = f"healthy, {half}: messages per 10,000 steps"
    loud = [o for o in healthy if o.messages]
    steps = sum(o.attempted for o in healthy)
    yield _row(name, messages / max(1, steps), "", at_most(MAX_MESSAGES), _names(loud))


def _faulty_goals(results: Results, half: str) -> Iterator[Row]:
    faulty = [o for label in _FAULTY for o in results.watched(label)]
    for course, policy, goal in _GOALS_OF_FAULTS:
        for clip, with_clip in _WITH_CLIPS.items():
            outcomes = [
                o
                for o in faulty
                if (WORLDS[o.world].course, o.policy, o.clip) == (course, policy, clip)
            ]
            ratios = [ratio for o in outcomes if (ratio := results.ratio(o)) is not None]
            if ratios:
                text = (
                    f"{course} {with_clip}, {policy}, {half}: final loss to the clean run's, mean"
                )
                yield _row(text, math.exp(_mean_log(ratios)), "", goal, _worst(results, outcomes))
    yield from _report_goals(results, half)
    harmful = [o for o in results.watched("damaged") if results.is_harmful(o)]
    innocent = [o for o in results.watched() if WORLDS[o.world].label != "damaged"]
    for name, outcomes in (("damage", harmful), ("healthy or poisoned", innocent)):
        right, wrong, _ = verdicts(outcomes)
        if right + wrong:
            share = 100.0 * right / (right + wrong)
            yield _row(f"probe's verdict right, {name}, {half}", share, "%", at_least(95.0))


def _report_goals(results: Results, half: str) -> Iterator[Row]:
    """Yield how much of what costs more than a tenth of the final loss is paged and reported."""
    costly = [o for o in results.watched() if results.costs(o) > _COSTLY]
    paging = [o for o in costly if WORLDS[o.world].course == "damage" and "guard+" in o.policy]
    # What was withheld or clipped did no damage.
    paging = [o for o in paging if (results.ratio(o) or 1.0) > _COSTLY]
    if paging:
        silent = [o for o in paging if not o.pages]
        name = f"damage above +10 %, {half}: paged in guard with a probe"
        yield _row(
            name, _share([bool(o.pages) for o in paging]), "%", at_least(100.0), _names(silent)
        )
    slow = [o for o in costly if WORLDS[o.world].course == "slow"]
    if slow:
        unreported = [o for o in slow if o.reported is None]
        name = f"slow ruin above +10 %, {half}: reported"
        share = _share([o.reported is not None for o in slow])
        yield _row(name, share, "%", at_least(90.0), _names(unreported))


def _worst(results: Results, outcomes: Sequence[Outcome]) -> str:
    """Return the worst run as text."""
    worst = max(outcomes, key=lambda o: results.ratio(o) or 0.0)
    return f"worst: {_text(results.ratio(worst) or 0.0)}, {worst.world} in {worst.policy}"


def _row(name: str, value: float | None, unit: str, goal: Goal, note: str = "") -> Row:
    return Row(name=name, ours=value, unit=unit, goal=goal, note=note)


def _share(values: Sequence[bool]) -> float | None:
    return 100.0 * sum(values) / len(values) if values else None


def _names(outcomes: Sequence[Outcome]) -> str:
    names = list(dict.fromkeys(o.world for o in outcomes))
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
