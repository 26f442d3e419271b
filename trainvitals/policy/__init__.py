"""Actions for findings: escalation policy, its budgets, and the judge that runs in every rank."""

from trainvitals.policy.judge import Judge, JudgeConfig, Judgement, load_judge_config
from trainvitals.policy.ladder import decide
from trainvitals.policy.rungs import PolicyResult
from trainvitals.policy.state import (
    CheckpointRef,
    DurablePolicyState,
    LadderConfig,
    LadderState,
    Mode,
    Proposal,
    lr_factor_at,
)

__all__ = [
    "CheckpointRef",
    "DurablePolicyState",
    "Judge",
    "JudgeConfig",
    "Judgement",
    "LadderConfig",
    "LadderState",
    "Mode",
    "PolicyResult",
    "Proposal",
    "decide",
    "load_judge_config",
    "lr_factor_at",
]
