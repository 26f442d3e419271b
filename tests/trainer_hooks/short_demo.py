"""The demo's training, of small batches and with little to evaluate at its end.

What the ranks compute took as long as everything else that a test of them waits for. With
``PACE_SECONDS`` in the environment a rank sleeps in each step: one that trains until the test ends
it would use a core, and each of its steps is stored. ``SMALL_MODEL`` is for tests that need the
ranks and not what they learn.
"""

import os
import time

from trainer_hooks.demo import train

PACE, SMALL = "PACE_SECONDS", "SMALL_MODEL"

train.BATCH = 8
train.VALIDATION_BYTES = 10_000
if os.environ.get(SMALL):
    train.CONTEXT, train.WIDTH, train.LAYERS, train.HEADS = 32, 16, 1, 2


# ``tests/e2e/test_versions.py`` also trains with an earlier version, which has the other name.
INJECTOR = "FaultInjector" if "FaultInjector" in vars(train) else "Injector"


class PacedInjector(vars(train)[INJECTOR]):
    """Sleeps before each forward."""

    def before_forward(self, model, step):
        time.sleep(float(os.environ.get(PACE, "0")))
        super().before_forward(model, step)


vars(train)[INJECTOR] = PacedInjector

if __name__ == "__main__":
    train.main()
