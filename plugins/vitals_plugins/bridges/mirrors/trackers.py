"""Opens a run in a tracker by the tracker's kind."""

import os
from importlib import import_module
from typing import Any

from trainvitals.errors import MissingDependencyError
from vitals_plugins.bridges.mirrors.worker import RunDescription, Tracker, TrackerTarget

_CLASSES = {
    "tensorboard": (
        "TensorBoard",
        "tensorboard.backend.event_processing.event_file_loader",
        "to TensorBoard needs the package tensorboard",
    ),
    "wandb": ("WandB", "wandb", "to Weights & Biases needs the package wandb"),
    "mlflow": ("MLflow", "mlflow.entities", "to MLflow needs the package mlflow or mlflow-skinny"),
    "trackio": ("Trackio", "trackio.sqlite_storage", "to trackio needs the package trackio"),
    "otlp": (
        "Otlp",
        "opentelemetry.exporter.otlp.proto.http.metric_exporter",
        "over OTLP needs the package opentelemetry-exporter-otlp-proto-http",
    ),
}
"""By kind: the class, a module of the required package, and the end of the error without it."""
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
    """Open the mirrored run in the tracker, created if it is missing.

    Raises:
        MissingDependencyError: the tracker's package is not installed.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    class_name, required, needs = _CLASSES[target.kind]
    try:
        import_module(required)
    except ImportError as error:
        raise MissingDependencyError(
            f"mirroring {needs}, which is not installed",
            hint=f"pip install 'trainvitals[{target.kind}]'",
        ) from error
    module = import_module(f"vitals_plugins.bridges.mirrors.to_{target.kind}")
    tracker: Tracker = getattr(module, class_name)(target, about, saved_state, unclean)
    return tracker
