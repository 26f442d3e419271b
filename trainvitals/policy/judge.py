"""Detectors and escalation policy together: the one class that judges a run, live or later.

``DetectorSet`` only reports; ``Judge`` adds the rule that may withhold updates, and passes all
findings to the policy.
"""

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import fields, replace

from trainvitals.auto_clip import AutoClipConfig
from trainvitals.config import Settings, load_settings
from trainvitals.detect.detector_set import DetectConfig, DetectorSet
from trainvitals.detect.outliers import Limits, LossKind, OutlierConfig, OutlierRule
from trainvitals.detect.user_alerts import Rule, load_rules
from trainvitals.policy.actions import PolicyResult
from trainvitals.policy.commands import execute_command
from trainvitals.policy.decide import decide, is_lr_restart
from trainvitals.policy.evidence import DecisionContext, LossTrend, StepInputs
from trainvitals.policy.state import (
    DurablePolicyState,
    Mode,
    PolicyConfig,
    PolicyState,
    Proposal,
    after_rollback,
    carry_run_state,
    limits_in_force,
    lr_factor_at,
    max_row,
)
from trainvitals.records import CommandAck, Decision, Finding, StateRead, StepRecord

_FIRST_STEPS = 2
"""Steps whose numbers the host waits for: absurd values are stopped from the second step on."""


class JudgeConfig(Settings, frozen=True, kw_only=True):
    """Settings of the detectors and the escalation policy."""

    section = "judge"

    outlier: OutlierConfig = OutlierConfig()
    """Finite outliers whose update may be withheld."""
    detect: DetectConfig = DetectConfig()
    """Detectors that only report."""
    ladder: PolicyConfig = PolicyConfig()
    """Escalation policy: the section ``[ladder]``."""
    loss_kind: LossKind = "minimize"
    """Meaning of the loss: ``watch(loss_kind=...)``."""
    auto_clip: AutoClipConfig = AutoClipConfig()
    """Limit of ``max_norm="auto"``. The loop clips; the judge does not read it."""
    rules: tuple[Rule, ...] = ()
    """Custom alerts. Each rank applies them to its own rows; the judge does not."""


