"""Fault plans as data: built fluently, passed as JSON, applied by the training.

FaultPlan().nan_gradient_at(rank=1, step=40).poison_batches(first=90, last=130)
"""

from typing import Literal, Self

import msgspec

from trainvitals.errors import UsageError

FaultKind = Literal[
    "nan_gradient",
    "nan_loss",
    "spike_gradient",
    "poison_batches",
    "nan_parameters",
    "shuffled_parameters",
    "kill",
]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. ``rank`` -1 is every rank; a window of batches has ``last`` exclusive."""

    kind: FaultKind
    rank: int = -1
    step: int = -1
    last: int = -1

    def hits(self, *, rank: int, step: int) -> bool:
        """Return whether the test's fault hits this rank at this step or batch."""
        here = self.rank in (-1, rank)
        return here and (self.step <= step < self.last if self.last >= 0 else step == self.step)


class FaultPlan(msgspec.Struct, frozen=True):
    """Faults to inject in one training, each at most once."""

    faults: tuple[Fault, ...] = ()

    def _with_fault(self, fault: Fault) -> Self:
        """Return the test's plan with one more fault."""
        return type(self)((*self.faults, fault))

    def nan_gradient_at(self, *, rank: int, step: int) -> Self:
        """Plan a NaN in one gradient element of a rank, to test the reaction."""
        return self._with_fault(Fault(kind="nan_gradient", rank=rank, step=step))

    def spike_gradient_at(self, *, rank: int, step: int) -> Self:
        """Plan gradients of one rank times 1e6, after they were averaged, for a test."""
        return self._with_fault(Fault(kind="spike_gradient", rank=rank, step=step))

    def nan_loss_at(self, *, rank: int, step: int) -> Self:
        """Plan a NaN loss on one rank before backward, for a test."""
        return self._with_fault(Fault(kind="nan_loss", rank=rank, step=step))

    def poison_batches(self, *, first: int, last: int) -> Self:
        """Plan bad data in batches ``first`` to ``last`` (exclusive) on every rank, for a test."""
        if not 0 <= first < last:
            raise UsageError(f"poisoned batches {first} to {last}; the first must come before last")
        return self._with_fault(Fault(kind="poison_batches", step=first, last=last))

    def nan_parameters_at(self, *, rank: int, step: int) -> Self:
        """Plan NaN parameters on one rank before the step's forward, for a test."""
        return self._with_fault(Fault(kind="nan_parameters", rank=rank, step=step))

    def shuffled_parameters_at(self, *, step: int) -> Self:
        """Plan shuffled parameters, alike on all ranks, for a test: finite damage."""
        return self._with_fault(Fault(kind="shuffled_parameters", step=step))

    def kill_at(self, *, rank: int, step: int) -> Self:
        """Plan a SIGKILL for one rank in the middle of a step, for a test."""
        return self._with_fault(Fault(kind="kill", rank=rank, step=step))

    def only(self, fault: Fault) -> Self:
        """Return a plan with only that fault, to test it separately."""
        return type(self)((fault,))

    def to_json(self) -> str:
        """Return the plan of faults as JSON, to pass it to the training under test."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan from ``to_json`` in the training under test; no fault for ""."""
        return msgspec.json.decode(text, type=cls) if text else cls()
