"""What the ladder knows and what is in force by it: memory, limits, withholding, the rate's factor.

The memory has two parts. What is in ``LadderMemory`` only moves forward (budgets spent, commands
applied, ledger sequence): it lives in the plan journal, and no restore gives a budget back. The
rest of ``LadderState`` describes the present branch and starts anew after a rollback.

Of finite outliers, followers in a row are withheld, within bounds. The first in a row is left to
the loop's clip: one batch, clipped, does no harm, and nothing tells a hard batch from a bad one
yet. Its followers are withheld, which changes no weight, until the probe has answered or so many
were withheld that they are the new level. Where the loop does not clip, the first is withheld too,
until such outliers are seen to recur, or a few firsts were withheld: batches that take turns would
else be frozen out one by one.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from trainvitals.config import AboveOne, AboveZero, AtLeastOne, Count, NotNegative, Settings
from trainvitals.detect.outliers import Level, Limits
from trainvitals.records import Command, CommandAction, Finding, StepRecord

Mode = Literal["observe", "guard", "heal"]
CheckpointState = Literal["candidate", "verified", "healthy", "retired", "bad"]

FOREVER = 1 << 53
"""A step that never comes."""

NEWEST = -1.0
"""Argument of a rollback to the newest healthy checkpoint."""


class LadderConfig(Settings, frozen=True, kw_only=True):
    """When updates are withheld, when the run is rolled back, and the budget of each."""

    section = "ladder"

    max_withheld: AtLeastOne = 32
    """Most updates withheld in a row for finite outliers (then the new level is accepted), and most
    withheld in any ``withheld_window`` steps (then outliers are applied)."""
    max_firsts: AtLeastOne = 4
    """Most single outliers withheld in any ``withheld_window`` steps where the loop does not clip;
    beyond that only outliers that follow one are withheld."""
    withheld_window: AtLeastOne = 1000
    """Steps over which withheld updates and recurring outliers are counted."""
    recurring_groups: AtLeastOne = 5
    """Groups of outliers within ``withheld_window`` that count as a recurring kind of batch, where
    the loop does not clip; such batches are applied."""
    group_steps: AtLeastOne = 10
    """Steps without an outlier that end a group."""
    group_size: AtLeastOne = 3
    """Most outliers in a group of a recurring kind; longer groups are handled as usual."""
    ask_after: AtLeastOne = 3
    """Finite outliers, or non-finite steps, in a row after which the probe runs."""
    state_ratio: AboveOne = 2.0
    """The state is damaged if kept batches read above this multiple of their earlier loss."""
    state_ratio_unclipped: AboveOne = 5.0
    """The same where the loop does not clip: healthy states reach 4.3 there, after a hard batch
    that was applied. In between, nothing is rolled back or withheld."""
    state_ratio_jump: AboveOne = 1.25
    """The same right after a learning-rate jump: healthy states reach 1.02 there, and near chance
    level a damaged one cannot get much worse."""
    state_floor: NotNegative = 0.02
    """Share of the run's first losses added to both sides of that ratio, so that losses near 0 do
    not inflate it."""
    nonfinite_in_a_row: AtLeastOne = 32
    """Non-finite steps in a row, with finite parameters, after which the run is rolled back, unless
    the probe found the state healthy."""
    margin: Count = 20
    """A rollback goes at least this many steps before the onset (PaLM: about 100): what ends in a
    spike began earlier. The initial state is exempt, as nothing older exists."""
    leave_out_margin: Count = 3
    """Batches skipped before the onset and after the last flagged one; doubled each time the same
    cause recurs."""
    max_leave_out_margin: AtLeastOne = 1000
    """Upper limit of that doubling."""
    finite_cooldown: Count = 1000
    """Minimum number of steps between two rollbacks that are based on finite values."""
    lr_jump: AboveOne = 3.0
    """Factor by which the learning rate must rise in one step to be a jump."""
    lr_jump_steps: Count = 40
    """Steps after a jump within which damage to the state is attributed to it."""
    level_rise: AboveZero = 0.25
    """Share of the improvement since the first losses that must be lost (over 8 steps, right after
    a learning-rate jump) before the probe runs."""
    max_tries: AtLeastOne = 3
    """Rollbacks per cause; if it recurs after that, the run halts."""
    max_causes: AtLeastOne = 10
    """Causes handled by rollback within ``budget_window`` steps; one more halts the run."""
    budget_window: AtLeastOne = 10_000
    """Steps after which a cause no longer counts against the budget."""
    lr_cut: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """Factor applied to the learning rate at each rollback for the same cause, from the second one
    on."""
    lr_rewarm_steps: AtLeastOne = 200
    """Steps over which a lowered learning rate returns to normal after the bad steps."""
    max_skips_in_a_row: AtLeastOne = 100
    """Non-finite steps in a row after which a run that cannot be rolled back halts."""
    ask: tuple[Literal["rollback", "lr_cut"], ...] = ()
    """What waits for a person's yes: every rollback, or those that lower the learning rate.
    Answered by ``vitals command RUN approve`` or ``veto``, or on the dashboard."""
    ask_steps: AtLeastOne = 500
    """Steps after which, without an answer, ``ask_default`` is done; after a veto, those before the
    same may be asked again."""
    ask_default: Literal["approve", "veto"] = "approve"
    """What is done where nobody answers."""


class CheckpointRef(msgspec.Struct, frozen=True, kw_only=True):
    """A state training can go back to. The list given to the ladder is equal on all ranks."""

    id: str
    step: int
    """The step that is trained next from it: the number of steps attempted before it."""
    attempt: int = 0
    state: CheckpointState = "healthy"
    where: Literal["memory", "disk"] = "memory"


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A verified command as all ranks know it after the exchange.

    Where only numbers travel, ``argument`` names the checkpoint of a rollback by its step; NEWEST
    asks for the newest healthy one. Any other number that is no checkpoint's step is refused, so an
    id that rank 0 cannot resolve should travel as -2.
    """

    number: int
    action: CommandAction
    argument: float = NEWEST
    checkpoint_id: str = ""

    @classmethod
    def of(cls, command: Command) -> Proposal:
        """Return the command's part that decides. A rollback without an id means the newest."""
        argument = NEWEST if command.action == "rollback" else command.argument
        return cls(
            number=command.number,
            action=command.action,
            argument=argument,
            checkpoint_id=command.checkpoint_id,
        )


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The cause under treatment."""

    kind: str
    onset_step: int
    until_step: int
    """Trouble of the same kind before this step touches it, and is the same cause."""
    tries: int = 1
    """Rollbacks for it."""
    target_step: int = -1
    """Where the last rollback went to."""


class SkippedWindow(msgspec.Struct, frozen=True, array_like=True):
    """Data that training moved past."""

    onset_step: int
    """First step whose batches are left out."""
    num_batches: int


class LrJump(msgspec.Struct, frozen=True, array_like=True):
    """The newest jump of the learning rate that nobody announced."""

    step: int
    before: float
    after: float
    level: float
    """Median of the clean losses before it, their robust deviation, and the run's first losses."""
    noise: float
    first: float


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A rollback that waits for a person's yes, or was vetoed."""

    number: int
    """Of its entry in the ledger."""
    until: int
    """By the clock: when the default is done, or a veto is over."""
    rule: str
    kind: str
    onset_step: int
    reason: str
    finding: Finding
    plays_all: bool
    is_finite: bool = False
    """Whether it rests on finite evidence, which has a cooldown."""
    jump: LrJump | None = None
    """The jump of the learning rate that is to blame."""
    vetoed: bool = False


