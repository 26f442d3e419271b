"""What the ladder knows: settings, checkpoints to go back to, and its own memory.

The memory has two parts. What is in ``LadderMemory`` only moves forward (budgets spent, commands
applied, ledger sequence): it lives in the plan journal, and no restore gives a budget back. The
rest of ``LadderState`` describes the present branch and starts anew after a rollback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from trainvitals.detect.outliers import Level
from trainvitals.errors import ConfigError
from trainvitals.records import Command, CommandAction

Mode = Literal["observe", "guard", "heal"]
CheckpointState = Literal["candidate", "verified", "healthy", "retired", "bad"]

FOREVER = 1 << 53
"""A step that never comes."""

NEWEST = -1.0
"""Argument of a rollback to the newest healthy checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderConfig:
    """When an update is withheld, when the run goes back, and how far each may go."""

    max_withheld: int = 32
    """Finite outliers withheld in a row, after which their level is accepted; and in any
    ``withheld_window`` steps, after which outliers pass."""
    max_firsts: int = 4
    """Firsts of a row withheld in any ``withheld_window`` steps where the loop does not clip; then
    they pass, and only followers are withheld."""
    withheld_window: int = 1000
    """Steps over which withheld updates and recurring outliers are counted."""
    recurring_groups: int = 5
    """Groups of outliers within ``withheld_window`` that are a recurring level, where the loop does
    not clip: a kind of batch that comes again, and passes."""
    group_steps: int = 10
    """Steps without an outlier that end a group."""
    group_size: int = 3
    """Outliers that a group of a recurring level has at most; a longer one is treated as ever."""
    ask_after: int = 3
    """Finite outliers, or non-finite steps, in a row after which the probe is asked."""
    state_ratio: float = 2.0
    """Kept batches that read above this multiple of their earlier loss blame the state."""
    state_ratio_unclipped: float = 5.0
    """The same where the loop does not clip: healthy states read up to 4.3 there, after a hard
    batch that was applied. In between nothing goes back, and nothing more is withheld."""
    state_ratio_jump: float = 1.25
    """The same right after a jump of the learning rate: healthy states read up to 1.02 there, and
    where chance is near a damaged one cannot read much more."""
    state_floor: float = 0.02
    """Part of the run's first losses that is added to both sides of that ratio."""
    nonfinite_in_a_row: int = 32
    """Non-finite steps with finite parameters, in a row, after which the run goes back, unless the
    probe read the state sound."""
    margin: int = 20
    """A rollback goes at least this many steps before the onset (PaLM: about 100): what ends in a
    spike began earlier. The state before the first step is exempt: nothing is older."""
    leave_out_margin: int = 3
    """Batches left out before the onset and after the last flagged one; doubled each time the same
    trouble recurs."""
    max_leave_out_margin: int = 1000
    """Bound of that doubling."""
    finite_cooldown: int = 1000
    """Judged steps between two rollbacks on finite evidence."""
    lr_jump: float = 3.0
    """Factor by which the learning rate must rise in one step to be a jump."""
    lr_jump_steps: int = 40
    """Steps after a jump within which trouble of the state is taken to be its doing."""
    level_rise: float = 0.25
    """Part of the gain since the first losses that the level of 8 steps must have given back, right
    after a jump of the learning rate, to ask the probe."""
    max_tries: int = 3
    """Rollbacks for one cause; when it recurs once more, the run halts."""
    max_causes: int = 10
    """Causes treated by rollback within ``budget_window`` steps; one more halts the run."""
    budget_window: int = 10_000
    """Judged steps after which a spent cause is given back."""
    lr_cut: float = 0.5
    """Factor on the learning rate from the second try on, once more for each further try."""
    lr_rewarm_steps: int = 200
    """Steps over which a lowered learning rate climbs back, once the trouble is passed."""
    max_skips_in_a_row: int = 100
    """Non-finite steps in a row after which a run that cannot go back halts."""

    def __post_init__(self) -> None:
        positive = (
            "max_withheld", "max_firsts", "withheld_window", "recurring_groups", "group_steps",
            "group_size", "ask_after", "nonfinite_in_a_row", "max_leave_out_margin", "max_tries",
            "max_causes",
            "budget_window", "lr_rewarm_steps", "max_skips_in_a_row",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"ladder.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("margin", "leave_out_margin", "finite_cooldown", "lr_jump_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"ladder.{name} is {getattr(self, name)}; it must not be negative"
                )
        for name in ("state_ratio", "state_ratio_unclipped", "state_ratio_jump", "lr_jump"):
            if not getattr(self, name) > 1.0:
                raise ConfigError(f"ladder.{name} is {getattr(self, name)}; it must be above 1")
        if not (self.state_floor >= 0.0 and self.level_rise > 0.0):
            raise ConfigError(
                f"ladder.state_floor is {self.state_floor}, ladder.level_rise {self.level_rise}; "
                "they must be at least 0 and above 0"
            )
        if not 0.0 < self.lr_cut <= 1.0:
            raise ConfigError(f"ladder.lr_cut is {self.lr_cut}; it must be above 0 and at most 1")


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
    blamed: tuple[int, ...] = ()
    """Onsets that a rollback on finite evidence was spent on: none is repeated."""
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
    halted: str = ""
    """Why the ladder gave up, or empty."""


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


class LrJump(msgspec.Struct, frozen=True, array_like=True):
    """The newest jump of the learning rate that nobody announced."""

    step: int
    before: float
    after: float
    level: float
    """Median of the clean losses before it, their robust deviation, and the run's first losses."""
    noise: float
    first: float


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
    factor = _cut_at(facts, step)
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
