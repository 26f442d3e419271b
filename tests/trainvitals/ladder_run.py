"""A ladder driven step by step, for the tests of the policy."""

from collections.abc import Sequence
from typing import Any

from trainvitals.policy import CheckpointRef, LadderConfig, LadderState, Mode, Proposal, decide
from trainvitals.records import CommandAck, Decision, Finding, StepRecord

FIRST = CheckpointRef(id="first", step=0)
REFS = (FIRST, CheckpointRef(id="s100", step=100), CheckpointRef(id="s150", step=150))


class Run:
    """A ladder driven step by step; ``attempt`` 1 begins at ``step``."""

    def __init__(
        self,
        *,
        mode: Mode = "heal",
        step: int = 200,
        refs: Sequence[CheckpointRef] = REFS,
        **config: Any,
    ) -> None:
        self.mode, self.step, self.refs = mode, step, refs
        self.config = LadderConfig(**config)
        self.state = LadderState()
        self.ledger: list[Decision] = []
        self.ack: CommandAck | None = None

    def feed(
        self, *kinds: str, command: Proposal | None = None, value: float = 9.5
    ) -> list[Decision]:
        """Take one step per word: "ok", or a finding's cause; return the new decisions."""
        start = len(self.ledger)
        for kind in kinds:
            bad = kind != "ok"
            record = StepRecord(
                step=self.step, attempt=1, loss=2.1, skipped=bad and self.mode != "observe"
            )
            verdict = decide(
                self.state,
                self._findings(kind, value),
                record=record,
                decided_at_step=self.step + 1,
                checkpoints=self.refs,
                command=command,
                mode=self.mode,
                config=self.config,
                now_attempt_id=2,
            )
            self.state, self.ack = verdict.state, verdict.ack
            self.step += 1
            if verdict.decision is not None:
                self.ledger.append(verdict.decision)
        return self.ledger[start:]

    def _findings(self, kind: str, value: float) -> list[Finding]:
        if kind == "ok":
            return []
        names = {"params": "nonfinite_params", "nan": "nonfinite"}
        return [
            Finding(
                kind=names.get(kind, "spike"),
                level="act",
                step=self.step,
                detector="test",
                reason=f"{kind} went wrong",
                rank=3,
                value=value,
                limit=4.2,
                onset_step=self.step,
                cause=kind,
            )
        ]

    def restored(self, step: int) -> None:
        """Go on from ``step``, as after a rollback."""
        self.state = LadderState(facts=self.state.facts, first_step=step)
        self.step = step


STORM = ("nan", "nan", "nan")
