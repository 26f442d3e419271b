"""Checkpoints on disk: written in the background, verified, never overwritten."""
