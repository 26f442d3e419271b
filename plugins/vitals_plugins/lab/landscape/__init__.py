"""The loss around a checkpoint, along lines and planes of weights: ``vitals landscape``."""
