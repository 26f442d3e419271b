"""Stand-ins for a device's side stream on the CPU: what is queued there runs when a device may.

The training's own stream is the CPU itself, so its work is done when it is called.
"""

from collections import deque


class Earliest:
    """Runs work as soon as it is queued."""

    def run(self, work):
        work()

    def wait(self, end):
        pass

    def join(self, end):
        pass

    def drain(self):
        pass


class Latest:
    """Runs work when somebody waits for it, and not before: the latest a device may choose."""

    def __init__(self):
        self._queue = deque()

    def run(self, work):
        end = object()
        self._queue.append((end, work))
        return end

    def wait(self, end):
        while any(queued is end for queued, _ in self._queue):
            self._queue.popleft()[1]()

    def join(self, end):
        self.wait(end)

    def drain(self):
        pass


SIDES = {"on the host": lambda: None, "earliest": Earliest, "latest": Latest}
"""Where and when the copies run: without a device, and at the ends of what a device may choose."""
