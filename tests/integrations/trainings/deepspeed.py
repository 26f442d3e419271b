"""Trainings of DeepSpeed's engine, whatever its stage and precision."""

import os
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import deepspeed
import deepspeed.ops
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from tests.integrations.script import BATCH, MAX_NORM, Script, state_of
from trainer_hooks.integrations.deepspeed import attach

FLOAT16 = {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}
"""The scale halves with every overflow."""

# An option of the later releases; those before always compute it.
KNOWN = deepspeed.runtime.zero.config.DeepSpeedZeroConfig.model_fields
WITHOUT_NORM = {"compute_grad_norm": False} if "compute_grad_norm" in KNOWN else {}

Config = dict[str, Any]


def stage(number: int, **more: Any) -> Config:
    """Return the config of a ZeRO stage."""
    return {"zero_optimization": {"stage": number}, **more}


def groups_of(net: nn.Module, number: int) -> list[dict[str, Any]]:
    """Return the parameters in so many groups: vectors in the second, one element in the third."""
    if number == 1:
        return [{"params": list(net.parameters())}]
    largest = 0 if number == 2 else 1
    matrices = [param for param in net.parameters() if param.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() <= 1 and p.numel() > largest]
    single = [param for param in net.parameters() if param.numel() <= largest]
    parts = (vectors, single) if single else (vectors,)
    return [{"params": matrices}, *({"params": part, "weight_decay": 0.0} for part in parts)]


def without_builds() -> None:
    """Keep DeepSpeed from compiling operators of its own, which takes minutes; gloo will do.

    It refuses float16 on a CPU without instructions for it; torch's own kernels need none.
    """
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    get_accelerator().is_fp16_supported = lambda: True


def make_engine(script: Script, config: Config, *, groups: int = 1) -> Any:
    """Return the engine of a variant; its micro-batches are the same batch again."""
    without_builds()
    deepspeed.init_distributed("gloo", verbose=False)
    net = script.net()
    is_own = "optimizer" in config
    optimizer = None if is_own else script.optimizer(groups_of(net, groups))
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=optimizer,
        model_parameters=groups_of(net, groups) if is_own else None,
        lr_scheduler=None if is_own or "scheduler" in config else script.schedule(optimizer),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": MAX_NORM,
            "steps_per_print": 10**9,
            **config,
        },
    )
    for buffer in engine.module.buffers():
        if buffer.is_floating_point():  # the CPU's batch norm wants all in one precision
            buffer.data = buffer.data.to(next(engine.module.parameters()).dtype)
    return engine


def state(engine: Any) -> list[Tensor]:
    """Return all that a skipped step may not change on this rank, wherever the engine has it."""
    outer = engine.optimizer
    plain = getattr(outer, "optimizer", outer)
    if not is_stage_3(engine):
        return [*engine.module.parameters(), *state_of(engine.module, plain)]
    found: list[Tensor] = [*engine.module.buffers()]
    for flat, group in zip(outer.fp32_partitioned_groups_flat, outer.fp16_groups, strict=True):
        found += [m for m in plain.state.get(flat, {}).values() if isinstance(m, Tensor)]
        for param in group:  # not what they are padded with: nobody ever sets that to a number
            size, at = real_size(param), outer.grad_position[param.ds_id][1]
            found += [param.ds_tensor.narrow(0, 0, size), flat.narrow(0, at, size)]
    return found


def is_stage_3(engine: Any) -> bool:
    """Return whether the ranks hold parts of every parameter."""
    return hasattr(engine.optimizer, "fp16_partitioned_groups")


def real_size(param: Any) -> int:
    """Return how much of a rank's part of a parameter is no padding."""
    size = param.partition_numel()
    return min(size, max(0, param.ds_numel - dist.get_rank() * size))


def gradients(engine: Any) -> Mapping[str, Tensor]:
    """Return what this rank's update will be made from."""
    outer = engine.optimizer
    averaged = getattr(outer, "averaged_gradients", None)
    if is_stage_3(engine):
        return {
            f"{i}.{j}": averaged[i][j].narrow(0, 0, real_size(param))
            for i, group in enumerate(outer.fp16_groups)
            for j, param in enumerate(group)
        }
    if averaged is not None:
        return {
            f"{i}.{j}": grad
            for i, group in averaged.items()
            for j, grad in enumerate(group)
            if not getattr(grad, "_zero_padding", False)
        }
    wide = getattr(outer, "fp32_groups_gradients", None)
    if wide is not None:
        return {f"{i}.{j}": g for i, group in enumerate(wide) for j, g in enumerate(group)}
    return {n: p.grad for n, p in engine.module.named_parameters() if p.grad is not None}


def train(script: Script, config: Config, *, groups: int = 1) -> None:
    """Train as a user of DeepSpeed does."""
    engine = make_engine(script, config, groups=groups)
    dtype = next(engine.module.parameters()).dtype
    batch = {name: tensor.to(dtype) for name, tensor in script.batch().items()}
    print(
        "ENGINE",
        script.folder.name,
        type(engine.optimizer).__name__,
        dtype,
        {b.dtype for b in engine.module.buffers()},
        flush=True,
    )
    with attach(engine):
        for _ in range(script.num_steps):
            script.begin(tensors=state(engine))
            for micro in range(engine.gradient_accumulation_steps()):
                loss = engine(**batch)["loss"]
                engine.backward(loss)
                if micro + 1 == engine.gradient_accumulation_steps():
                    script.poison(gradients(engine))
                engine.step()
            script.end(tensors=state(engine))
    engine.destroy()


BFLOAT16 = {"bf16": {"enabled": True}}
WIDE = {"data_types": {"grad_accum_dtype": "fp32"}}

VARIANTS = {
    "no ZeRO": partial(train, config={}),
    "no ZeRO, bfloat16": partial(train, config=BFLOAT16),
    "ZeRO 1": partial(train, config=stage(1)),
    "ZeRO 1, bfloat16, wide gradients": partial(train, config=stage(1, **BFLOAT16, **WIDE)),
    "ZeRO 2": partial(train, config=stage(2)),
    "ZeRO 2, accumulating, two groups": partial(
        train, config=stage(2, gradient_accumulation_steps=2), groups=2
    ),
    "ZeRO 2, never clipped": partial(
        train,
        config={
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 2, **WITHOUT_NORM},
        },
    ),
    "ZeRO 2, bfloat16": partial(train, config=stage(2, **BFLOAT16)),
    "ZeRO 2, float16 with a scale": partial(train, config=stage(2, fp16=FLOAT16, **WIDE)),
    "ZeRO 3": partial(train, config=stage(3)),
    "ZeRO 3, bfloat16": partial(train, config=stage(3, **BFLOAT16)),
}
if only := os.environ.get("DEEPSPEED_VARIANT"):
    VARIANTS = {only: VARIANTS[only]}
