"""Loggers behind one call, each in the form that its own documentation shows first."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

NAMES = tuple(f"train/metric_{i}" for i in range(12))
"""The twelve scalars that every logger gets at each step."""


class Logger(NamedTuple):
    """Takes twelve scalars a step; writes what is left when closed."""

    log: Callable[[int, Sequence[float]], None]
    close: Callable[[], object]


def _prometheus(folder: Path) -> Logger:
    from prometheus_client import CollectorRegistry, Gauge

    registry = CollectorRegistry()
    gauges = [
        Gauge(name.replace("/", "_"), name, ["run"], registry=registry).labels("bench")
        for name in NAMES
    ]

    def log(step: int, values: Sequence[float]) -> None:
        for gauge, value in zip(gauges, values, strict=True):
            gauge.set(value)

    return Logger(log, lambda: None)


def _wandb(folder: Path) -> Logger:
    os.environ.update(WANDB_SILENT="true", WANDB_MODE="offline", WANDB_DIR=str(folder))
    import wandb

    run: Any = wandb.init(project="bench", dir=str(folder), mode="offline")

    def log(step: int, values: Sequence[float]) -> None:
        run.log(dict(zip(NAMES, values, strict=True)), step=step)

    return Logger(log, run.finish)


def _tensorboard(folder: Path) -> Logger:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder))

    def log(step: int, values: Sequence[float]) -> None:
        for name, value in zip(NAMES, values, strict=True):
            writer.add_scalar(name, value, step)

    return Logger(log, writer.close)


def _mlflow(folder: Path) -> Logger:
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    import mlflow

    mlflow.set_experiment("bench")
    mlflow.start_run()

    def log(step: int, values: Sequence[float]) -> None:
        mlflow.log_metrics(dict(zip(NAMES, values, strict=True)), step=step, synchronous=False)

    return Logger(log, mlflow.end_run)


LOGGERS: dict[str, tuple[str, Callable[[Path], Logger]]] = {
    "prometheus-client": ("prometheus_client", _prometheus),
    "wandb": ("wandb", _wandb),
    "tensorboard": ("tensorboard", _tensorboard),
    "mlflow": ("mlflow", _mlflow),
}
"""By distribution: the module to look for, and how to open it in a folder."""

PEERS = (*LOGGERS, "lightning")


def is_installed(peer: str) -> bool:
    """Return whether the peer can be imported; it is not imported."""
    return importlib.util.find_spec(_module(peer)) is not None


def version_of(peer: str) -> str:
    """Return the peer's version, or ``not installed``."""
    if not is_installed(peer):
        return "not installed"
    try:
        return importlib.metadata.version(peer)
    except importlib.metadata.PackageNotFoundError:  # mlflow may come from mlflow-skinny
        others = importlib.metadata.packages_distributions()
        return importlib.metadata.version(others[_module(peer).partition(".")[0]][0])


def _module(peer: str) -> str:
    """Return the name of the peer's module."""
    return LOGGERS[peer][0] if peer in LOGGERS else peer


def open_logger(peer: str, folder: Path) -> Logger:
    """Return the peer's logger, writing below ``folder``."""
    return LOGGERS[peer][1](folder)
