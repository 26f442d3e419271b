"""Opens a run in a tracker by the tracker's kind."""

import os
from importlib import import_module
from typing import Any

from vitals_plugins.bridges.mirrors.worker import RunDescription, Tracker, TrackerTarget

_CLASSES = {
    "tensorboard": "TensorBoard",
    "wandb": "WandB",
    "mlflow": "MLflow",
    "trackio": "Trackio",
    "otlp": "Otlp",
}


QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
"""Switches off the trackers' telemetry, unless the user has set it: Vitals sends data only to
configured destinations."""


def open_tracker(
    target: TrackerTarget, about: RunDescription, saved_state: dict[str, Any], unclean: bool
) -> Tracker:
    """Open the run in the tracker, created if it is missing.

    Raises:
        MissingDependencyError: the tracker's package is not installed.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    module = import_module(f"vitals_plugins.bridges.mirrors.to_{target.kind}")
    tracker: Tracker = getattr(module, _CLASSES[target.kind])(target, about, saved_state, unclean)
    return tracker
