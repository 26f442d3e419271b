"""The loss round a checkpoint, along lines and planes of weights: ``vitals landscape``."""