class TurnLevels(msgspec.Struct, frozen=True, array_like=True):
    """What was accepted, and what recurs, of an optimizer that is stepped by itself."""

    turn: int
    accepted: tuple[Level, ...] = ()
    recurring: Level | None = None


class LadderMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the ladder's memory that no restore sets back. Lives in the plan journal."""

    attempt: int = 0
    """Id of the present branch; 0 until the first record tells it."""
    clock: int = 0
    """Steps judged in all branches: what cooldowns and budgets are counted in."""
    ledger_seq: int = 0
    """Entries written to the ledger."""
    num_skips: int = 0
    num_rollbacks: int = 0
    causes: tuple[int, ...] = ()
    """When each cause was first treated by rollback, by the clock; those within the window."""
    cause: Cause | None = None
    accepted: tuple[Level, ...] = ()
    """Levels that were accepted, the newest 32: nothing up to one is withheld or blamed again."""
    recurring: Level | None = None
    """Largest values of the recurring level; None while there is none."""
    turn: int = 0
    """Whose levels those two are; ``others`` has those of optimizers that take turns with it."""
    others: tuple[TurnLevels, ...] = ()
    blamed: tuple[int, ...] = ()
    """Onsets that a rollback on finite evidence was spent on: none is repeated."""
    corrupted: tuple[tuple[int, int], ...] = ()
    """When a rollback was spent on replicas that differed, by the clock, and the rank that was
    wrong, -1 where nobody knew; those within the window."""
    uncured_until: int = 0
    """No rollback for a non-finite state before this time of the clock: one did not cure it."""
    cooldown_until: int = 0
    """No rollback on finite evidence before this time of the clock."""
    last_command: int = 0
    """Number of the newest command that was answered."""
    skipped_windows: tuple[SkippedWindow, ...] = ()
    """The newest 100 of them."""
    lr_factor: float = 1.0
    lr_hold_until: int = 0
    """Step up to which the learning rate is multiplied by ``lr_factor``."""
    lr_full_from: int = 0
    """Step from which it is whole again; between the two it climbs linearly."""
    lr_cap: float = 0.0
    """The rate before a jump, held while the schedule asks for ``lr_jump`` times it; 0: none."""
    lr_cap_from: int = 0
    """Step of that jump: before it, a lower rate does not end the hold."""
    lr_scale: float = 1.0
    """An operator's factor on the schedule's learning rate, until the next one."""
    lr_held: float = 0.0
    """The learning rate that an operator holds; 0: the schedule's."""
    skip_attempt: int = 0
    """The branch on which an operator has updates skipped: none of it holds on another one."""
    skip_first: int = 0
    skip_last: int = -1
    """First and last of those steps."""
    waiting: Waiting | None = None
    """A rollback that waits for a yes."""
    halted: str = ""
    """Why the ladder gave up, or empty."""

    def is_skipped(self, step: int) -> bool:
        """Return whether an operator has the update of this step of the present branch skipped."""
        return self.skip_first <= step <= self.skip_last and self.skip_attempt == self.attempt


