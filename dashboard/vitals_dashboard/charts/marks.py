"""Events drawn on the curves: each kind has its shape, color and name.

Marks are in rows above and below the curves: they never stretch the curve's axis. Marks of one kind
that are too close are combined into one, which shows their number: here for the widest screen, and
in the browser again for its width.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from trainvitals.records import Decision
from trainvitals.views import AlertView, AnnotationView, CheckpointView, DecisionView, SeriesReply
from vitals_dashboard import formatting
from vitals_dashboard.charts.scale import STEPS, StepScale
from vitals_dashboard.theme import ACTIONS, NON_FINITE_COLOUR

PARTS = 800
"""The visible steps are divided into at least this many parts: marks of one kind in a part are
one."""
MAX_TEXT = 320


@dataclass(frozen=True, slots=True)
class MarkLook:
    """Shape, color and name of one kind of mark."""

    word: str
    colour: str
    symbol: str
    lane: int
    """Its row above the curves, 0 the lowest; -1 is below them."""
    line: str = ""
    """Style of the vertical line through the curves; empty: none."""
    width: float = 1.0
    size: int = 10


DECISIONS = {
    action: MarkLook(look.word, look.colour, look.symbol, lane=0, line=look.line, width=look.width)
    for action, look in ACTIONS.items()
}
ALERT = MarkLook("alert", "#D55E00", "bell", lane=1)
NOTE = MarkLook("note", "#56B4E9", "bubble", lane=2, line="dotted")
CHECKPOINT = MarkLook("checkpoint", "#009E73", "flag", lane=3, size=9)
LR_CUT = MarkLook("LR cut", "#7A5C00", "down", lane=0, line="dashed")
NON_FINITE = MarkLook("non-finite", NON_FINITE_COLOUR, "cross", lane=-1, size=9)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartMark:
    """One event."""

    look: MarkLook
    step: int
    place: float
    say: Callable[[], str]
    """Its text: computed only if it is drawn, because most of thousands are merged."""
    num: int = 1
    """Events that it stands for."""


def mark_text(view: DecisionView) -> str:
    """Describe a decision for its mark on the curves: action, step, and reason."""
    decision = view.decision
    look = ACTIONS[decision.action]
    done = look.word if decision.acted else f"{look.word}  (observed, not done)"
    where = f" to step {decision.rollback_to_step:,}" if decision.rollback_to_step >= 0 else ""
    return formatting.plain(f"{done}{where} at step {decision.step:,}: {decision.reason}", MAX_TEXT)


def decision_marks(decisions: Iterable[DecisionView], scale: StepScale = STEPS) -> list[ChartMark]:
    """Return a mark for each decision that did something, and for each cut of the learning rate."""
    shown_views = [view for view in decisions if view.decision.action in DECISIONS]
    places = scale.x_of([view.decision.step for view in shown_views])
    if scale.axis == "time":  # a step that was trained twice has two times, and this is its own
        places = [view.time_unix_ns / 1_000_000 for view in shown_views]
    marks = [
        ChartMark(
            look=DECISIONS[view.decision.action],
            step=view.decision.step,
            place=x,
            say=cache(partial(mark_text, view)),
        )
        for view, x in zip(shown_views, places, strict=True)
    ]

    def say(cut: _LrCut) -> str:
        return f"learning rate x {cut.factor:g} from step {cut.step:,}"

    cuts = [
        _lr_cut(view.decision)
        for view in shown_views
        if view.decision.acted and view.decision.lr_factor != 1.0
    ]
    return [*marks, *_place_marks(LR_CUT, cuts, scale, say)]


class _LrCut(NamedTuple):
    step: int
    """From which on the rate is another."""
    factor: float


def _lr_cut(decision: Decision) -> _LrCut:
    """Return the cut of the learning rate that a decision made, for its mark on the curves."""
    back_to = decision.rollback_to_step
    return _LrCut(back_to if back_to >= 0 else decision.step, decision.lr_factor)


def alert_marks(alerts: Iterable[AlertView], scale: StepScale = STEPS) -> list[ChartMark]:
    """Return a mark on the curves for each alert that fired at a step."""

    def say(alert: AlertView) -> str:
        return f"{alert.name} ({alert.state}) at step {alert.step:,}: {alert.summary}"

    of_steps = [alert for alert in alerts if alert.step >= 0]
    return _place_marks(ALERT, of_steps, scale, say, [alert.started_unix_ns for alert in of_steps])


def checkpoint_marks(
    checkpoints: Iterable[CheckpointView], scale: StepScale = STEPS
) -> list[ChartMark]:
    """Return a mark on the curves for each checkpoint and snapshot, with its state."""

    def say(checkpoint: CheckpointView) -> str:
        return (
            f"{checkpoint.state} state of step {checkpoint.step:,} in {checkpoint.where},"
            f" {checkpoint.checkpoint_id}"
        )

    every = list(checkpoints)
    return _place_marks(
        CHECKPOINT, every, scale, say, [checkpoint.time_unix_ns for checkpoint in every]
    )


def note_marks(annotations: Iterable[AnnotationView], scale: StepScale = STEPS) -> list[ChartMark]:
    """Return a mark on the curves for each note of a user or of the training itself."""

    def say(note: AnnotationView) -> str:
        return f"step {note.step:,}, {note.by or 'the training'}: {note.text}"

    return _place_marks(NOTE, list(annotations), scale, say)


def _place_marks(
    look: MarkLook,
    happened: Sequence[Any],
    scale: StepScale,
    say: Callable[[Any], str],
    times_unix_ns: Sequence[int] = (),
) -> list[ChartMark]:
    """Return a chart mark for each event, at its step or, along time, at its time."""
    places = scale.x_of([event.step for event in happened])
    if scale.axis == "time" and times_unix_ns:
        places = [time / 1e6 for time in times_unix_ns]
    return [
        ChartMark(look=look, step=event.step, place=x, say=cache(partial(say, event)))
        for event, x in zip(happened, places, strict=True)
    ]


def nonfinite_marks(
    replies: Sequence[SeriesReply],
    scale: StepScale = STEPS,
    attempts: Mapping[int, int] = MappingProxyType({}),
) -> list[ChartMark]:
    """Return a mark on the curves for every non-finite step of the series.

    ``attempts`` has the numbers of attempts by id; a mark names its own if it is known.
    """
    seen: dict[tuple[int, int, str, str], float] = {}
    for reply in replies:
        places = scale.x_of([mark.step for mark in reply.nonfinite])
        x_by_step = dict(
            zip(zip(reply.step, reply.attempt, strict=True), scale.xs(reply), strict=True)
        )
        for mark, x in zip(reply.nonfinite, places, strict=True):
            where = x_by_step.get((mark.step, mark.attempt), x)
            number = attempts.get(mark.attempt, 0)
            whose = f"{reply.source}, attempt {number}" if number else reply.source
            whose += ", rolled back" if number and reply.branch == "discarded" else ""
            seen.setdefault((mark.step, mark.attempt, mark.kind, whose), where)
    return [
        ChartMark(
            look=NON_FINITE,
            step=step,
            place=x,
            say=partial("{1} at step {0:,} ({2})".format, step, kind, whose),
        )
        for (step, _, kind, whose), x in sorted(seen.items())
    ]


def merge_marks(marks: Sequence[ChartMark], width: float) -> list[ChartMark]:
    """Return a chart's marks, sorted, with indistinguishable ones of one kind merged.

    Merged groups change only where marks are added, until ``width`` has doubled: marks in the
    browser stay valid. ``width`` is the visible width along x.
    """
    apart = 2.0 ** math.ceil(math.log2(width / PARTS)) if width > 0 else 1.0
    groups: dict[tuple[str, int], list[ChartMark]] = {}
    for mark in sorted(marks, key=lambda m: m.place):
        groups.setdefault((mark.look.word, math.floor(mark.place / apart)), []).append(mark)
    return [_merge_chart_marks(group) for group in groups.values()]


def _merge_chart_marks(group: Sequence[ChartMark]) -> ChartMark:
    """Merge marks at nearly the same place of a chart into one that lists or counts them."""
    first = group[0]
    if len(group) == 1:
        return first
    steps = [mark.step for mark in group]
    text = "; ".join(mark.say() for mark in group[:2])
    if len(group) > 2:
        text = (
            f"{len(group):,} times {first.look.word}, steps {min(steps):,} to {max(steps):,};"
            f" the first: {first.say()}"
        )
    return ChartMark(
        look=first.look, step=first.step, place=first.place, say=lambda: text, num=len(group)
    )
