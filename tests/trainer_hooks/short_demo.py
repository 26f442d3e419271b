"""The demo's training with little to evaluate at its end, which took as long as sixty steps."""

from trainer_hooks.demo import train

train.VALIDATION_BYTES = 10_000

if __name__ == "__main__":
    train.main()
