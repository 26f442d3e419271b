"""Which finite outliers are withheld: followers in a row, within bounds. Pure.

The first outlier in a row is left to the loop's clip: one batch, clipped, does no harm, and nothing
tells a hard batch from a bad one yet. Its followers are withheld, which changes no weight, until
the probe has answered or so many were withheld that they are the new level. Where the loop does
not clip, the first is withheld too, until such outliers are seen to recur, or a few firsts were
withheld: batches that take turns would else be frozen out one by one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from trainvitals.detect.outliers import Level, Limits
from trainvitals.policy.state import Group, LadderConfig, LadderState, Outlier
from trainvitals.records import StepRecord

MAX_RECENT = 128
MAX_ACCEPTED = 32
_TWICE = 2.0


class Withholding(NamedTuple):
    """What the device is told beside the limits."""

    first: bool = False
    """Whether the first outlier in a row is withheld as well."""
    left: int = 0
    """Outliers that may still be withheld."""


class DeviceRule(msgspec.Struct, frozen=True):
    """What the device knows of the steps before: it need not wait for the host."""

    in_row: bool = False
    """Whether the step before was a finite outlier, or stood behind one and was not finite."""

    def judge(
        self, record: StepRecord, limits: Limits, words: Withholding, *, acts: bool
    ) -> tuple[StepRecord, DeviceRule]:
        """Return the record as the device completes it, and what it knows for the next step.

        This is ``trainer_hooks.step.verdict.judge_on_device`` in plain numbers, for logs and tests.
        """
        loss_limit = limits.loss if record.loss_limit is None else record.loss_limit
        norm_limit = limits.grad_norm if record.grad_norm_limit is None else record.grad_norm_limit
        record = replace(record, loss_limit=loss_limit, grad_norm_limit=norm_limit)
        bad = bool(record.nonfinite_ranks) or _not_finite(record.loss)
        bad = bad or (_not_finite(record.grad_norm) and not record.overflow)
        outlier = is_outlier(record)
        withheld = outlier and words.left > 0 and (self.in_row or words.first)
        stopped = bad or record.overflow or withheld
        in_row = outlier or (self.in_row and (bad or record.overflow or bool(record.failed_ranks)))
        skipped = record.skipped or (acts and stopped) or record.overflow
        return replace(record, withheld=withheld, skipped=skipped), DeviceRule(in_row)


def _not_finite(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def is_outlier(record: StepRecord) -> bool:
    """Return whether a finite loss or norm was above the limit in force; unknown is no outlier."""
    if record.failed_ranks:
        return False
    return _is_above(record.loss, record.loss_limit) or (
        _is_above(record.grad_norm, record.grad_norm_limit) and not record.overflow
    )


def _is_above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and limit < value < math.inf


# ------------------------------------------------------------------------------ for the device


def accepted_level(levels: tuple[Level, ...]) -> Level:
    """Return the values up to which something was accepted, of both metrics together."""
    return Level(
        max((level.loss for level in levels), default=0.0),
        max((level.grad_norm for level in levels), default=0.0),
    )


def limits_in_force(limits: Limits, state: LadderState, config: LadderConfig) -> Limits:
    """Return the limits with what was accepted and what recurs.

    Up to a recurring level everything passes, its echoes too: a batch that was applied without a
    clip makes the ordinary ones after it outliers, and these bring the weights back. A short group
    passes up to twice that level.
    """
    facts = state.facts
    if facts.recurring is None and not facts.accepted:
        return limits
    raised = accepted_level(facts.accepted)
    if facts.recurring is not None:
        times = _TWICE if _may_recur(state, config) else 1.0
        raised = Level(
            max(raised.loss, times * facts.recurring.loss),
            max(raised.grad_norm, times * facts.recurring.grad_norm),
        )
    return Limits(_raised(limits.loss, raised.loss), _raised(limits.grad_norm, raised.grad_norm))


def _raised(limit: float | None, least: float) -> float | None:
    return None if limit is None else max(limit, least)


def _may_recur(state: LadderState, config: LadderConfig) -> bool:
    """Whether one more outlier would still be one of a short group."""
    if not state.groups:
        return True
    group = state.groups[-1]
    return state.facts.clock - group.last > config.group_steps or group.num < config.group_size


def withholding(
    state: LadderState, config: LadderConfig, *, clips: bool, is_warming_up: bool = False
) -> Withholding:
    """Return whether the first in a row is withheld, and how many there may be.

    What is absurd is stopped however the loop clips. Non-finite steps are another matter: they are
    stopped always. The last one that is left goes to a follower: behind a first, the device has
    judged one more step before this is told of it.
    """
    if not (state.row or state.withheld):
        first = (is_warming_up or not clips) and config.max_withheld > 1
        return Withholding(first, config.max_withheld)
    if state.row and state.row[0].step == state.passes_since:
        return Withholding()
    in_row = sum(outlier.withheld for outlier in state.row)
    horizon = state.facts.clock - config.withheld_window
    in_window = sum(time > horizon for time in state.withheld)
    left = max(0, config.max_withheld - max(in_row, in_window))
    firsts = sum(time > horizon for time in state.firsts)
    first = is_warming_up or (not clips and firsts < config.max_firsts)
    return Withholding(first=first and left > 1, left=left)


# -------------------------------------------------------------------------------- for the host


def note_outlier(state: LadderState, record: StepRecord, config: LadderConfig) -> LadderState:
    """Take an outlier into the row, the groups and the count of what was withheld."""
    clock = state.facts.clock
    outlier = Outlier(record.step, record.loss, record.grad_norm, record.withheld)
    num = len(state.row) + 1
    unhealthy = record.withheld or num > 1
    return replace(
        state,
        row=(*state.row, outlier),
        groups=with_outlier(state, record, config),
        withheld=_recent(state.withheld, state, config) + ((clock,) if record.withheld else ()),
        firsts=_recent(state.firsts, state, config)
        + ((clock,) if record.withheld and num == 1 else ()),
        recent=(*state.recent, outlier)[-MAX_RECENT:],
        last_flagged=record.step,
        last_unhealthy_step=record.step if unhealthy else state.last_unhealthy_step,
    )


def _recent(times: tuple[int, ...], state: LadderState, config: LadderConfig) -> tuple[int, ...]:
    horizon = state.facts.clock - config.withheld_window
    return tuple(time for time in times if time > horizon)


def with_outlier(state: LadderState, record: StepRecord, config: LadderConfig) -> tuple[Group, ...]:
    """Return the groups with one more outlier in the newest, or in a new one."""
    clock = state.facts.clock
    loss, norm = record.loss or 0.0, record.grad_norm or 0.0
    horizon = clock - config.withheld_window
    groups = tuple(group for group in state.groups if group.first > horizon)
    if not groups or clock - groups[-1].last > config.group_steps:
        return (*groups, Group(clock, clock, 1, loss, norm))
    last = groups[-1]
    grown = Group(last.first, clock, last.num + 1, max(last.loss, loss), max(last.grad_norm, norm))
    return (*groups[:-1], grown)


def recurring_level(state: LadderState, config: LadderConfig) -> Level | None:
    """Return the level that short groups of outliers before this one show, if there are enough."""
    short = [group for group in state.groups[:-1] if group.num <= config.group_size]
    if len(short) < config.recurring_groups:
        return None
    return Level(max(g.loss for g in short), max(g.grad_norm for g in short))


def is_new_level(state: LadderState, config: LadderConfig) -> bool:
    """Return whether the row is so long that it is a level: a first that passed does not count."""
    return len(state.row) > config.max_withheld + (not state.row[0].withheld)


def level_of(outliers: tuple[Outlier, ...]) -> Level:
    """Return the largest values of these outliers."""
    return Level(
        max((o.loss for o in outliers if o.loss is not None), default=0.0),
        max((o.grad_norm for o in outliers if o.grad_norm is not None), default=0.0),
    )
