"""Resources of a planned training: FLOPs, memory per GPU, batch size, days and price. Pure.

Each function names the source of its formula; ``SOURCES`` has them all, for the output's footnotes.
Bytes are per GPU. The model is a decoder-only transformer with GPT-2's block: two LayerNorms,
attention without a stored score matrix (flash), and an MLP four times as wide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from trainvitals.errors import UsageError
from trainvitals.flops import peak_flops, transformer_flops_per_token

Strategy = Literal["DDP", "ZeRO-1", "ZeRO-2", "FSDP"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
TrainingType = Literal["mixed", "bf16", "fp32"]

SOURCES: Mapping[str, str] = {
    "flops": "6 N D: Kaplan et al., Scaling Laws for Neural Language Models, 2020, section 2.1",
    "attention": "12 L d s a token more: Chowdhery et al., PaLM, 2022, appendix B",
    "states": "Rajbhandari et al., ZeRO, 2020, sections 3.1 and 5; FSDP is their stage 3 (Zhao et "
    "al., PyTorch FSDP, 2023)",
    "activations": "Korthikanti et al., Reducing Activation Recomputation, 2022, sections 4.1 and "
    "5, without dropout and stored scores",
    "batch": "McCandlish et al., An Empirical Model of Large-Batch Training, 2018, equations 2.7 "
    "and 2.11; the noise scale, where it was not measured, by Kaplan et al., 2020, equation 1.4 at "
    "the loss of Hoffmann et al., Training Compute-Optimal Large Language Models, 2022, "
    "equation 10",
    "shape": "N = 12 L d^2, d = 128 L: Kaplan et al., 2020, table 1; only where no shape was given",
    "time": "FLOPs over GPUs x peak x utilization; peaks and memory by the vendors' data sheets",
}


class Gpu(NamedTuple):
    """A GPU model."""

    device: str
    """As its driver calls it, which ``peak_flops`` knows."""
    memory_gb: float
    """10^9 bytes, as in its data sheet."""


GPUS: Mapping[str, Gpu] = {
    "b200": Gpu("NVIDIA B200", 180),
    "h200": Gpu("NVIDIA H200", 141),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 80),
    "h100-pcie": Gpu("NVIDIA H100 PCIe", 80),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 80),
    "a100-40gb": Gpu("NVIDIA A100-SXM4-40GB", 40),
    "mi300x": Gpu("AMD Instinct MI300X", 192),
    "l40s": Gpu("NVIDIA L40S", 48),
    "l4": Gpu("NVIDIA L4", 24),
    "v100": Gpu("Tesla V100-SXM2-32GB", 32),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 24),
}


class Shape(NamedTuple):
    """A transformer's sizes."""

    layers: int
    width: int
    vocab: int = 0
    """0: the output layer's activations are not counted."""


class _Bytes(NamedTuple):
    weight: int
    gradient: int
    optimizer: int
    """AdamW: two moments, and master weights if the weights are 16-bit."""
    activation: int


_BYTES: Mapping[TrainingType, _Bytes] = {
    "mixed": _Bytes(2, 2, 12, 2),
    "bf16": _Bytes(2, 2, 4, 2),
    "fp32": _Bytes(4, 4, 8, 4),
}

_ASPECT = 128
_PER_LAYER = 16
"""Activations of a block that backward needs, in widths: the inputs of two LayerNorms (2), of
queries, keys and values (1), these (3), the input of the projection (1), of the MLP's two layers (1
and 4) and of its activation (4)."""


def shape_of(num_params: float, *, vocab: int = 0) -> Shape:
    """Return the usual shape of a planned model with this many parameters.

    ``N = 12 L d^2`` without embeddings (Kaplan et al., 2020, table 1), at ``d = 128 L``.
    """
    layers = max(1, round((num_params / (12 * _ASPECT**2)) ** (1 / 3)))
    width = math.sqrt(num_params / (12 * layers))
    rounded = round(width / _ASPECT) * _ASPECT if width >= _ASPECT else round(width)
    return Shape(layers, max(1, rounded), vocab)


class GpuMemoryNeed(NamedTuple):
    """Bytes of one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    """Layers that are gathered, buckets that are reduced, and the output layer's gradient."""

    @property
    def total(self) -> float:
        """Return their sum: memory in use during the first block's backward."""
        return sum(self)


def state_bytes(
    strategy: Strategy, num_params: float, num_gpus: int, training_type: TrainingType
) -> tuple[float, float, float]:
    """Estimate the bytes of weights, gradients and AdamW's states on one GPU.

    With P the parameters and n the GPUs (Rajbhandari et al., ZeRO, 2020, sections 3.1 and 5):
    mixed precision has 2 P, 2 P and 12 P; ZeRO-1 has an n-th of the last, ZeRO-2 of the last two,
    ZeRO-3 and FSDP of all three.
    """
    size = _BYTES[training_type]
    stage = STRATEGIES.index(strategy)
    over = [num_gpus if stage >= needed else 1 for needed in (3, 2, 1)]
    return (
        size.weight * num_params / over[0],
        size.gradient * num_params / over[1],
        size.optimizer * num_params / over[2],
    )


