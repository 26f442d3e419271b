"""Vitals guards PyTorch training runs: checks every step, skips, rolls back, explains.

    import trainvitals

    with trainvitals.watch(model, optimizer, scheduler) as monitor:
        ...
        monitor.step(loss, max_norm=1.0)

This package is the core: metrics, detectors, policy and formats. It imports neither torch nor SQL.
``watch`` and the other public names come from ``trainer_hooks``, which is loaded at their first
use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_hooks import (
        EMA,
        Attached,
        CheckpointSettings,
        EarlyStopping,
        LRSchedule,
        Monitor,
        RestoredBest,
        SignalSettings,
        StepOutcome,
        attach,
        watch,
    )

__version__ = "0.1.0"

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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # for a type checker, a name that is not listed above is an error

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'trainvitals' has no attribute {name!r}")
        # By name and only now: people import one package, while agent, collector and command line,
        # which import this one too, must not load the training library or torch.
        from importlib import import_module

        try:
            return getattr(import_module("trainer_hooks"), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            hint = "install the build your machine needs, or pip install 'trainvitals[torch]'"
            raise ModuleNotFoundError(
                f"trainvitals.{name} needs torch, which is not installed: {hint}", name="torch"
            ) from error
