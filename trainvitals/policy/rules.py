"""What the rules of decisions are called for people: one place for pages, reports and commands."""

from __future__ import annotations

RULES: dict[str, str] = {
    "nonfinite": "a loss or gradient that is NaN or infinite",
    "outlier": "a finite outlier",
    "level_accepted": "so many outliers in a row that they are a new level",
    "recurring_level": "outliers of one kind that come again and again",
    "operator_accepted": "a person said that it was healthy",
    "nonfinite_params": "parameters that are NaN or infinite",
    "nonfinite_streak": "too many losses in a row that are NaN or infinite",
    "state_damaged": "the probe found the model damaged",
    "evaluation": "an evaluation found the model damaged",
    "lr_jump": "a jump of the learning rate that damaged the model",
    "budget": "the rollback budget is used up",
    "no_checkpoint": "no healthy checkpoint to go back to",
    "stuck": "rollbacks did not help",
    "command": "a person's command",
    "rollback_failed": "the rollback could not be carried out",
}
"""By ``Decision.rule``; one that is not here is of an older version and stands for itself."""


def rule_words(rule: str) -> str:
    """Return the rule for people: its words where there are any, else its name."""
    return RULES.get(rule, rule)
