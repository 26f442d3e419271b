"""The demo's training, of small batches and with little to evaluate at its end.

What the ranks compute took as long as everything else that a test of them waits for.
"""

from trainer_hooks.demo import train

train.BATCH = 8
train.VALIDATION_BYTES = 10_000

if __name__ == "__main__":
    train.main()
