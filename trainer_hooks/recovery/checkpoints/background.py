"""One thread that does what is queued, in order, while there is something."""

import threading
from collections import deque
from collections.abc import Callable


class Background:
    """Runs jobs one after another beside the training; a job deals with its own errors.

    Its caller bounds the queue: a save holds a slot of the snapshots, a mark is one for each start.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[Callable[[], None]] = deque()
        self._guard = threading.Condition()
        self._worker: threading.Thread | None = None

    def add(self, job: Callable[[], None]) -> None:
        """Queue a job; does not wait."""
        with self._guard:
            self._jobs.append(job)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._worker.start()

    def wait(self, timeout: float | None) -> bool:
        """Wait until all jobs are done; return False if the time ran out before."""
        with self._guard:
            return self._guard.wait_for(lambda: self._worker is None, timeout)

    def _work(self) -> None:
        """Do what is queued, then end: no thread is left behind by a run that saves nothing."""
        while True:
            with self._guard:
                if not self._jobs:
                    self._worker = None
                    self._guard.notify_all()
                    return
                job = self._jobs.popleft()
            job()
