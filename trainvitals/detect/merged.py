"""What the detectors see that only tell: one step of the whole job, and one sample of a node.

The collector makes them, of the rows that all ranks wrote for a step; a replay of a stored run
makes the same. Nothing here decides: what may act is judged in the job, on ``StepRecord`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainvitals.records import Finding

Value = float | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedStep:
    """One step: rank 0's columns, each rank's own, the layers' where they were written.

    Columns have the names of ``trainvitals.catalog``. A missing one is absent or None, never 0.
    """

    step: int
    attempt: int
    time_unix_ns: int
    run: Mapping[str, Value] = field(default_factory=dict)
    """Columns that rank 0 writes for all: ``loss``, ``learning_rate``, ``loss_scale``..."""
    ranks: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    """Columns of every rank's own, by rank: ``step_duration_seconds``, ``rank_loss``..."""
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Columns of the layers, by layer: ``grad_norm``, ``update_norm``, ``activation_max``..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """One sample of a node's GPUs by its agent."""

    node: str
    time_unix_ns: int
    step: int
    """The newest step of the run that was known then."""
    gpus: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    """Columns of every GPU, by its UUID."""


class StepWatcher(Protocol):
    """Tells what merged steps show. Reads no clock, never raises on data."""

    name: str

    @property
    def goes_on(self) -> bool:
        """Whether what was told as it began still holds."""
        ...

    def update(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Take one step in; steps come in order, a newer attempt may go back."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the watcher that gave ``state``."""
        ...
