"""Describes the losses along a line: sharpness, width, whether the middle is a minimum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vitals_plugins.lab.landscape.surface import Losses

_EQUAL = 1e-6
"""Share of the loss in the middle: a smaller decrease is rounding."""
_BARRIER = 0.01
"""Share of the larger loss of the two ends: a smaller rise between them is not a barrier."""


class LineFacts(NamedTuple):
    """The loss along one direction through the middle, which is the unmoved model."""

    slope: float | None
    """Its first derivative in the middle, from the neighbors; None if one is non-finite."""
    curvature: float | None
    """Its second derivative, likewise."""
    low: float | None
    """Start of the interval in which the loss stays within a share of the middle's; None without a
    share."""
    high: float | None
    is_open: tuple[bool, bool]
    """Whether the interval reaches the first position, and the last."""
    lowest_at: float
    lowest: float
    is_minimum: bool
    """Whether no position has a lower loss than the middle."""


def line_facts(places: Sequence[float], losses: Sequence[float], within: float) -> LineFacts | None:
    """Return facts about the loss along a landscape's line; None if its middle is non-finite.

    ``places`` are rising and evenly spaced, one of them 0; ``within`` is a share of the middle's
    loss.
    """
    middle = min(range(len(places)), key=lambda i: abs(places[i]))
    centre = losses[middle]
    if not math.isfinite(centre):
        return None
    slope = curvature = None
    around = losses[max(0, middle - 1) : middle + 2]
    if len(around) == 3 and all(map(math.isfinite, around)):
        by = (places[middle + 1] - places[middle - 1]) / 2
        slope = (around[2] - around[0]) / (2 * by)
        curvature = (around[2] - 2 * centre + around[0]) / by**2
    low = high = None
    is_open = (False, False)
    if centre:
        most = centre + within * abs(centre)
        down, up = range(middle, -1, -1), range(middle, len(places))
        (low, is_low_open), (high, is_high_open) = (
            _distance_below_limit(places, losses, way, most) for way in (down, up)
        )
        is_open = (is_low_open, is_high_open)
    finite = [i for i in range(len(places)) if math.isfinite(losses[i])]
    lowest = min(finite, key=lambda i: (losses[i], abs(places[i])))
    is_minimum = losses[lowest] >= centre - _EQUAL * abs(centre)
    return LineFacts(
        slope, curvature, low, high, is_open, places[lowest], losses[lowest], is_minimum
    )


def _distance_below_limit(
    places: Sequence[float], losses: Sequence[float], way: range, most: float
) -> tuple[float, bool]:
    """Return the distance for which a landscape's loss stays below a limit; whether to the end."""
    before = way[0]
    for at in way:
        if math.isfinite(losses[at]) and losses[at] <= most:
            before = at
            continue
        if not math.isfinite(losses[at]):
            return places[before], False
        part = (most - losses[before]) / (losses[at] - losses[before])
        return places[before] + part * (places[at] - places[before]), False
    return places[before], True


class PathFacts(NamedTuple):
    """The loss along the straight line from one state to another."""

    begin: float
    end: float
    barrier: float | None
    """Height of the loss above the higher end's, 0 if it is not above; None if an end is
    non-finite."""
    highest_at: float
    highest: float


def path_facts(places: Sequence[float], losses: Sequence[float]) -> PathFacts:
    """Return facts about the loss on a landscape's path, from 0 to 1."""
    begin, end = losses[0], losses[-1]
    if not (math.isfinite(begin) and math.isfinite(end)):
        return PathFacts(begin, end, None, math.nan, math.nan)
    finite = [i for i in range(len(places)) if math.isfinite(losses[i])]
    top = max(finite, key=lambda i: losses[i])
    return PathFacts(begin, end, losses[top] - max(begin, end), places[top], losses[top])


def num_nonfinite(losses: Losses) -> int:
    """Return how many points of a loss landscape are NaN or infinite."""
    return sum(not math.isfinite(loss) for row in losses for loss in row)


def middle_lines(losses: Losses) -> list[tuple[float, ...]]:
    """Return a landscape's losses along each direction through the middle."""
    if len(losses) == 1:
        return [losses[0]]
    middle = len(losses) // 2
    return [losses[middle], tuple(row[middle] for row in losses)]


# ------------------------------------------------------------------------------------- text


def landscape_sentences(places: Sequence[float], losses: Losses, within: float) -> Iterator[str]:
    """Yield sentences about the loss around a checkpoint."""
    lines = middle_lines(losses)
    for number, line in enumerate(lines, 1):
        facts = line_facts(places, line, within)
        if facts is None:
            yield (
                f"The loss at the checkpoint itself is {line[len(line) // 2]}: nothing else can be "
                "computed. Do checkpoint, entry and batches belong to the run?"
            )
            break
        if number == 1:
            yield f"The loss at the checkpoint is {line[len(line) // 2]:.4g}."
        yield from _line_sentences(facts, number, line[len(line) // 2], within)
    yield from _nonfinite_points_sentence(losses)


def _line_sentences(facts: LineFacts, number: int, centre: float, within: float) -> Iterator[str]:
    """Yield sentences about the curvature, slope and width along one direction of a landscape."""
    along = f"Along direction {number}"
    if facts.curvature is None or facts.slope is None:
        yield f"{along} the loss next to the checkpoint is not finite: the curvature is unknown."
    else:
        yield f"{along} the curvature is {facts.curvature:.4g} and the slope {facts.slope:.3g}."
    if facts.low is None or facts.high is None:
        yield "The loss at the checkpoint is 0, so a width as a share of it is undefined."
    else:
        width = f"{'at least ' if any(facts.is_open) else ''}{facts.high - facts.low:.3g}"
        yield (
            f"{along} the loss stays within {100 * within:g} % of the checkpoint's from "
            f"{facts.low:+.3g} to {facts.high:+.3g}: a width of {width}."
        )
    if facts.is_minimum:
        yield f"The checkpoint is the lowest of the points along direction {number}."
    else:
        yield (
            f"The checkpoint is not a minimum along direction {number}: the loss is lowest at "
            f"{facts.lowest_at:+.3g}, {facts.lowest:.4g} instead of {centre:.4g}."
        )


def path_sentences(places: Sequence[float], losses: Losses) -> Iterator[str]:
    """Yield sentences about the loss on a landscape's path between two states."""
    facts = path_facts(places, losses[0])
    yield f"The loss is {facts.begin:.4g} at the beginning and {facts.end:.4g} at the end."
    if facts.barrier is None:
        yield "One end is not finite, so the barrier is unknown."
    elif facts.barrier > _BARRIER * max(abs(facts.begin), abs(facts.end)):
        yield (
            f"Between them is a barrier: the loss rises to {facts.highest:.4g} at "
            f"{facts.highest_at:.3g} of the way, {facts.barrier:.3g} above the higher end."
        )
    else:
        yield "There is no barrier between them: on the way the loss is not above the higher end."
    yield from _nonfinite_points_sentence(losses)


def _nonfinite_points_sentence(losses: Losses) -> Iterator[str]:
    """Yield a sentence about the non-finite points of a loss landscape, if it has any."""
    bad = num_nonfinite(losses)
    if bad:
        total = sum(map(len, losses))
        yield f"{bad:,} of {total:,} points are not finite (NaN or infinite)."