def activation_bytes(
    shape: Shape, num_tokens: int, training_type: TrainingType, *, checkpointing: bool
) -> float:
    """Estimate the bytes that backward needs of one forward pass over ``num_tokens`` tokens.

    A block keeps 16 values a token and width (Korthikanti et al., 2022, section 4.1: 34 bytes with
    dropout, of which 2 are its masks, and with halves). With every block checkpointed it keeps its
    input, and one block is computed again at a time (section 5). The output layer keeps its input,
    and a probability for each token and word.
    """
    size = _BYTES[training_type].activation
    block = _PER_LAYER * num_tokens * shape.width * size
    inputs = num_tokens * shape.width * size
    inner = block * shape.layers if not checkpointing else inputs * shape.layers + block
    last = 2 * inputs + num_tokens * shape.vocab * (size if size == 4 else size + 4)
    return inner + (last if shape.vocab else 0.0)


def working_bytes(
    strategy: Strategy,
    num_params: float,
    shape: Shape,
    num_gpus: int,
    num_tokens: int,
    training_type: TrainingType,
) -> float:
    """Estimate the other memory of a planned training in use when backward starts.

    FSDP has two gathered blocks, the current and the next, and the current one's gradients (Zhao et
    al., PyTorch FSDP, 2023, section 3.3); DDP a copy of the gradients in buckets, unless
    ``gradient_as_bucket_view`` is on (its documentation), and so do stages 1 and 2. The gradient of
    the output is as large as the output.
    """
    size = _BYTES[training_type]
    output = num_tokens * shape.vocab * size.activation
    if num_gpus < 2:
        return output
    if strategy == "FSDP":
        block = num_params / shape.layers
        return output + block * (2 * size.weight + size.gradient)
    return output + size.gradient * num_params / (num_gpus if strategy == "ZeRO-2" else 1)


def peak_gpu_memory(
    strategy: Strategy,
    *,
    num_params: float,
    shape: Shape,
    num_gpus: int,
    num_tokens: int,
    training_type: TrainingType,
    checkpointing: bool,
) -> GpuMemoryNeed:
    """Estimate one GPU's peak memory, with gradients of earlier micro-batches present.

    Args:
        strategy: how states are divided over the GPUs.
        num_params: of the model.
        shape: of its blocks.
        num_gpus: that it is divided over.
        num_tokens: of one micro-batch on one GPU.
        training_type: of weights and activations.
        checkpointing: whether blocks are computed again in backward.
    """
    return GpuMemoryNeed(
        *state_bytes(strategy, num_params, num_gpus, training_type),
        activation_bytes(shape, num_tokens, training_type, checkpointing=checkpointing),
        working_bytes(strategy, num_params, shape, num_gpus, num_tokens, training_type),
    )


def chinchilla_loss(num_params: float, tokens: float) -> float:
    """Estimate the loss that a model of this size ends with: Hoffmann et al., 2022, equation 10."""
    return float(1.69 + 406.4 / num_params**0.34 + 410.7 / tokens**0.28)


def critical_batch(loss: float) -> float:
    """Estimate the critical batch in tokens at a loss: Kaplan et al., 2020, equation 1.4."""
    return float(2e8 / loss ** (1 / 0.21))


class BatchSizeCost(NamedTuple):
    """Cost of a batch size, relative to the minimum of each (McCandlish et al., 2018)."""

    tokens: float
    steps: float
    more_steps: float
    """Steps, as a multiple of the minimum of any batch."""
    more_tokens: float
    """Tokens, as a multiple of the minimum of any batch."""


def batch_size_cost(tokens: float, noise_scale: float, batch_tokens: float = 0.0) -> BatchSizeCost:
    """Estimate a batch size's cost for a plan; by default it is as large as the noise scale.

    ``(S / S_min - 1) (E / E_min - 1) = 1`` with ``B_noise = E_min / S_min`` (McCandlish et al.,
    2018, equations 2.7 and 2.11), so a batch B needs ``1 + B_noise / B`` times the steps and
    ``1 + B / B_noise`` times the tokens.
    """
    size = batch_tokens or noise_scale
    return BatchSizeCost(size, tokens / size, 1 + noise_scale / size, 1 + size / noise_scale)


