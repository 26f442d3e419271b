"""Importers of third-party logs into one record format: CSV, Trainer, TensorBoard, wandb."""

from vitals_plugins.bridges.importers.assumptions import Assumed, about, assumptions
from vitals_plugins.bridges.importers.columns import ColumnChoice, ImportedLog
from vitals_plugins.bridges.importers.goodput import log_goodput
from vitals_plugins.bridges.importers.recognise import read_history

__all__ = [
    "Assumed",
    "ColumnChoice",
    "ImportedLog",
    "about",
    "assumptions",
    "log_goodput",
    "read_history",
]
