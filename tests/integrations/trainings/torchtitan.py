"""torchtitan's own ``Trainer``, with the script's network, on CPU ranks.

When it is imported it asks torch for the accelerator, and where there is none it takes CUDA: so it
is told of the CPU. The clip, the optimizers, the schedules, the metrics and the checkpoints are
torchtitan's; what is sharded how is said in ``parallelize``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.integrations.script import DECAY, LR, MAX_NORM, Net, Script, make_batch, make_net


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


_CPU = SimpleNamespace(
    set_device=_nothing,
    synchronize=_nothing,
    empty_cache=_nothing,
    reset_peak_memory_stats=_nothing,
    current_device=lambda: 0,
    get_device_name=lambda _=None: "cpu",
    get_device_properties=lambda _=None: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda _=None: {},
)
with (
    patch("torch._utils._get_available_device_type", lambda: "cpu"),
    patch("torch._utils._get_device_module", lambda _: _CPU),
):
    import torchtitan.distributed.utils as distributed
    import torchtitan.train

from torchtitan.components.loss import IGNORE_INDEX  # noqa: E402
from torchtitan.components.lr_scheduler import LRSchedulersContainer  # noqa: E402
from torchtitan.components.optimizer import build_optimizers  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.models.llama3 import (  # noqa: E402
    TransformerModelArgs,
    get_train_spec,
    parallelize_llama,
)
from torchtitan.models.llama3.infra.parallelize import apply_ddp  # noqa: E402
from torchtitan.protocols.model import BaseModelArgs  # noqa: E402
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from trainer_hooks.integrations.torchtitan import attach  # noqa: E402

distributed.set_pg_timeouts = _nothing  # gloo has no barrier for a device
torchtitan.train.time = SimpleNamespace(perf_counter=perf_counter, sleep=_nothing)


class Model(Net):
    """The script's network as torchtitan makes it: on no device, then filled."""

    def __init__(self, _args: Any) -> None:
        super().__init__()

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return super().forward(inputs, labels)["loss"]

    @torch.no_grad()
    def init_weights(self, buffer_device: Any = None) -> None:
        rng = torch.get_rng_state()
        whole = make_net().state_dict()
        torch.set_rng_state(rng)
        for name, tensor in self.state_dict().items():
            if hasattr(tensor, "device_mesh"):
                tensor.copy_(
                    torch.distributed.tensor.distribute_tensor(
                        whole[name], tensor.device_mesh, tensor.placements
                    )
                )
            else:
                tensor.copy_(whole[name])


@dataclass
class Args(BaseModelArgs):
    def update_from_config(self, job_config: JobConfig, **_: Any) -> None:
        """Nothing of the job changes the network."""

    def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
        return sum(p.numel() for p in model.parameters()), 1


def parallelize(model: Model, parallel_dims: Any, _config: JobConfig) -> Model:
    """Shard as torchtitan's own models are: FSDP2, whose gradients are summed, or DDP."""
    if not parallel_dims.fsdp_enabled:
        apply_ddp(model, parallel_dims.get_mesh("dp_replicate"), enable_compile=False)
        return model
    mesh = parallel_dims.get_mesh("fsdp")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    return model


class Loader:
    """Gives this rank's batch, over and over; the labels go to the network as well."""

    def __init__(self, rank: int) -> None:
        self._batch = make_batch(rank)
        self.given = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            self.given += 1
            labels = self._batch["labels"]
            yield {"input": self._batch["inputs"], "labels": labels}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def loss_sum(pred: Tensor, labels: Tensor) -> Tensor:
    """Return the loss as torchtitan wants it: the sum over the labels that count."""
    return pred * (labels != IGNORE_INDEX).sum()


register_train_spec(
    "script",
    TrainSpec(
        model_cls=Model,
        model_args={"net": Args()},
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=lambda optimizers, _config, _steps: LRSchedulersContainer(
            optimizers, lambda step: DECAY**step
        ),
        build_dataloader_fn=lambda dp_rank, **_: Loader(dp_rank),
        build_tokenizer_fn=None,
        build_loss_fn=lambda _config, **_: loss_sum,
    ),
)


class Tokens(Loader):
    """Random tokens, a part of whose labels do not count: other ones on each rank."""

    def __init__(self, dp_rank: int) -> None:
        rows = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(dp_rank))
        self._inputs, self._labels = rows[:, :-1], rows[:, 1:].clone()
        self._labels[:, 5 + dp_rank : 12] = IGNORE_INDEX
        self.given = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            self.given += 1
            yield {"input": self._inputs}, self._labels


def _parallelize_llama(model: Any, parallel_dims: Any, config: JobConfig) -> Any:
    parallelize_llama(model, parallel_dims, config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


register_train_spec(
    "llama",
    replace(
        get_train_spec(),
        model_args={"tiny": TransformerModelArgs(dim=32, n_layers=2, n_heads=2, vocab_size=64)},
        parallelize_fn=_parallelize_llama,
        build_dataloader_fn=lambda dp_rank, **_: Tokens(dp_rank),
        build_tokenizer_fn=None,
        state_dict_adapter=None,
    ),
)


def job(folder: Path, num_steps: int) -> JobConfig:
    """Return the job: torchtitan's defaults but for what the script says."""
    config = JobConfig()
    config.job.dump_folder = str(folder)
    config.model.name, config.model.flavor = "script", "net"
    config.optimizer.lr, config.optimizer.implementation = LR, "fused"
    config.training.steps, config.training.max_norm = num_steps, MAX_NORM
    config.training.local_batch_size = 4
    config.training.mixed_precision_param = "float32"
    config.metrics.log_freq = 1
    config.comm.trace_buf_size = 0
    return config


class Scripted(Trainer):
    """Plays the script: the faults come in as if backward had made them."""

    script: Script

    def train_step(self, data_iterator: Any) -> None:
        self.calls = 0
        model, (optimizer,) = self.model_parts[0], self.optimizers
        self.script.begin(model, optimizer)
        super().train_step(data_iterator)
        self.script.end(model, optimizer)

    def forward_backward_step(self, **batch: Any) -> Tensor:
        loss = super().forward_backward_step(**batch)
        self.calls += 1
        if self.calls == self.gradient_accumulation_steps:
            named = self.model_parts[0].named_parameters()
            self.script.poison({name: p.grad for name, p in named if p.grad is not None})
        return loss


def trained(script: Script, *, micro_batches: int = 1, implementation: str = "fused") -> None:
    """Train with the real Trainer; FSDP2 over both ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    config = job(script.folder, script.num_steps)
    config.training.global_batch_size = 4 * script.world * micro_batches
    config.optimizer.implementation = implementation
    trainer = Scripted(config)
    trainer.script = script
    attach(trainer)
    trainer.train()
    trainer.close()


VARIANTS = {
    "Trainer, FSDP2": trained,
    "Trainer, FSDP2, accumulated": partial(trained, micro_batches=2),
    "Trainer, FSDP2, not fused": partial(trained, implementation="foreach"),
}