_BOUNDS: Mapping[str, tuple[str, int, float]] = {
    "num_params": ("the number of parameters is", 1_000, 1e16),
    "tokens": ("the number of tokens is", 1_000, 1e20),
    "num_gpus": ("the number of GPUs is", 1, 1e7),
    "sequence_length": ("the sequence length is", 1, 1e9),
    "micro_batch": ("the micro-batch is", 1, 1e6),
}
"""A thousand times the largest trained models; below the minimum it is not a transformer."""
_LEANER, _EXPERTS = 4, 1_000
"""A block may have a quarter of the usual parameters, and with experts a thousand times as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """Model, data and hardware of a training."""

    num_params: float
    tokens: float
    gpu: str
    num_gpus: int = 1
    shape: Shape | None = None
    """None: the usual one for that size."""
    sequence_length: int = 2048
    micro_batch: int = 1
    """Sequences at a time on one GPU."""
    training_type: TrainingType = "mixed"
    mfu: float = 0.4
    noise_scale: float = 0.0
    """In tokens; 0: an estimate."""
    gpu_hour_price: float = 0.0

    def __post_init__(self) -> None:
        for name, (description, least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if not least <= value <= most:  # no NaN is
                raise UsageError(
                    f"{description} {value:.4g}; it must be from {least:,} to {most:.0e}"
                )
        if self.gpu not in GPUS:
            raise UsageError(
                f"the GPU is {self.gpu!r}, which is not known", hint=f"one of {', '.join(GPUS)}"
            )
        if not 0 < self.mfu <= 1:
            raise UsageError(f"mfu is {self.mfu:g}; it must be above 0 and at most 1")
        if self.noise_scale and not 1 <= self.noise_scale < math.inf:
            raise UsageError(
                f"the noise scale is {self.noise_scale:g} tokens; it must be at least 1",
                hint="leave it out for an estimate",
            )
        if not 0 <= self.gpu_hour_price < math.inf:
            raise UsageError(f"a GPU-hour's price is {self.gpu_hour_price:g}; it must be 0 or more")
        shape = self.shape
        if shape is None:
            return
        blocks = 12.0 * shape.layers * shape.width**2
        counted_params = blocks + 2.0 * shape.vocab * shape.width  # with the token embeddings
        if self.num_params < blocks / _LEANER or self.num_params > _EXPERTS * counted_params:
            raise UsageError(
                f"layers {shape.layers:,} and width {shape.width:,} make about {blocks:.2g} "
                f"parameters (12 L d^2), and {self.num_params:.4g} were given",
                hint="correct one of them, or leave layers and width out",
            )


class Fit(NamedTuple):
    """The memory of one strategy, with and without checkpointing, and whether the GPU has it."""

    strategy: Strategy
    checkpointing: bool
    memory: GpuMemoryNeed
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Resources of the training."""

    shape: Shape
    flops: float
    """Model FLOPs: ``6 N D`` and attention."""
    attention_flops: float
    """Attention's share of them."""
    gpu_bytes: float
    fits: tuple[Fit, ...]
    noise_scale: float
    batch: BatchSizeCost
    least_batch_tokens: float
    """One micro-batch on each GPU."""
    days: float
    gpu_hours: float
    price: float | None


_USABLE = 0.92
"""Share of a GPU's memory: the rest is the driver's context, NCCL's buffers and fragmentation."""


def plan_training(plan_input: PlanInput) -> TrainingPlan:
    """Estimate the resources of a planned training.

    Raises:
        UsageError: the GPU has no peak for the type.
    """
    shape = plan_input.shape or shape_of(plan_input.num_params)
    num_params = int(plan_input.num_params)
    a_token = transformer_flops_per_token(
        num_params,
        num_layers=shape.layers,
        d_model=shape.width,
        sequence_length=plan_input.sequence_length,
    )
    gpu = GPUS[plan_input.gpu]
    peak = peak_flops(gpu.device, "fp32" if plan_input.training_type == "fp32" else "bf16")
    if peak is None:
        raise UsageError(
            f"{gpu.device} has no tensor peak for {plan_input.training_type}",
            hint="plan it with --precision fp32, or for another GPU",
        )
    flops = a_token * plan_input.tokens
    seconds = flops / (plan_input.num_gpus * peak * plan_input.mfu)
    noise = plan_input.noise_scale or critical_batch(
        chinchilla_loss(plan_input.num_params, plan_input.tokens)
    )
    hours = seconds / 3600 * plan_input.num_gpus
    gpu_bytes = gpu.memory_gb * 1e9
    fits = []
    for checkpointing in (False, True):
        for strategy in STRATEGIES:
            memory_need = peak_gpu_memory(
                strategy,
                num_params=num_params,
                shape=shape,
                num_gpus=plan_input.num_gpus,
                num_tokens=plan_input.micro_batch * plan_input.sequence_length,
                training_type=plan_input.training_type,
                checkpointing=checkpointing,
            )
            fits.append(
                Fit(strategy, checkpointing, memory_need, memory_need.total <= _USABLE * gpu_bytes)
            )
    return TrainingPlan(
        shape=shape,
        flops=flops,
        attention_flops=flops - 6.0 * num_params * plan_input.tokens,
        gpu_bytes=gpu_bytes,
        fits=tuple(fits),
        noise_scale=noise,
        batch=batch_size_cost(plan_input.tokens, noise),
        least_batch_tokens=plan_input.num_gpus
        * plan_input.micro_batch
        * plan_input.sequence_length,
        days=seconds / 86_400,
        gpu_hours=hours,
        price=hours * plan_input.gpu_hour_price if plan_input.gpu_hour_price else None,
    )
