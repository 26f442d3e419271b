"""What the ladder knows: settings, checkpoints to go back to, and its own memory.

The memory has two parts. ``Facts`` only move forward (budgets spent, commands applied, ledger
sequence): they live in the plan journal, and no restore gives a budget back. The rest of
``LadderState`` describes the present branch and starts anew after a rollback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

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
    """When the ladder climbs, and how far it may."""

    storm_skips: int = 3
    """Bad steps within ``storm_window`` that are a storm: skipping alone does not help."""
    storm_window: int = 20
    """Steps over which bad steps are counted."""
    margin: int = 20
    """A rollback goes at least this many steps before the onset (PaLM: about 100): what ends in a
    spike began earlier. The state before the first step is exempt: nothing is older."""
    skip_batches: int = 50
    """Batches that are passed over, from the onset on; doubled each time the storm recurs. So many
    times what a step takes, where it accumulates several. 0 passes over none: they are fed again
    where the loop replays."""
    max_skip_batches: int = 1000
    """Bound of that doubling."""
    max_tries: int = 3
    """Rollbacks for one root cause; the next storm of that cause halts."""
    max_causes: int = 10
    """Root causes treated by rollback in a run; the next one halts."""
    cooldown_steps: int = 20
    """Steps after a rollback before a storm may climb again; non-finite parameters do at once."""
    progress_steps: int = 100
    """Steps beyond the last trouble that prove a treatment: trouble before is the same root cause,
    trouble later a new one."""
    lr_cut: float = 0.5
    """Factor on the learning rate from the second try on, once more for each further try."""
    lr_rewarm_steps: int = 200
    """Steps over which a lowered learning rate climbs back, once the trouble is passed."""
    max_skips_in_a_row: int = 100
    """Skips without one applied update, after which skipping is no way on and the run halts."""
    same_level_ratio: float = 1.25
    """Losses of two storms within this ratio are the same level seen on other data: a shift."""

    def __post_init__(self) -> None:
        positive = (
            "storm_skips", "storm_window", "max_skip_batches", "max_tries", "max_causes",
            "progress_steps", "lr_rewarm_steps", "max_skips_in_a_row",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"ladder.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("margin", "cooldown_steps", "skip_batches"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"ladder.{name} is {getattr(self, name)}; it must not be negative"
                )
        if self.storm_skips > self.storm_window:
            raise ConfigError(
                f"ladder.storm_skips is {self.storm_skips}; it must be at most ladder.storm_window "
                f"({self.storm_window})"
            )
        if not 0.0 < self.lr_cut <= 1.0:
            raise ConfigError(f"ladder.lr_cut is {self.lr_cut}; it must be above 0 and at most 1")
        if self.same_level_ratio < 1.0:
            raise ConfigError(
                f"ladder.same_level_ratio is {self.same_level_ratio}; it must be at least 1"
            )


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
    """The root cause under treatment."""

    kind: str
    onset_step: int
    until_step: int
    """Trouble before this step is the same cause; later it is a new one."""
    tries: int = 1
    """Rollbacks for it."""
    target_step: int = -1
    """Where the last rollback went to."""
    level: float = 0.0
    """Median loss of the storm's finite outliers; 0 where there were none."""


class SkippedWindow(msgspec.Struct, frozen=True, array_like=True):
    """Data that training moved past."""

    onset_step: int
    num_batches: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the ladder's memory that no restore sets back. Lives in the plan journal."""

    attempt: int = 0
    """Id of the present branch; 0 until the first record tells it."""
    ledger_seq: int = 0
    """Entries written to the ledger."""
    num_skips: int = 0
    num_rollbacks: int = 0
    num_causes: int = 0
    """Root causes treated by rollback, commands included."""
    cause: Cause | None = None
    last_command: int = 0
    """Number of the newest command that was answered."""
    skipped_windows: tuple[SkippedWindow, ...] = ()
    """The newest 100 of them."""
    lr_factor: float = 1.0
    lr_hold_until: int = 0
    """Step up to which the learning rate is multiplied by ``lr_factor``."""
    lr_full_from: int = 0
    """Step from which it is whole again; between the two it climbs linearly."""
    halted: str = ""
    """Why the ladder gave up, or empty."""


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A bad step the ladder remembers."""

    step: int
    onset: int
    """Where its trouble began, as the detector says; at or before ``step``."""
    cause: str
    value: float | None


class LadderState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything ``decide`` carries from one step to the next."""

    facts: Facts = Facts()
    marks: tuple[Mark, ...] = ()
    """Bad steps within the storm window, oldest first."""
    skips_in_a_row: int = 0
    first_step: int = -1
    """First step of this branch that was judged."""
    last_unhealthy_step: int = -1
    rolling_back: bool = False
    """A rollback was decided and not yet reported done: records are of the old branch."""


def lr_factor_at(facts: Facts, step: int) -> float:
    """Return the factor on the learning rate at ``step``: held, climbing back, or 1."""
    if step >= facts.lr_full_from:
        return 1.0
    if step < facts.lr_hold_until:
        return facts.lr_factor
    part = (step - facts.lr_hold_until) / (facts.lr_full_from - facts.lr_hold_until)
    return facts.lr_factor + (1.0 - facts.lr_factor) * part
