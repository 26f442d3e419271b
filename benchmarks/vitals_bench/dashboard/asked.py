"""Options of the benchmark in addition to ``--quick``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of the benchmark ``dashboard``: programs of peers; "" is the one on PATH."""

    mlflow: str = ""
    tensorboard: str = ""
