"""Actions for findings: escalation policy, its budgets, and the judge that runs in every rank."""

from trainvitals.policy.actions import PolicyResult
from trainvitals.policy.decide import decide
from trainvitals.policy.evidence import DecisionContext, StepInputs
from trainvitals.policy.judge import Judge, JudgeConfig, Judgement, load_judge_config
from trainvitals.policy.state import (
    CheckpointRef,
    DurablePolicyState,
    Mode,
    PolicyConfig,
    PolicyState,
    Proposal,
    lr_factor_at,
)

__all__ = [
    "CheckpointRef",
    "DecisionContext",
    "DurablePolicyState",
    "Judge",
    "JudgeConfig",
    "Judgement",
    "Mode",
    "PolicyConfig",
    "PolicyResult",
    "PolicyState",
    "Proposal",
    "StepInputs",
    "decide",
    "load_judge_config",
    "lr_factor_at",
]
