"""State of a guarded loop for the loop's own checkpoint: created, validated and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer_hooks.exchange.emit import TokenCount
from trainer_hooks.features import check_resumable
from trainer_hooks.step.context import RunContext
from trainvitals.errors import ConfigError, FormatError, NewerVersionError
from trainvitals.policy import Judge, JudgeConfig, StepInputs
from trainvitals.printable import name_type
from trainvitals.records import StepRecord

VERSION = 1
_KEY = "trainvitals_loop"
_MOST_STEPS = 2**53
_DAMAGE = (ArithmeticError, AttributeError, ConfigError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class LoopState:
    """State of a loop, validated."""

    run_id: str
    attempt: int
    step: int
    detectors: dict[str, Any]
    tokens: TokenCount
    features: dict[str, Any]
    """States of the features, by key; None if the run did not use one."""


def loop_state(run: RunContext, step: int) -> dict[str, Any]:
    """Return the state of the loop as JSON types, so that it can resume."""
    return {
        _KEY: VERSION,
        "run_id": run.run_dir.run_id,
        "attempt": run.attempt,
        "step": step,
        "detectors": run.judge.detector_state(),
        "tokens_seen": run.log.tokens.seen,
        "tokens_trained": run.log.tokens.trained,
        **run.features.resumable_state(),
    }


def read_loop_state(state: Mapping[str, Any], config: JudgeConfig) -> LoopState | None:
    """Validate a resumed loop's state; return None if it is empty, as for a run without Vitals.

    Raises:
        FormatError: it is not a state of a loop, or this version of Vitals is too old for it.
    """
    if isinstance(state, Mapping) and not state:
        return None
    version = state.get(_KEY) if isinstance(state, Mapping) else None
    if not isinstance(version, int):
        keys = ", ".join(map(repr, list(state)[:6])) if isinstance(state, Mapping) else "none"
        raise FormatError(
            f"load_state_dict() was given {name_type(state)} (keys: {keys}), which is not a "
            "monitor's state",
            hint="pass what monitor.state_dict() returned",
        )
    if version > VERSION:
        raise NewerVersionError(
            f"the monitor's state has version {version}; this program reads up to {VERSION}",
            hint="install the version of Vitals that wrote the checkpoint, or leave the state out: "
            "the limits then warm up again",
        )
    try:
        _check_judge_state(Judge(config), state["detectors"])
        if not 0 <= int(state["step"]) < _MOST_STEPS:
            raise ValueError(f"step is {state['step']}")
        return LoopState(
            run_id=str(state["run_id"]),
            attempt=int(state["attempt"]),
            step=int(state["step"]),
            detectors=dict(state["detectors"]),
            tokens=TokenCount(int(state["tokens_seen"]), int(state["tokens_trained"])),
            features=check_resumable(state),
        )
    except _DAMAGE as error:
        raise FormatError(
            f"the monitor's state is damaged: {type(error).__name__}: {error}",
            hint="leave it out: the limits then warm up again",
        ) from error


def _check_judge_state(judge: Judge, state: dict[str, Any]) -> None:
    """Judge a step with a resumed state, so that a damaged one fails here and not in the loop."""
    judge.rolled_back(detector_state=state, attempt=1, step=0)
    judge.limits()
    record = StepRecord(step=0, attempt=1, loss=1.0, loss_max=1.0, grad_norm=1.0)
    judge.judge(record, StepInputs(0))
    judge.limits()