class Outlier(msgspec.Struct, frozen=True, array_like=True):
    """A step whose loss or gradient norm was above its limit."""

    step: int
    loss: float | None
    grad_norm: float | None
    withheld: bool


class Group(msgspec.Struct, frozen=True, array_like=True):
    """Outliers close to each other."""

    first: int
    """Times of the clock."""
    last: int
    num: int
    loss: float
    """Largest values; 0 where there were none."""
    grad_norm: float


class LadderState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything ``decide`` carries from one step to the next."""

    facts: LadderMemory = LadderMemory()
    row: tuple[Outlier, ...] = ()
    """Finite outliers in a row, the first included; a non-finite step between is not counted."""
    nonfinite: int = 0
    """Non-finite steps in a row."""
    nonfinite_onset: int = -1
    sound: bool = False
    """Whether the probe read the state sound in this stretch of non-finite steps."""
    groups: tuple[Group, ...] = ()
    """Groups of outliers within the window, oldest first."""
    withheld: tuple[int, ...] = ()
    """Times of the updates that were withheld within the window."""
    firsts: tuple[int, ...] = ()
    """Times of those that were the first of their row."""
    passes_since: int = -1
    """First step of the row that passes: the state was read worse or damaged, and nothing went
    back. No batch is to blame then, and what is withheld keeps such weights as they are."""
    state_told: int = -1
    """Step at which it was last told that the state is non-finite, and nothing went back."""
    state_since: int = -1
    """Step at which that was told first, of a stretch that has not ended."""
    replicas_told: int = -1
    """The same two steps of replicas that differ."""
    replicas_since: int = -1
    settings_since: int = -1
    """First step of this branch at which ranks had other settings; -1: none."""
    settings_told: int = -1
    """The newest such step."""
    num_missed: int = 0
    """Snapshots that could not be taken."""
    spent: bool = False
    """Whether it was told that outliers pass because the bound is reached."""
    recent: tuple[Outlier, ...] = ()
    """The newest outliers, for an operator's word on one of them."""
    last_flagged: int = -1
    """The newest step that was an outlier or not finite."""
    losses: tuple[float, ...] = ()
    """The newest finite losses since the last jump of the learning rate."""
    learning_rate: float = 0.0
    """As it was applied in the step before; 0 before the first."""
    known_rate: float = 0.0
    """The highest rate that was trained with, jumps once they are ``lr_jump_steps`` old."""
    lr_jump: LrJump | None = None
    announced_until: int = -1
    """Steps before this one were announced to change: nothing in them is a jump."""
    evaluated_at: int = -1
    """Step of the last evaluation."""
    accepted_at: int = -1
    """Step at which a level was last accepted."""
    first_step: int = -1
    """First step of this branch that was judged."""
    last_unhealthy_step: int = -1
    rolling_back: bool = False
    """A rollback was decided and not yet reported done: records are of the old branch."""

    @property
    def rate_to_know(self) -> float:
        """``known_rate`` as it is from the next step on: that of the newest step counts by then."""
        return max(self.known_rate, self.learning_rate if self.lr_jump is None else 0.0)


