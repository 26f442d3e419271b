"""A call that may hang: made on a thread of its own, and nobody waits for it."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

Spawn = Callable[[str, Callable[[], None]], None]
"""Begins a function and returns at once; given its name too."""


def on_a_thread(name: str, function: Callable[[], None]) -> None:
    """Begin the function on a thread that the end of the process does not wait for."""
    threading.Thread(target=function, name=name, daemon=True).start()


class DetachedCall(Generic[T]):
    """Makes one call at a time; whoever wants its result asks whether it is there.

    For one owner. Where a call never returns, no other one is begun: one thread is lost at most.

    Args:
        name: of the thread.
        call: may take any time.
        spawn: a test hands in one that calls at once.
    """

    def __init__(self, name: str, call: Callable[[], T], *, spawn: Spawn = on_a_thread) -> None:
        self._name = name
        self._call = call
        self._spawn = spawn
        self._begun: float | None = None
        self._outcome: tuple[T | None, Exception | None] | None = None

    def begin(self, now: float) -> bool:
        """Begin a call; False where the last one is under way, or its result was not taken."""
        if self._begun is not None:
            return False
        self._begun = now
        try:
            self._spawn(self._name, self._run)
        except BaseException:
            self._begun = None  # no thread could be had: the next call may try again
            raise
        return True

    def take(self) -> T | None:
        """Return a finished call's result, once, or raise its error; None where there is none."""
        if self._outcome is None:
            return None
        (result, error), self._outcome, self._begun = self._outcome, None, None
        if error is not None:
            raise error
        return result

    def seconds_out(self, now: float) -> float:
        """Return for how long a call has not come back; 0 where none is under way."""
        return 0.0 if self._begun is None or self._outcome is not None else now - self._begun

    def _run(self) -> None:
        try:
            self._outcome = (self._call(), None)
        except Exception as error:  # noqa: BLE001 - it is raised where the result is taken
            self._outcome = (None, error)
