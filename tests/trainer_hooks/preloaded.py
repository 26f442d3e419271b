"""Modules that ranks import, imported once in the process that they are forks of."""

# ruff: noqa: F401

import gc

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.utils.data

import tests.support.watched
import trainer_hooks.demo.inject
import trainer_hooks.monitor
import trainer_hooks.recovery.checkpoints.store

gc.collect()
gc.freeze()  # no rank walks through them again, or copies their pages
