"""What a metric is, and those that a training rank measures.

Columns only grow and are found by name: a run stored before one was there is read as ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "info"]
Scope = Literal["run", "rank", "gpu", "node", "process", "agent", "collector", "hooks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric."""

    name: str
    """Prometheus name: what ``/metrics`` and dashboards call it."""
    help: str
    unit: str
    """Base unit: seconds, bytes, ratio, watts, celsius, hertz, tokens, or "" for a plain number."""
    kind: Kind = "gauge"
    scope: Scope
    stream: str = ""
    """The row stream that carries it, or "" where it exists only on ``/metrics``."""
    column: str = ""
    dtype: Literal["f8", "i8"] = "f8"
    labels: tuple[str, ...] = ("run",)


def _step(
    column: str,
    unit: str,
    text: str,
    *,
    scope: Scope = "run",
    dtype: Literal["f8", "i8"] = "f8",
    kind: Kind = "gauge",
    name: str = "",
) -> MetricSpec:
    labels = ("run",) if scope == "run" else ("run", "rank")
    return MetricSpec(
        name=name or f"train_{column}",
        help=text,
        unit=unit,
        kind=kind,
        scope=scope,
        stream="steps",
        column=column,
        dtype=dtype,
        labels=labels,
    )


STEP_METRICS: tuple[MetricSpec, ...] = (
    _step("loss", "", "Training loss of the step: weighted mean over all ranks."),
    _step("loss_max", "", "Largest loss of a rank in the step."),
    _step("loss_max_rank", "", "Rank with the largest or a non-finite loss.", dtype="i8"),
    _step("grad_norm", "", "L2 norm of all gradients before clipping."),
    _step("grad_norm_clipped", "", "L2 norm of all gradients after clipping."),
    _step("loss_limit", "", "Loss above which the step is an outlier; absent in warm-up."),
    _step("grad_norm_limit", "", "Gradient norm above which the step is an outlier."),
    _step("learning_rate", "", "Learning rate of the first parameter group, as applied."),
    _step("lr_factor", "ratio", "Factor that Vitals puts on the learning rate; 1 is untouched."),
    _step("loss_scale", "", "Loss scale of the gradient scaler."),
    _step(
        "verdict",
        "",
        "Bits: 1 loss and 2 gradients non-finite, 4 loss and 8 norm outlier, "
        "16 scaler overflow, 32 a rank failed to prepare, 64 outlier withheld, 128 the loop clips, "
        "256 optimizer state or buffers non-finite, 512 a snapshot was missed.",
        dtype="i8",
    ),
    _step("skipped", "", "1 where the update was not applied.", dtype="i8"),
    _step("culprit_rank", "", "Rank that alone made the step bad, or -1.", dtype="i8"),
    _step(
        "nonfinite_params",
        "",
        "Ranks that found non-finite parameters; measured after a bad step only.",
        dtype="i8",
    ),
    _step("readback_lag", "", "Steps between an update and its handling on the host.", dtype="i8"),
    _step(
        "tokens_seen",
        "tokens",
        "Tokens consumed, skipped steps included, over all ranks.",
        dtype="i8",
        kind="counter",
        name="train_tokens_total",
    ),
    _step(
        "tokens_trained",
        "tokens",
        "Tokens whose update was applied.",
        dtype="i8",
        kind="counter",
        name="train_tokens_trained_total",
    ),
    _step("tokens_per_second", "tokens", "Tokens of all ranks per second of the step."),
    _step(
        "mfu_ratio",
        "ratio",
        "Model FLOPs utilization, 0 to 1: of the FLOPs counted by `count_flops`, given as "
        "`flops_per_token`, or 6 per parameter and token; absent where the peak of the device is "
        "unknown.",
    ),
    _step("rank_loss", "", "This rank's own loss.", scope="rank"),
    _step(
        "step_duration_seconds",
        "seconds",
        "Wall time from the end of the last step to the end of this one.",
        scope="rank",
    ),
    _step(
        "data_wait_seconds",
        "seconds",
        "Part of the step spent waiting for the next batch.",
        scope="rank",
    ),
    _step(
        "monitor_seconds",
        "seconds",
        "Part of the step spent inside Vitals on the host, the ranks' exchange left out.",
        scope="rank",
    ),
    _step(
        "memory_allocated_bytes",
        "bytes",
        "Device memory in tensors at the end of the step.",
        scope="rank",
    ),
    _step(
        "memory_peak_bytes",
        "bytes",
        "Peak device memory in tensors since the run started.",
        scope="rank",
    ),
    _step("epoch", "", "Epoch of the batch.", scope="rank", dtype="i8"),
    _step(
        "batch_index",
        "",
        "Index of the batch in its epoch: which data fed this step. The last one, of several.",
        scope="rank",
        dtype="i8",
    ),
    _step(
        "num_batches",
        "",
        "Batches of this rank that fed the step, up to `batch_index`.",
        scope="rank",
        dtype="i8",
    ),
    _step(
        "perplexity",
        "",
        "Exponential of the loss, taken as nats per token; absent where tokens are not known.",
    ),
    _step("loss_spread", "", "Largest less smallest loss of a rank; absent on one rank."),
    _step(
        "overflow_steps",
        "",
        "Updates the gradient scaler skipped since the start; absent without a scaler.",
        dtype="i8",
        kind="counter",
        name="train_overflow_steps_total",
    ),
    _step("overflow_ratio", "ratio", "Share of the last 100 steps in which the scaler overflowed."),
    _step(
        "samples_per_second",
        "",
        "Samples of this rank's batches per second of the step; known with `Monitor.batches` over "
        "a map-style DataLoader.",
        scope="rank",
    ),
    _step(
        "forward_backward_seconds",
        "seconds",
        "Host time from the end of the last step to `Monitor.step`, less the wait for data where "
        "that is known; a GPU runs behind.",
        scope="rank",
    ),
    _step(
        "optimizer_seconds",
        "seconds",
        "Host time in the optimizers' and schedulers' steps; a GPU runs behind.",
        scope="rank",
    ),
    _step(
        "communication_seconds",
        "seconds",
        "Time in the ranks' one exchange, the wait for the slowest rank included, on the device's "
        "clock; absent on one rank.",
        scope="rank",
    ),
    _step(
        "memory_estimate_bytes",
        "bytes",
        "Device memory that parameters, gradients, optimizer states and buffers need: what the "
        "peak has beyond it is activations and workspace.",
        scope="rank",
    ),
    _step(
        "memory_alloc_retries",
        "",
        "Allocations that succeeded only after the allocator had freed its cache.",
        scope="rank",
        dtype="i8",
        kind="counter",
        name="train_memory_alloc_retries_total",
    ),
    _step(
        "memory_ooms",
        "",
        "Allocations that failed for want of device memory.",
        scope="rank",
        dtype="i8",
        kind="counter",
        name="train_memory_ooms_total",
    ),
    _step(
        "weight_norm",
        "",
        "L2 norm of all parameters as the step began. Opt-in: one pass over them in each sampled "
        "step.",
    ),
    _step(
        "update_norm",
        "",
        "L2 norm of the update that the step before made. Opt-in: a copy of the parameters, and "
        "three passes over them in each sampled step.",
    ),
    _step(
        "update_ratio",
        "ratio",
        "Update norm through weight norm; it moves before the loss does. Opt-in, as `update_norm`.",
    ),
    _step(
        "noise_scale_ratio",
        "ratio",
        "Gradient noise scale as a multiple of all ranks' batch: above 1 a larger batch still "
        "pays. Opt-in, DDP only: one pass over the gradients in each sampled step.",
    ),
    _step(
        "critical_batch_tokens",
        "tokens",
        "Gradient noise scale in tokens. Opt-in, as `noise_scale_ratio`.",
    ),
)


def _layer(column: str, unit: str, text: str) -> MetricSpec:
    return MetricSpec(
        name=f"train_layer_{column}",
        help=text,
        unit=unit,
        scope="run",
        stream="layers",
        column=column,
        labels=("run", "layer"),
    )


LAYER_METRICS: tuple[MetricSpec, ...] = (
    _layer(
        "grad_norm",
        "",
        "L2 norm of one layer's gradients before clipping; on /metrics as top-k only.",
    ),
    _layer("weight_norm", "", "L2 norm of one layer's parameters. Opt-in, as `weight_norm`."),
    _layer("update_norm", "", "L2 norm of the last update of one layer. Opt-in, as `update_norm`."),
    _layer(
        "activation_rms",
        "",
        "Root mean square of a module's output on rank 0. Opt-in: a forward hook, and two passes "
        "over the output in each sampled step.",
    ),
    _layer(
        "activation_max",
        "",
        "Largest magnitude in a module's output on rank 0. Opt-in, as `activation_rms`.",
    ),
    _layer(
        "activation_dead_ratio",
        "ratio",
        "Share of a module's features whose output is 0 for the whole batch of rank 0. Opt-in, as "
        "`activation_rms`.",
    ),
)
