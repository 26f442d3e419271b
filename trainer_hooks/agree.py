"""At the start all ranks succeed, or all raise: none is left waiting in a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from trainer_hooks.ranks import Ranks
from trainvitals.errors import UsageError, VitalsError

T = TypeVar("T")


def on_every_rank(ranks: Ranks, call: Callable[[], T]) -> list[T]:
    """Run the call on every rank and return what each returned, in rank order. Collective.

    Raises:
        Exception: this rank's own error; elsewhere the first failing rank's, as a VitalsError.
    """
    value: T | None = None
    failure: Exception | None = None
    try:
        value = call()
    except Exception as error:  # noqa: BLE001 - raised below, once all ranks know
        failure = error
    outcomes = ranks.gather((value, _to_tell(failure, ranks.rank)))
    if failure is not None:
        raise failure
    for _, elsewhere in outcomes:
        if elsewhere is not None:
            raise elsewhere
    return [value for value, _ in outcomes]  # type: ignore[misc]


def _to_tell(error: Exception | None, rank: int) -> VitalsError | None:
    if error is None or isinstance(error, VitalsError):
        return error
    return UsageError(
        f"rank {rank} could not start: {type(error).__name__}: {error}",
        hint="that rank's own output shows where",
    )


def check_same(what: str, values: Sequence[object], hint: str) -> None:
    """Refuse, on all ranks alike, what differs between them.

    Raises:
        UsageError: it does; the first rank that differs is named.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            raise UsageError(f"{what}: {value} on rank {rank}, {values[0]} on rank 0", hint=hint)
