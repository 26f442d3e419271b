"""Whose rows a collector may store: all, where it is alone on its store."""

from collections.abc import Collection, Iterable
from typing import Protocol

from trainvitals.errors import NotOwnerError


class Claims(Protocol):
    """Whose rows may be stored here."""

    def claim(self, run_ids: Collection[str]) -> dict[str, NotOwnerError]:
        """Own the runs that nobody else does; return for each of the others where it belongs.

        Raises:
            StorageError: the store refused; call again.
        """

    def confirm(self, run_ids: Iterable[str]) -> None:
        """Raise if one of the runs is not owned any more: what was stored of it may not count.

        Raises:
            StorageError: it is to be sent again.
        """


class AllMine:
    """The claims of a collector that is alone on its store."""

    def claim(self, run_ids: Collection[str]) -> dict[str, NotOwnerError]:
        """Return nothing: no other collector has any."""
        return {}

    def confirm(self, run_ids: Iterable[str]) -> None:
        """Do nothing."""


__all__ = ["AllMine", "Claims"]
