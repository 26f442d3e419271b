"""Interface of objects whose state is saved and restored with the training."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasStateDict(Protocol):
    """Objects for ``watch(state=...)``: an EMA, a loader, a communication hook's memory."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of an object given to ``watch``, as plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Load a state that ``state_dict`` returned, into an object given to ``watch``."""
        ...
