"""Detectors and ladder together: the one class that judges a run, live and afterwards."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from trainvitals.config import load_settings
from trainvitals.detect import DetectConfig, DetectorSet, Limits
from trainvitals.detect.burst import BurstConfig
from trainvitals.detect.level import LevelConfig
from trainvitals.detect.spike import GradNormConfig, SpikeConfig
from trainvitals.policy.ladder import SAME_LEVEL_RULE, decide
from trainvitals.policy.state import (
    CheckpointRef,
    Facts,
    LadderConfig,
    LadderState,
    Mode,
    Proposal,
    lr_factor_at,
)
from trainvitals.records import CommandAck, Decision, Finding, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """Settings of what judges a run."""

    detect: DetectConfig = field(default_factory=DetectConfig)
    """What counts as bad."""
    ladder: LadderConfig = field(default_factory=LadderConfig)
    """What is done about it."""


SECTIONS = {
    "ladder": LadderConfig,
    "loss": SpikeConfig,
    "grad_norm": GradNormConfig,
    "burst": BurstConfig,
    "level": LevelConfig,
}


def load_judge_config(environ: Mapping[str, str]) -> JudgeConfig:
    """Return the settings of what judges a run: the sections of ``SECTIONS``.

    They come from the TOML file that ``VITALS_CONFIG`` names, overridden by variables such as
    ``VITALS_LADDER_MARGIN``. Rank 0 reads them for all ranks, and the run records them.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value that cannot work.
    """
    path = environ.get("VITALS_CONFIG")
    found = load_settings(SECTIONS, path=Path(path) if path else None, environ=environ)
    detect = DetectConfig(
        loss=found["loss"],
        grad_norm=found["grad_norm"],
        burst=found["burst"],
        level=found["level"],
    )
    return JudgeConfig(detect=detect, ladder=found["ladder"])


class Judgement(NamedTuple):
    """What was said and decided about one step."""

    findings: tuple[Finding, ...] = ()
    decision: Decision | None = None
    ack: CommandAck | None = None


class Judge:
    """Feeds step records to the detectors, and their findings to the ladder.

    Runs in every rank, in the collector and in a replay. Given the same records and arguments in
    the same order it says the same. Its state has two parts, kept apart: ``detector_state()`` goes
    into snapshots and checkpoints, ``facts`` goes into the plan journal and is never set back.
    """

    def __init__(
        self, config: JudgeConfig | None = None, mode: Mode = "guard", *, facts: Facts | None = None
    ) -> None:
        self.config = config or JudgeConfig()
        self.mode: Mode = mode
        self._detectors = DetectorSet(self.config.detect)
        self._ladder = LadderState(facts=facts or Facts())

    def judge(
        self,
        record: StepRecord,
        *,
        decided_at_step: int,
        checkpoints: Sequence[CheckpointRef] = (),
        command: Proposal | None = None,
        now_attempt_id: int = 0,
    ) -> Judgement:
        """Take one step in and return what is to be said and done about it.

        Call once per step, in order. A record of another branch (in flight while the run rolled
        back) is ignored, and so is everything after a halt and between a decided rollback and
        ``rolled_back``. A decided ``rollback`` names the checkpoint: restore it, then call
        ``rolled_back``.
        """
        facts = self._ladder.facts
        if facts.attempt == 0 and record.attempt:
            facts = replace(facts, attempt=record.attempt)
            self._ladder = replace(self._ladder, facts=facts)
        if record.attempt != facts.attempt or self._ladder.rolling_back or self.halted:
            return Judgement()
        findings = self._detectors.update(record)
        self._ladder, decision, ack = decide(
            self._ladder,
            findings,
            record=record,
            decided_at_step=decided_at_step,
            checkpoints=checkpoints,
            command=command,
            mode=self.mode,
            config=self.config.ladder,
            now_attempt_id=now_attempt_id,
        )
        if decision is not None and decision.rule == SAME_LEVEL_RULE:
            self._detectors.rebaseline(0, metric="loss")
        return Judgement(findings, decision, ack)

    def rolled_back(
        self, *, detector_state: Mapping[str, Any] | None, attempt: int, step: int = -1
    ) -> None:
        """Go on as branch ``attempt`` after a restore, with the detectors of that checkpoint.

        Call after the state was restored and before the first step of the new branch, also when a
        relaunched job starts from a checkpoint. None as ``detector_state`` (the checkpoint has
        none) starts the detectors anew. What was spent stays spent.
        """
        self._detectors = DetectorSet(self.config.detect)
        if detector_state is not None:
            self._detectors.load_state_dict(dict(detector_state))
        facts = replace(self._ladder.facts, attempt=attempt)
        self._ladder = LadderState(facts=facts, first_step=step)

    def limits(self) -> Limits:
        """Return what the device compares the next steps with."""
        return self._detectors.limits()

    def rebaseline(self, steps: int) -> None:
        """Forget the finite rules' reference: a planned change comes within ``steps`` steps."""
        self._detectors.rebaseline(steps)

    @property
    def facts(self) -> Facts:
        """What no restore sets back; ``msgspec.json.encode`` it into the plan journal."""
        return self._ladder.facts

    @property
    def attempt(self) -> int:
        """Id of the present branch; 0 until the first record or ``rolled_back`` tells it."""
        return self._ladder.facts.attempt

    @property
    def halted(self) -> bool:
        """Whether the ladder gave up. Never in ``observe``, where nobody is stopped."""
        return bool(self._ladder.facts.halted) and self.mode != "observe"

    @property
    def last_unhealthy_step(self) -> int:
        """The newest step of this branch that was bad, or -1; candidates become healthy by it."""
        return self._ladder.last_unhealthy_step

    def lr_factor_at(self, step: int) -> float:
        """Return the factor on the learning rate at ``step``; in ``observe`` always 1."""
        return 1.0 if self.mode == "observe" else lr_factor_at(self._ladder.facts, step)

    def digest(self) -> int:
        """Return 32 bits that are equal on two ranks which judged alike; exact in a float64."""
        facts, limits = self._ladder.facts, self.limits()
        numbers = struct.pack(
            "<qqqqdd",
            facts.attempt,
            facts.ledger_seq,
            facts.last_command,
            self._ladder.last_unhealthy_step,
            -1.0 if limits.loss is None else limits.loss,
            -1.0 if limits.grad_norm is None else limits.grad_norm,
        )
        return zlib.crc32(numbers)

    def detector_state(self) -> dict[str, Any]:
        """Return the detectors' state as JSON types: the part that belongs into a checkpoint."""
        return self._detectors.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "detectors": self._detectors.state_dict(),
            "ladder": msgspec.to_builtins(self._ladder),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the judge that gave ``state``, spent budgets included."""
        self._detectors = DetectorSet(self.config.detect)
        self._detectors.load_state_dict(state["detectors"])
        self._ladder = msgspec.convert(state["ladder"], LadderState)