def in_turn(ladder: LadderState, before: LadderState, turn: int) -> LadderState:
    """Return the state of one optimizer's own, as it is after ``before`` of another one.

    What describes the run goes from one to the other; rows, groups and bounds of what is withheld
    stay with the optimizer whose steps they are about.
    """
    facts = before.facts
    if facts.turn != turn:
        levels = {kept.turn: kept for kept in facts.others}
        if facts.accepted or facts.recurring is not None:
            levels[facts.turn] = TurnLevels(facts.turn, facts.accepted, facts.recurring)
        own = levels.pop(turn, TurnLevels(turn))
        facts = replace(
            facts,
            turn=turn,
            accepted=own.accepted,
            recurring=own.recurring,
            others=tuple(levels.values()),
        )
    return replace(
        ladder,
        facts=facts,
        first_step=before.first_step,
        last_flagged=max(ladder.last_flagged, before.last_flagged),
        announced_until=max(ladder.announced_until, before.announced_until),
        evaluated_at=max(ladder.evaluated_at, before.evaluated_at),
        last_unhealthy_step=max(ladder.last_unhealthy_step, before.last_unhealthy_step),
        rolling_back=before.rolling_back,
        state_told=before.state_told,
        state_since=before.state_since,
        replicas_told=before.replicas_told,
        replicas_since=before.replicas_since,
        settings_since=before.settings_since,
        settings_told=before.settings_told,
        num_missed=before.num_missed,
    )


def after_rollback(
    ladder: LadderState, *, attempt: int, step: int, known_rate: float
) -> LadderState:
    """Return the state a branch begins with: what was withheld and what recurs is counted on."""
    return LadderState(
        facts=replace(ladder.facts, attempt=attempt),
        first_step=step,
        groups=ladder.groups,
        withheld=ladder.withheld,
        firsts=ladder.firsts,
        spent=ladder.spent,
        num_missed=ladder.num_missed,
        known_rate=known_rate,
    )


def lr_factor_at(
    facts: LadderMemory, step: int, rate: float | None = None, *, jump: float = 3.0
) -> float:
    """Return the factor on the learning rate at ``step``: held, climbing back, or 1.

    Args:
        facts: what the ladder has spent.
        step: the step.
        rate: what the schedule asks for; where it is above a hold, the factor brings it down.
        jump: multiple of the held rate from which it is held.
    """
    factor = _cut_at(facts, step) * facts.lr_scale
    if facts.lr_held and rate:
        return facts.lr_held / rate  # what a person set is what is applied
    if facts.lr_cap and rate is not None and rate >= jump * facts.lr_cap:
        factor *= facts.lr_cap / rate
    return factor


def _cut_at(facts: LadderMemory, step: int) -> float:
    if step >= facts.lr_full_from:
        return 1.0
    if step < facts.lr_hold_until:
        return facts.lr_factor
    part = (step - facts.lr_hold_until) / (facts.lr_full_from - facts.lr_hold_until)
    return facts.lr_factor + (1.0 - facts.lr_factor) * part


# ------------------------------------------------------------------------------------ withholding


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
