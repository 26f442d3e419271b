"""Escalation policy driven step by step, for its tests."""

from collections.abc import Sequence
from typing import Any

from trainvitals.detect.outliers import LossKind
from trainvitals.policy import (
    CheckpointRef,
    DecisionContext,
    Mode,
    PolicyConfig,
    PolicyState,
    Proposal,
    StepInputs,
    decide,
)
from trainvitals.policy.evidence import LossTrend
from trainvitals.policy.state import max_row
from trainvitals.records import CommandAck, Decision, Finding, StateRead, StepRecord

FIRST = CheckpointRef(id="first", step=0)
REFS = (FIRST, CheckpointRef(id="s100", step=100), CheckpointRef(id="s150", step=150))


REPLICAS = ("apart", "either", "again", "settings")


class Run:
    """Escalation policy driven step by step; ``attempt`` 1 starts at ``step``."""

    def __init__(
        self,
        *,
        mode: Mode = "heal",
        step: int = 200,
        refs: Sequence[CheckpointRef] = REFS,
        **config: Any,
    ) -> None:
        self.mode, self.step, self.refs = mode, step, refs
        self.probe = config.pop("probe", None)
        self.clips = config.pop("clips", True)
        self.finding = config.pop("finding", "spike")
        self.onset = config.pop("onset", 0)
        self.trend = LossTrend(2.0, 0.1, 3.0, config.pop("lowest", 0.0))
        self.loss_kind: LossKind = config.pop("loss_kind", "minimize")
        self.config = PolicyConfig(**{"nonfinite_in_a_row": 3, **config})
        self.state = PolicyState()
        self.ledger: list[Decision] = []
        self.told: list[Finding] = []
        self.readings: list[StateRead] = []
        self.ack: CommandAck | None = None

    def feed(
        self,
        *kinds: str,
        command: Proposal | None = None,
        value: float = 9.5,
        evaluation: float | None = None,
    ) -> list[Decision]:
        """Take one step per word: "ok", a finding's cause, "reported" for ``finding``, what was
        said of a snapshot ("state", "missed"), of replicas ("apart" on rank 3, "either", "again",
        "settings"), of weights ("written"); return the new decisions."""
        start = len(self.ledger)
        for kind in kinds:
            bad = kind not in ("ok", "reported", "written", "state", "missed", *REPLICAS)
            finite = kind == "outlier"
            withheld = finite and self._num_in_row() < max_row(self.state, self.config)
            record = StepRecord(
                step=self.step,
                attempt=1,
                loss=value if finite else 2.1,
                loss_limit=4.2 if finite else None,
                skipped=bad and self.mode != "observe" and (withheld or not finite),
                withheld=withheld,
                clips=self.clips,
                nonfinite_state=int(kind == "state"),
                nonfinite_state_rank=3 if kind == "state" else -1,
                snapshots_missed=int(kind == "missed"),
                replicas_differ={"apart": 1, "again": 1, "either": 2}.get(kind, 0),
                replica_rank=3 if kind in ("apart", "again", "settings") else -1,
                replayed_alike=kind == "again",
                settings_differ=kind == "settings",
            )
            findings = self._findings(kind, value)
            verdict = decide(
                self.state,
                findings,
                DecisionContext(
                    record,
                    StepInputs(
                        self.step + 1,
                        checkpoints=self.refs,
                        next_attempt=2,
                        command=command,
                        probe=self.probe,
                        evaluation=evaluation,
                        written=findings[0] if kind == "written" else None,
                    ),
                    mode=self.mode,
                    config=self.config,
                    loss_kind=self.loss_kind,
                    loss_trend=lambda: self.trend,
                ),
            )
            self.told += verdict.findings
            self.readings += verdict.readings
            self.state, self.ack = verdict.state, verdict.ack
            self.step += 1
            if verdict.decision is not None:
                self.ledger.append(verdict.decision)
        return self.ledger[start:]

    def _num_in_row(self) -> int:
        """Return how many updates the device has withheld in a row."""
        num = 0
        for outlier in self.state.row:
            num = num + 1 if outlier.withheld else 0
        return num

    def _findings(self, kind: str, value: float) -> list[Finding]:
        if kind in ("ok", "state", "missed", *REPLICAS):
            return []
        names = {"params": "nonfinite_params", "nan": "nonfinite", "written": "weight_norm"}
        names["reported"] = self.finding
        return [
            Finding(
                kind=names.get(kind, "spike"),
                level="advisory" if kind in ("reported", "written") else "actionable",
                step=self.step,
                detector="test",
                reason=f"{kind} went wrong",
                rank=3,
                value=value,
                limit=4.2,
                onset_step=self.step + self.onset,
                cause=kind,
            )
        ]

    def restored(self, step: int) -> None:
        """Go on from ``step``, as after a rollback."""
        self.state = PolicyState(facts=self.state.facts, first_step=step)
        self.step = step


STORM = ("nan", "nan", "nan")
