"""Detectors and escalation policy together: the one class that judges a run, live or later.

``DetectorSet`` only reports; ``Judge`` adds the rule that may withhold updates, and passes all
findings to the policy.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import fields, replace

from trainvitals.auto_clip import AutoClipConfig
from trainvitals.config import Settings, load_settings
from trainvitals.detect.detector_set import DetectConfig, DetectorSet
from trainvitals.detect.outliers import (
    Limits,
    LossKind,
    OutlierConfig,
    OutlierRule,
)
from trainvitals.detect.user_alerts import Rule, load_rules
from trainvitals.policy.evidence import Ask, ProbeResult
from trainvitals.policy.ladder import decide, is_restart
from trainvitals.policy.rungs import DecisionContext, LossTrend, PolicyResult, answer
from trainvitals.policy.state import (
    CheckpointRef,
    DurablePolicyState,
    LadderConfig,
    LadderState,
    Mode,
    Proposal,
    after_rollback,
    in_turn,
    limits_in_force,
    lr_factor_at,
    max_row,
)
from trainvitals.records import CommandAck, Decision, Finding, StateRead, StepRecord

_FIRST_STEPS = 2
"""Steps whose numbers the host waits for: absurd values are stopped from the second step on."""


class JudgeConfig(Settings, frozen=True, kw_only=True):
    """Settings of what judges a run."""

    section = "judge"

    outlier: OutlierConfig = OutlierConfig()
    """What may be withheld."""
    detect: DetectConfig = DetectConfig()
    """What is told."""
    ladder: LadderConfig = LadderConfig()
    """What is done about it."""
    loss_kind: LossKind = "minimize"
    """What the loss is good for: ``watch(loss_kind=...)``."""
    auto_clip: AutoClipConfig = AutoClipConfig()
    """Limit of ``max_norm="auto"``. The loop clips; the judge does not read it."""
    rules: tuple[Rule, ...] = ()
    """Alerts of a person's own. Each rank judges them by what it records; the judge does not."""


SECTIONS: dict[str, type[Settings]] = {
    "ladder": LadderConfig,
    "outlier": OutlierConfig,
    "auto_clip": AutoClipConfig,
    **{of.name: type(of.default) for of in fields(DetectConfig)},
}


def load_judge_config(environ: Mapping[str, str]) -> JudgeConfig:
    """Return the settings of the judge: the sections of ``SECTIONS``.

    They come from the TOML file in ``VITALS_CONFIG``, overridden by variables such as
    ``VITALS_LADDER_MARGIN``; its ``[[rules]]`` are custom alerts. Rank 0 reads the settings for
    all ranks, and the run records them.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value that cannot work.
    """
    path = Path(environ["VITALS_CONFIG"]) if environ.get("VITALS_CONFIG") else None
    settings = load_settings(SECTIONS, path=path, environ=environ)
    detect = {of.name: settings[of.name] for of in fields(DetectConfig)}
    return JudgeConfig(
        outlier=settings["outlier"],
        detect=DetectConfig(**detect),
        ladder=settings["ladder"],
        auto_clip=settings["auto_clip"],
        rules=() if path is None else load_rules(path),
    )


class Judgement(NamedTuple):
    """Findings and decision about one step."""

    findings: tuple[Finding, ...] = ()
    decision: Decision | None = None
    ack: CommandAck | None = None
    readings: tuple[StateRead, ...] = ()
    order: Proposal | None = None
    """A command to carry out."""


class _Turn:
    """State that is judged separately: an optimizer that is stepped alone has its own reference."""

    def __init__(self, config: JudgeConfig) -> None:
        kind = config.loss_kind
        self.outliers = OutlierRule(config.outlier, loss_kind=kind)
        self.detectors = DetectorSet(config.detect, loss_kind=kind)
        self.ladder = LadderState()

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.detectors.state_dict(),
            "outlier": self.outliers.state_dict(),
            "known_rate": self.ladder.rate_to_know,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "outlier" in state:
            self.outliers.load_state_dict(state["outlier"])
        self.detectors.load_state_dict(dict(state))


