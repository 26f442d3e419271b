"""Manual commands in a step: rank 0 reads the mailbox, all ranks judge the command together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import cast

import torch
from msgspec.structs import replace

from trainer_hooks.exchange.reduce_vector import Slots
from trainer_hooks.features.sigterm import SigtermFeature
from trainer_hooks.ranks import Ranks
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainvitals.policy import Judgement, Proposal
from trainvitals.records import (
    COMMAND_CODES,
    Command,
    CommandAcknowledged,
    CommandAction,
    Decision,
    TrainingPaused,
)

ROUND_SECONDS = 1.0
"""Time between two checks for a command during a pause: far below the timeout of any group."""
_JUDGED_WITH_STEP = frozenset({"halt", "rollback", "approve", "accept"})
"""Commands that add an entry to the decision log: they are judged together with a step."""
_ACTIONS = {code: cast(CommandAction, name) for name, code in COMMAND_CODES.items()}
_NO_COMMAND = (0.0, 0.0, -1.0)

Words = tuple[float, float, float]
"""A command as three numbers: number, code of the action, argument."""


class CommandsFeature(StepFeature):
    """Operators' commands, with the pause of a run.

    A command travels with the step, so that all ranks judge it at the same step. Every step
    contains it until it has its response: a command on a discarded attempt is not judged.
    """

    slots = Slots(rank0=("command_number", "command_action", "command_argument"))

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self._unavailable: dict[str, str] = {}
        """Commands that this loop cannot carry out, with the reasons; equal on all ranks."""
        if run.recovery is None:
            text = "the run makes no checkpoints: watch(checkpoints=...) does"
            self._unavailable["checkpoint"] = text
        elif not run.recovery.is_on_disk:
            self._unavailable["checkpoint"] = "attach() keeps states in memory; the loop saves them"
        self._set_paused(False)

    def rank0_values(self, step: OutgoingStep) -> Mapping[str, float]:
        """Return the command that waits for its response."""
        return dict(zip(self.slots.rank0, self._command_words(step.step), strict=True))

    def _command_words(self, step: int) -> Words:
        """Encode the operator's waiting command for the reduce vector; on rank 0."""
        command = self._waiting_command(step)
        if command is None:
            return _NO_COMMAND
        target, recovery = -1.0, self._run.recovery
        if command.action != "rollback":
            target = command.argument
        elif command.checkpoint_id and recovery is not None:
            target = float(recovery.step_of(command.checkpoint_id))
        return float(command.number), float(COMMAND_CODES[command.action]), target

    def _waiting_command(self, step: int) -> Command | None:
        """Return the command that waits for its response; a new one if there is one."""
        run, inbox = self._run, self._run.inbox
        if inbox is None:
            return run.features.own_command()
        facts = run.judge.facts
        with run.faults.fail_open("mailbox"):
            refusal = inbox.poll(step=step)
            if refusal is not None:
                if refusal.status == "expired":
                    run.plan.add(facts, expired=refusal.number)
                event = CommandAcknowledged(ack=refusal)
                run.emitter.run_event(event, step=step, attempt=self._run.attempt)
        if inbox.waiting is not None and inbox.waiting.number <= facts.last_command:
            inbox.waiting = None
        return inbox.waiting or run.features.own_command()

    def on_reduced(self, step: ReturnedStep) -> None:
        """Let the step be judged with rank 0's command."""
        root = step.reduced.root
        step.unavailable_commands = self._unavailable
        if number := int(root["command_number"]):
            action = _ACTIONS[int(root["command_action"])]
            argument = root["command_argument"]
            step.command = Proposal(number=number, action=action, argument=argument)

    def annotate(self, step: ReturnedStep, judgement: Judgement) -> Judgement:
        """Add the operator's reason to the decision of a command; only rank 0 knows it."""
        decision = judgement.decision
        if decision is None or not decision.command_number:
            return judgement
        return judgement._replace(decision=self._with_reason(decision))

    def _with_reason(self, decision: Decision) -> Decision:
        """Add the operator's name and reason to the decision of a command."""
        command = None if self._run.inbox is None else self._run.inbox.waiting
        if command is None or command.number != decision.command_number or not command.reason:
            return decision
        return replace(
            decision, reason=f"{decision.reason} ({command.issued_by}: {command.reason})"
        )

    def on_command(self, command: Proposal, *, now_step: int) -> None:
        """Start or end a pause."""
        if command.action in ("pause", "resume"):
            self._apply_pause_state(command.action == "pause", "manual command")

    def _apply_pause_state(self, is_paused: bool, reason: str) -> None:
        """Start or end the run's pause, and write the event about it."""
        self._set_paused(is_paused)
        event = TrainingPaused(is_paused=is_paused, reason=reason)
        self._run.emitter.run_event(event, step=self._run.last_step, attempt=self._run.attempt)

    def _set_paused(self, is_paused: bool) -> None:
        """Update which of the two commands is currently impossible."""
        self.is_paused = is_paused
        """Whether all ranks wait, before the next step, for an operator's command."""
        impossible, possible = ("pause", "resume") if is_paused else ("resume", "pause")
        self._unavailable.pop(possible, None)
        self._unavailable[impossible] = f"the run is {'' if is_paused else 'not '}paused"

    @property
    def has_pending_work(self) -> bool:
        """Whether the run is paused."""
        return self.is_paused

    def run_between_steps(self, step: int, device: torch.device) -> Iterable[Judgement]:
        """Wait during a pause, and judge the commands that need no step. Collective.

        A command that needs a step ends the pause and is judged with the next step as usual.
        SIGTERM ends the pause too.
        """
        run = self._run
        sigterm = run.features[SigtermFeature]
        while self.is_paused:
            words = self._command_words(step) if run.ranks.rank == 0 else (0.0, 0.0, 0.0)
            (number, code, argument), stops = wait_paused_round(
                run.ranks, words, sigterm.is_received, device
            )
            if stops:
                sigterm.on_pause_ended()
                self._apply_pause_state(False, "SIGTERM")
            elif number:
                action = _ACTIONS[int(code)]
                proposal = Proposal(number=int(number), action=action, argument=argument)
                if action in _JUDGED_WITH_STEP:
                    self._apply_pause_state(False, f"a {action} was asked for")
                    return
                yield run.judge.command(
                    proposal, decided_at_step=step, unavailable_commands=self._unavailable
                )


def wait_paused_round(
    ranks: Ranks, words: Words, sigterm_received: bool, device: torch.device
) -> tuple[Words, bool]:
    """Wait a paused round, then exchange rank 0's command and whether a rank received SIGTERM.

    Collective, on the training's own group: no other collective is in flight between two steps. A
    round is short, so a pause of any length stays far from the group's timeout. ``words`` are zeros
    on other ranks, and without a command.
    """
    time.sleep(ROUND_SECONDS)
    pack = torch.tensor([*words, float(sigterm_received)], dtype=torch.float64, device=device)
    ranks.reduce(pack)
    number, action, argument, stops = pack.tolist()
    return (number, action, argument), stops > 0
