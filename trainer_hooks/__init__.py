"""The part of Vitals that lives in the training process.

    monitor = trainer_hooks.watch(model, optimizer, scheduler)
    ...
    monitor.step(loss, max_norm=1.0)

Importing it costs next to nothing: torch-side modules are loaded at the first use of ``watch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_hooks._attach import Attached, attach
    from trainer_hooks._watch import watch
    from trainer_hooks.callbacks.early_stopping import RestoredBest
    from trainer_hooks.guard.ema import EMA
    from trainer_hooks.guard.lr_schedule import LRSchedule
    from trainer_hooks.measures.settings import SignalSettings
    from trainer_hooks.monitor import Monitor
    from trainer_hooks.outcome import StepOutcome
    from trainer_hooks.recovery.manager import CheckpointSettings
    from trainvitals.early_stopping import EarlyStopping

__all__ = [
    "EMA",
    "Attached",
    "CheckpointSettings",
    "EarlyStopping",
    "LRSchedule",
    "Monitor",
    "RestoredBest",
    "SignalSettings",
    "StepOutcome",
    "attach",
    "watch",
]

_HOMES = {
    "EMA": "trainer_hooks.guard.ema",
    "Attached": "trainer_hooks._attach",
    "CheckpointSettings": "trainer_hooks.recovery.manager",
    "EarlyStopping": "trainvitals.early_stopping",
    "LRSchedule": "trainer_hooks.guard.lr_schedule",
    "Monitor": "trainer_hooks.monitor",
    "RestoredBest": "trainer_hooks.callbacks.early_stopping",
    "SignalSettings": "trainer_hooks.measures.settings",
    "StepOutcome": "trainer_hooks.outcome",
    "attach": "trainer_hooks._attach",
    "watch": "trainer_hooks._watch",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer_hooks' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