class Judge:
    """Passes step records to the detectors, and their findings to the escalation policy.

    Each of several optimizers that alternate (a record's ``turn``) has its own reference and rows;
    the budgets of the policy belong to the run.

    Runs in every rank, in the collector and in a replay. The same records and arguments in the same
    order give the same judgements. The state has two separate parts: ``detector_state()`` goes into
    snapshots and checkpoints, ``facts`` goes into the plan journal and is never set back.
    """

    def __init__(
        self,
        config: JudgeConfig | None = None,
        mode: Mode = "guard",
        *,
        facts: DurablePolicyState | None = None,
    ) -> None:
        self.config = config or JudgeConfig()
        self.mode: Mode = mode
        self._own = _Turn(self.config)
        self._own.ladder = LadderState(facts=facts or DurablePolicyState())
        self._turn = 0
        self._waiting: dict[int, _Turn] = {}
        """State of the optimizers other than the current one."""
        self._last_step = -1

    @property
    def _ladder(self) -> LadderState:
        return self._own.ladder

    @_ladder.setter
    def _ladder(self, ladder: LadderState) -> None:
        self._own.ladder = ladder

    def _take_turn(self, turn: int) -> None:
        """Judge by another optimizer's reference from now on."""
        before = self._own
        self._waiting[self._turn] = before
        self._own = self._waiting.pop(turn) if turn in self._waiting else _Turn(self.config)
        self._own.ladder = in_turn(self._own.ladder, before.ladder)
        self._turn = turn

    def _of(self, turn: int | None) -> tuple[_Turn, LadderState]:
        """Return the references for the next step of one optimizer, without changing anything."""
        if turn is None or turn == self._turn:
            return self._own, self._ladder
        turn_state = self._waiting.get(turn) or _Turn(self.config)
        return turn_state, in_turn(turn_state.ladder, self._ladder)

    def judge(
        self,
        record: StepRecord,
        *,
        decided_at_step: int,
        checkpoints: Sequence[CheckpointRef] = (),
        command: Proposal | None = None,
        now_attempt_id: int = 0,
        probe: Callable[[Ask], ProbeResult] | None = None,
        evaluation: float | None = None,
        lacks: Mapping[str, str] = MappingProxyType({}),
    ) -> Judgement:
        """Judge one step and return the findings and the action.

        Call once per step, in order. A record of another attempt (in flight while the run rolled
        back) is ignored. Everything after a halt, or between a decided rollback and
        ``rolled_back``, is ignored too. A decided ``rollback`` identifies the checkpoint: restore
        it, then call ``rolled_back``.

        Args:
            record: the step.
            decided_at_step: the step in whose call this happens.
            checkpoints: possible targets of a rollback.
            command: a proposal.
            now_attempt_id: id of the attempt that a rollback would start.
            probe: evaluates the state; called during the judgement, on all ranks in the same way.
            evaluation: ratio of an evaluation's loss to the previous one, if this step has one.
            lacks: commands that this loop cannot carry out, with the reasons.
        """
        if record.turn != self._turn:
            self._take_turn(record.turn)
        turn_state, facts, before = self._own, self._ladder.facts, self._ladder
        if facts.attempt == 0 and record.attempt:
            facts = replace(facts, attempt=record.attempt)
            self._ladder = replace(self._ladder, facts=facts)
        if record.attempt != facts.attempt or self._ladder.rolling_back or self.halted:
            return Judgement()
        spikes = turn_state.outliers.update(record)
        detected = turn_state.detectors.update(record)
        if spikes and detected:  # once: the rule that may act reports it with the limit in force
            detected = tuple(finding for finding in detected if finding.kind != "spike")
        findings = spikes + detected
        verdict = decide(
            self._ladder,
            findings,
            record=record,
            decided_at_step=decided_at_step,
            checkpoints=checkpoints,
            command=command,
            mode=self.mode,
            config=self.config.ladder,
            now_attempt_id=now_attempt_id,
            loss_kind=self.config.loss_kind,
            probe=probe,
            evaluation=evaluation,
            course=self._course,
            lacks=lacks,
        )
        self._ladder, self._last_step = verdict.state, record.step
        if verdict.decision is not None and verdict.decision.rule == "operator_accepted":
            turn_state.detectors.accept_level()
        elif is_restart(record, before, self.config.ladder):
            # A warm restart: the loss rises as expected, and nothing is withheld for it.
            turn_state.outliers.suspend(self.config.ladder.lr_jump_steps)
            if record.rate_declared:
                turn_state.detectors.rebaseline(self.config.ladder.lr_jump_steps)
        is_done = verdict.ack is not None and verdict.ack.status == "done"
        return Judgement(
            findings + verdict.findings,
            verdict.decision,
            verdict.ack,
            verdict.readings,
            command if is_done else None,
        )

    def command(
        self, command: Proposal, *, decided_at_step: int, lacks: Mapping[str, str]
    ) -> Judgement:
        """Respond to a command between two steps, while the run is paused.

        Args:
            command: a command that adds no entry to the decision log.
            decided_at_step: the latest completed step.
            lacks: commands that this loop cannot carry out, with the reasons.
        """
        if command.number <= self._ladder.facts.last_command:
            return Judgement()
        record = StepRecord(step=self._last_step, attempt=self.attempt)
        case = DecisionContext(
            record, decided_at_step, (), self.mode, self.config.ladder, 0, lacks=lacks
        )
        verdict = answer(PolicyResult(self._ladder), self._ladder, command, case)
        self._ladder = verdict.state
        is_done = verdict.ack is not None and verdict.ack.status == "done"
        return Judgement(ack=verdict.ack, order=command if is_done else None)

    def _course(self) -> LossTrend:
        return LossTrend(*self._own.outliers.course())

    def rolled_back(
        self, *, detector_state: Mapping[str, Any] | None, attempt: int, step: int = -1
    ) -> None:
        """Continue as attempt ``attempt`` after a restore, with the detectors of that checkpoint.

        Call after the state was restored and before the first step of the new attempt, also when a
        relaunched job starts from a checkpoint. If ``detector_state`` is None (the checkpoint has
        none), the detectors start without state. Spent budgets stay spent.
        """
        saved = detector_state or {}
        turn = int(saved.get("turn", self._turn))
        if turn != self._turn:
            self._take_turn(turn)
        states = {turn: saved, **{int(k): v for k, v in saved.get("others", {}).items()}}
        ladders = {turn: self._ladder, **{k: v.ladder for k, v in self._waiting.items()}}
        self._waiting = {t: _Turn(self.config) for t in {*states, *ladders}}
        for t, turn_state in self._waiting.items():
            state = states.get(t)
            if state:
                turn_state.load_state_dict(state)
            # Facts belong to the run: they are passed on when another optimizer's turn comes.
            turn_state.ladder = after_rollback(
                ladders.get(t, self._ladder),
                attempt=attempt,
                step=step,
                known_rate=float((state or {}).get("known_rate", 0.0)),
            )
        self._own = self._waiting.pop(turn)
        self._last_step = step - 1

    def limits(self, turn: int | None = None) -> Limits:
        """Return the limits for the next step on the device: never below the reported ones.

        Args:
            turn: optimizer of that step; None: that of the last step.
        """
        turn_state, ladder = self._of(turn)
        acting, reported = turn_state.outliers.limits(), turn_state.detectors.limits()
        limits = Limits(
            _larger(acting.loss, reported.loss), _larger(acting.grad_norm, reported.grad_norm)
        )
        turn = self._turn if turn is None else turn
        return limits_in_force(limits, ladder, turn) if ladder.facts.accepted else limits

    def max_row(self, turn: int | None = None) -> int:
        """Return the number of updates in a row that the device may withhold for finite outliers.

        Args:
            turn: optimizer of the next step; None: that of the last step.
        """
        return max_row(self._of(turn)[1], self.config.ladder)

    @property
    def is_suspicious(self) -> bool:
        """Whether the host must wait for the next step's numbers: equal on all ranks.

        True during a row of outliers or non-finite steps, and for the first steps.
        """
        ladder = self._ladder
        if ladder.row or ladder.nonfinite:
            return True
        if self._waiting and any(
            o.ladder.row or o.ladder.nonfinite for o in self._waiting.values()
        ):
            return True
        return ladder.facts.clock < _FIRST_STEPS * (1 + len(self._waiting))

    def rebaseline(self, steps: int) -> None:
        """Discard the references of finite rules: a planned change comes within ``steps`` steps."""
        until = self._last_step + steps + 1
        for turn_state in (self._own, *self._waiting.values()):
            turn_state.outliers.rebaseline(steps)
            turn_state.detectors.rebaseline(steps)
            turn_state.ladder = replace(
                turn_state.ladder, row=(), lr_jump=None, announced_until=until
            )

    @property
    def facts(self) -> DurablePolicyState:
        """Memory that no restore sets back: ``msgspec.json.encode`` it into the plan journal."""
        return self._ladder.facts

    @property
    def attempt(self) -> int:
        """Id of the current attempt; 0 until the first record or ``rolled_back`` provides it."""
        return self._ladder.facts.attempt

    @property
    def halted(self) -> bool:
        """Whether the policy halted the run. Never in ``observe``, which stops no run."""
        return bool(self._ladder.facts.halted) and self.mode != "observe"

    @property
    def last_unhealthy_step(self) -> int:
        """The latest unhealthy step of this attempt, or -1: candidates become healthy by it."""
        return self._ladder.last_unhealthy_step

    def lr_factor_at(self, step: int, rate: float | None = None) -> float:
        """Return the factor on the learning rate at ``step``; in ``observe`` always 1.

        Args:
            step: the step.
            rate: rate that the schedule requests; a rate that jumped may be held.
        """
        if self.mode == "observe":
            return 1.0
        return lr_factor_at(self._ladder.facts, step, rate, jump=self.config.ladder.lr_jump)

    def digest(self) -> int:
        """Return 32 bits that are equal on two ranks with equal judgements; exact in a float64."""
        facts, limits = self._ladder.facts, self.limits()
        numbers = struct.pack(
            "<qqqqqdd",
            self._turn,
            facts.attempt,
            facts.ledger_seq,
            facts.last_command,
            self._ladder.last_unhealthy_step,
            -1.0 if limits.loss is None else limits.loss,
            -1.0 if limits.grad_norm is None else limits.grad_norm,
        )
        return zlib.crc32(numbers)

    def detector_state(self) -> dict[str, Any]:
        """Return the detectors' state as JSON types: the part that belongs in a checkpoint."""
        state = self._own.state_dict()
        if self._waiting:
            others = {
                str(turn): turn_state.state_dict() for turn, turn_state in self._waiting.items()
            }
            state |= {"turn": self._turn, "others": others}
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        waiting = {str(k): msgspec.to_builtins(v.ladder) for k, v in self._waiting.items()}
        return {
            "detectors": self.detector_state(),
            "ladder": msgspec.to_builtins(self._ladder),
            "waiting": waiting,
            "last_step": self._last_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the judge that returned ``state``, spent budgets included."""
        self._own, self._waiting = _Turn(self.config), {}
        self._own.load_state_dict(state["detectors"])
        self._ladder = msgspec.convert(state["ladder"], LadderState)
        self._turn = int(state["detectors"].get("turn", 0))
        for turn, ladder in state.get("waiting", {}).items():
            turn_state = self._waiting[int(turn)] = _Turn(self.config)
            turn_state.load_state_dict(state["detectors"]["others"][turn])
            turn_state.ladder = msgspec.convert(ladder, LadderState)
        self._last_step = int(state["last_step"])


def _larger(limit: float | None, other: float | None) -> float | None:
    """Return the larger limit; None if one of them is None."""
    return limit if limit is None or other is None else max(limit, other)
