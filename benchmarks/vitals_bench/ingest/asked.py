"""Options of the benchmark in addition to ``--quick``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of the benchmark ``ingest``."""

    mlflow: str = ""
    """MLflow's program; "" is the one on PATH."""
    minutes: float = 3.0
    """How long the simulated run lasts."""
