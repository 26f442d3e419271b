"""Checkpoints on disk: written beside the training, proven, never overwritten."""

from trainer_hooks.checkpoints.manifest import Manifest
from trainer_hooks.checkpoints.store import CheckpointStore

__all__ = ["CheckpointStore", "Manifest"]