SECTIONS: dict[str, type[Settings]] = {
    "ladder": PolicyConfig,
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


class _OptimizerJudge:
    """Detectors and policy state of one optimizer that is stepped alone, or of all together."""

    def __init__(self, config: JudgeConfig) -> None:
        kind = config.loss_kind
        self.outliers = OutlierRule(config.outlier, loss_kind=kind)
        self.detectors = DetectorSet(config.detect, loss_kind=kind)
        self.policy = PolicyState()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of one optimizer's detectors and policy, as JSON types."""
        return {
            **self.detectors.state_dict(),
            "outlier": self.outliers.state_dict(),
            "known_rate": self.policy.rate_to_know,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the judge of one optimizer that returned ``state``."""
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
        self._current = _OptimizerJudge(self.config)
        self._current.policy = PolicyState(facts=facts or DurablePolicyState())
        self._turn = 0
        self._waiting: dict[int, _OptimizerJudge] = {}
        """State of the optimizers other than the current one."""
        self._last_step = -1

    def _switch_optimizer(self, turn: int) -> None:
        """Judge the next steps of a second optimizer, within the run's budgets."""
        before = self._current
        self._waiting[self._turn] = before
        waiting = self._waiting.pop(turn, None)
        self._current = _OptimizerJudge(self.config) if waiting is None else waiting
        self._current.policy = carry_run_state(self._current.policy, before.policy)
        self._turn = turn

    def _next_state(self, turn: int | None) -> tuple[_OptimizerJudge, PolicyState]:
        """Return one optimizer's references for judging its next step, without a change."""
        if turn is None or turn == self._turn:
            return self._current, self._current.policy
        optimizer = self._waiting.get(turn) or _OptimizerJudge(self.config)
        return optimizer, carry_run_state(optimizer.policy, self._current.policy)

    def judge(self, record: StepRecord, inputs: StepInputs) -> Judgement:
        """Judge one step and return the findings and the action.

        Call once per step, in order. A record of another attempt (in flight while the run rolled
        back) is ignored. Everything after a halt, or between a decided rollback and
        ``rolled_back``, is ignored too. A decided ``rollback`` identifies the checkpoint: restore
        it, then call ``rolled_back``.
        """
        if record.turn != self._turn:
            self._switch_optimizer(record.turn)
        optimizer, before = self._current, self._current.policy
        attempt = before.facts.attempt
        if attempt == 0 and record.attempt:
            attempt = record.attempt
            facts = replace(before.facts, attempt=attempt)
            optimizer.policy = replace(before, facts=facts)
        if record.attempt != attempt or before.rolling_back or self.halted:
            return Judgement()
        spikes = optimizer.outliers.update(record)
        detected = optimizer.detectors.update(record)
        if spikes and detected:  # once: the rule that may act reports it with the limit in force
            detected = tuple(finding for finding in detected if finding.kind != "spike")
        findings = spikes + detected + ((inputs.written,) if inputs.written is not None else ())
        context = DecisionContext(
            record, inputs, self.mode, self.config.ladder, self.config.loss_kind, self._loss_trend
        )
        result = decide(optimizer.policy, findings, context)
        optimizer.policy, self._last_step = result.state, record.step
        if result.decision is not None and result.decision.rule == "operator_accepted":
            optimizer.detectors.accept_level()
        elif is_lr_restart(record, before, self.config.ladder):
            # A warm restart: the loss rises as expected, and nothing is withheld for it.
            optimizer.outliers.suspend(self.config.ladder.lr_jump_steps)
            if record.rate_declared:
                optimizer.detectors.rebaseline(self.config.ladder.lr_jump_steps)
        is_done = result.ack is not None and result.ack.status == "done"
        return Judgement(
            findings + result.findings,
            result.decision,
            result.ack,
            result.readings,
            inputs.command if is_done else None,
        )

    def command(
        self, command: Proposal, *, decided_at_step: int, unavailable_commands: Mapping[str, str]
    ) -> Judgement:
        """Carry out or refuse an operator's command between two steps, while the run is paused.

        Args:
            command: a command that adds no entry to the decision log.
            decided_at_step: the latest completed step.
            unavailable_commands: commands that this loop cannot carry out, with the reasons.
        """
        if command.number <= self._current.policy.facts.last_command:
            return Judgement()
        record = StepRecord(step=self._last_step, attempt=self.attempt)
        inputs = StepInputs(decided_at_step, unavailable_commands=unavailable_commands)
        context = DecisionContext(record, inputs, self.mode, self.config.ladder)
        policy = self._current.policy
        result = execute_command(PolicyResult(policy), policy, command, context)
        self._current.policy = result.state
        is_done = result.ack is not None and result.ack.status == "done"
        return Judgement(ack=result.ack, order=command if is_done else None)

    def _loss_trend(self) -> LossTrend:
        """Return the earlier level of the loss, which the judge uses as evidence."""
        return LossTrend(*self._current.outliers.loss_statistics())

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
            self._switch_optimizer(turn)
        states = {turn: saved, **{int(k): v for k, v in saved.get("others", {}).items()}}
        policies = {turn: self._current.policy, **{k: v.policy for k, v in self._waiting.items()}}
        self._waiting = {t: _OptimizerJudge(self.config) for t in {*states, *policies}}
        for t, optimizer in self._waiting.items():
            state = states.get(t)
            if state:
                optimizer.load_state_dict(state)
            # Facts belong to the run: they are passed on when another optimizer's turn comes.
            optimizer.policy = after_rollback(
                policies.get(t, self._current.policy),
                attempt=attempt,
                step=step,
                known_rate=float((state or {}).get("known_rate", 0.0)),
            )
        self._current = self._waiting.pop(turn)
        self._last_step = step - 1

    def limits(self, turn: int | None = None) -> Limits:
        """Return the limits for the next step on the device: never below the reported ones.

        Args:
            turn: optimizer of that step; None: that of the last step.
        """
        optimizer, policy = self._next_state(turn)
        acting, reported = optimizer.outliers.limits(), optimizer.detectors.limits()
        limits = Limits(
            _larger(acting.loss, reported.loss), _larger(acting.grad_norm, reported.grad_norm)
        )
        turn = self._turn if turn is None else turn
        return limits_in_force(limits, policy, turn) if policy.facts.accepted else limits

    def max_row(self, turn: int | None = None) -> int:
        """Return the number of updates in a row that the device may withhold for finite outliers.

        Args:
            turn: optimizer of the next step; None: that of the last step.
        """
        return max_row(self._next_state(turn)[1], self.config.ladder)

    @property
    def is_suspicious(self) -> bool:
        """Return whether the host must wait for the next step's numbers; equal on all ranks.

        True during a row of outliers or non-finite steps, and for the first steps.
        """
        policy = self._current.policy
        if policy.row or policy.nonfinite:
            return True
        if self._waiting and any(
            o.policy.row or o.policy.nonfinite for o in self._waiting.values()
        ):
            return True
        return policy.facts.clock < _FIRST_STEPS * (1 + len(self._waiting))

    def rebaseline(self, steps: int) -> None:
        """Discard the references of finite rules: a planned change comes within ``steps`` steps."""
        until = self._last_step + steps + 1
        for optimizer in (self._current, *self._waiting.values()):
            optimizer.outliers.rebaseline(steps)
            optimizer.detectors.rebaseline(steps)
            optimizer.policy = replace(
                optimizer.policy, row=(), lr_jump=None, suspected=-1, announced_until=until
            )

    @property
    def facts(self) -> DurablePolicyState:
        """Memory that no restore sets back: ``msgspec.json.encode`` it into the plan journal."""
        return self._current.policy.facts

    @property
    def attempt(self) -> int:
        """Id of the current attempt; 0 until the first record or ``rolled_back`` provides it."""
        return self._current.policy.facts.attempt

    @property
    def halted(self) -> bool:
        """Return whether the policy halted the run. Never in ``observe``, which stops no run."""
        return bool(self._current.policy.facts.halted) and self.mode != "observe"

    @property
    def last_unhealthy_step(self) -> int:
        """Return the latest unhealthy step of this attempt; -1 if the judge saw none."""
        return self._current.policy.last_unhealthy_step

    def lr_factor_at(self, step: int, rate: float | None = None) -> float:
        """Return the factor on the learning rate at ``step``; in ``observe`` always 1.

        Args:
            step: the step.
            rate: rate that the schedule requests; a rate that jumped may be held.
        """
        if self.mode == "observe":
            return 1.0
        return lr_factor_at(self._current.policy.facts, step, rate, jump=self.config.ladder.lr_jump)

    def digest(self) -> int:
        """Return 32 bits that are equal on two ranks with equal judgements; exact in a float64."""
        facts, limits = self._current.policy.facts, self.limits()
        numbers = struct.pack(
            "<qqqqqdd",
            self._turn,
            facts.attempt,
            facts.ledger_seq,
            facts.last_command,
            self._current.policy.last_unhealthy_step,
            -1.0 if limits.loss is None else limits.loss,
            -1.0 if limits.grad_norm is None else limits.grad_norm,
        )
        return zlib.crc32(numbers)

    def detector_state(self) -> dict[str, Any]:
        """Return the state of the judge's detectors as JSON types: it belongs in a checkpoint."""
        state = self._current.state_dict()
        if self._waiting:
            others = {
                str(turn): optimizer.state_dict() for turn, optimizer in self._waiting.items()
            }
            state |= {"turn": self._turn, "others": others}
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state of detectors and policy as JSON types."""
        waiting = {str(k): msgspec.to_builtins(v.policy) for k, v in self._waiting.items()}
        return {
            "detectors": self.detector_state(),
            "ladder": msgspec.to_builtins(self._current.policy),
            "waiting": waiting,
            "last_step": self._last_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the judge that returned ``state``, spent budgets included."""
        self._current, self._waiting = _OptimizerJudge(self.config), {}
        self._current.load_state_dict(state["detectors"])
        self._current.policy = msgspec.convert(state["ladder"], PolicyState)
        self._turn = int(state["detectors"].get("turn", 0))
        for turn, policy in state.get("waiting", {}).items():
            optimizer = self._waiting[int(turn)] = _OptimizerJudge(self.config)
            optimizer.load_state_dict(state["detectors"]["others"][turn])
            optimizer.policy = msgspec.convert(policy, PolicyState)
        self._last_step = int(state["last_step"])


def _larger(limit: float | None, other: float | None) -> float | None:
    """Return the larger of the policy's and the detectors' limit; None if one of them is None."""
    return limit if limit is None or other is None else max(limit, other)
