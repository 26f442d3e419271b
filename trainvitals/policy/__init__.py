"""Actions for findings: escalation policy, its budgets, and the judge that runs in every rank."""

from trainvitals.policy.judge import Judge, JudgeConfig, Judgement, load_judge_config
from trainvitals.policy.ladder import decide
from trainvitals.policy.rungs import Verdict
from trainvitals.policy.state import (
    CheckpointRef,
    LadderConfig,
    LadderMemory,
    LadderState,
    Mode,
    Proposal,
    lr_factor_at,
)

__all__ = [
    "CheckpointRef",
    "Judge",
    "JudgeConfig",
    "Judgement",
    "LadderConfig",
    "LadderMemory",
    "LadderState",
    "Mode",
    "Proposal",
    "Verdict",
    "decide",
    "load_judge_config",
    "lr_factor_at",
]
