"""Checkpoints on disk: written beside the training, proven, never overwritten."""
