"""Opens a run in a tracker by the tracker's kind."""

from importlib import import_module
from typing import Any

from vitals_collector.mirrors.worker import About, Target, Tracker

_CLASSES = {
    "tensorboard": "TensorBoard",
    "wandb": "WandB",
    "mlflow": "MLflow",
    "trackio": "Trackio",
    "otlp": "Otlp",
}


def open_tracker(target: Target, about: About, kept: dict[str, Any], unclean: bool) -> Tracker:
    """Open the run in the tracker, made where it is missing.

    Raises:
        MissingDependencyError: the tracker's package is not installed.
    """
    module = import_module(f"vitals_collector.mirrors.to_{target.kind}")
    tracker: Tracker = getattr(module, _CLASSES[target.kind])(target, about, kept, unclean)
    return tracker
