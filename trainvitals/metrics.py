"""Definition of a metric, and the metrics that a training rank measures.

Columns are only added and are found by name: a run from before a column was added stays readable.
"""

from typing import Literal

import msgspec

from trainvitals.records import VERDICT_BITS

Kind = Literal["gauge", "counter", "info"]
Scope = Literal["run", "rank", "gpu", "node", "process", "agent", "collector", "hooks"]


class MetricSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One metric."""

    name: str
    """Name in Prometheus and dashboards."""
    help: str
    unit: str
    """Base unit: seconds, bytes, ratio, watts, celsius, hertz, tokens, or "" for a plain number."""
    kind: Kind = "gauge"
    scope: Scope
    stream: str = ""
    """The row stream with its column, or "" if it exists only on ``/metrics``."""
    column: str = ""
    dtype: Literal["f8", "i8"] = "f8"
    labels: tuple[str, ...] = ("run",)


def _step_metric(
    column: str,
    unit: str,
    text: str,
    *,
    scope: Scope = "run",
    dtype: Literal["f8", "i8"] = "f8",
    kind: Kind = "gauge",
    name: str = "",
) -> MetricSpec:
    """Define a metric that a rank measures: a column of the ``steps`` rows."""
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
    _step_metric("loss", "", "Training loss of the step: weighted mean over all ranks."),
    _step_metric("loss_max", "", "Highest loss of any rank in the step."),
    _step_metric("loss_max_rank", "", "Rank with the highest, or a non-finite, loss.", dtype="i8"),
    _step_metric("grad_norm", "", "L2 norm of all gradients before clipping."),
    _step_metric("grad_norm_clipped", "", "L2 norm of all gradients after clipping."),
    _step_metric("loss_limit", "", "Loss above which the step is an outlier; absent in warm-up."),
    _step_metric("grad_norm_limit", "", "Gradient norm above which the step is an outlier."),
    _step_metric("learning_rate", "", "Learning rate of the first parameter group, as applied."),
    _step_metric(
        "lr_factor", "ratio", "Factor by which Vitals scales the learning rate; 1 means unchanged."
    ),
    _step_metric("loss_scale", "", "Loss scale of the gradient scaler."),
    _step_metric(
        "verdict",
        "",
        f"Bits: {', '.join(f'{bit} {text}' for bit, text in VERDICT_BITS.items())}.",
        dtype="i8",
    ),
    _step_metric("skipped", "", "1 if the update was not applied.", dtype="i8"),
    _step_metric("culprit_rank", "", "Rank that alone caused the bad step, or -1.", dtype="i8"),
    _step_metric(
        "nonfinite_params",
        "",
        "Number of ranks with non-finite parameters; measured only after a bad step.",
        dtype="i8",
    ),
    _step_metric(
        "readback_lag", "", "Steps between an update and the host's decision about it.", dtype="i8"
    ),
    _step_metric(
        "tokens_seen",
        "tokens",
        "Tokens consumed, skipped steps included, over all ranks.",
        dtype="i8",
        kind="counter",
        name="train_tokens_total",
    ),
    _step_metric(
        "tokens_trained",
        "tokens",
        "Tokens whose update was applied.",
        dtype="i8",
        kind="counter",
        name="train_tokens_trained_total",
    ),
    _step_metric("tokens_per_second", "tokens", "Tokens of all ranks per second of the step."),
    _step_metric(
        "mfu_ratio",
        "ratio",
        "Model FLOPs utilization, 0 to 1: of the FLOPs counted by `count_flops`, given as "
        "`flops_per_token`, or 6 per parameter and token; absent if the device's peak FLOPS are "
        "unknown.",
    ),
    _step_metric("rank_loss", "", "This rank's local loss.", scope="rank"),
    _step_metric(
        "step_duration_seconds",
        "seconds",
        "Wall time from the end of the previous step to the end of this one.",
        scope="rank",
    ),
    _step_metric(
        "data_wait_seconds",
        "seconds",
        "Time of the step spent waiting for the next batch.",
        scope="rank",
    ),
    _step_metric(
        "monitor_seconds",
        "seconds",
        "Host time of the step spent in Vitals, without the all-reduce.",
        scope="rank",
    ),
    _step_metric(
        "memory_allocated_bytes",
        "bytes",
        "Device memory allocated to tensors at the end of the step.",
        scope="rank",
    ),
    _step_metric(
        "memory_peak_bytes",
        "bytes",
        "Peak device memory allocated to tensors since the run started.",
        scope="rank",
    ),
    _step_metric("epoch", "", "Epoch of the batch.", scope="rank", dtype="i8"),
    _step_metric(
        "batch_index",
        "",
        "Index in the epoch of the batch that fed this step; with several, the last one.",
        scope="rank",
        dtype="i8",
    ),
    _step_metric(
        "num_batches",
        "",
        "Batches of this rank that fed the step, up to `batch_index`.",
        scope="rank",
        dtype="i8",
    ),
    _step_metric(
        "perplexity",
        "",
        "Exponential of the loss in nats per token; absent without a token count.",
    ),
    _step_metric("loss_spread", "", "Highest minus lowest per-rank loss; absent on one rank."),
    _step_metric(
        "overflow_steps",
        "",
        "Updates the gradient scaler skipped since the start; absent without a scaler.",
        dtype="i8",
        kind="counter",
        name="train_overflow_steps_total",
    ),
    _step_metric(
        "overflow_ratio",
        "ratio",
        "Share of the last 100 steps in which the gradient scaler overflowed.",
    ),
    _step_metric(
        "samples_per_second",
        "",
        "Samples of this rank's batches per second of the step; available with `Monitor.batches` "
        "over a map-style DataLoader.",
        scope="rank",
    ),
    _step_metric(
        "forward_backward_seconds",
        "seconds",
        "Host time from the end of the previous step to `Monitor.step`, minus the wait for data "
        "where it is measured, and `checkpoint_seconds`; a GPU runs asynchronously behind.",
        scope="rank",
    ),
    _step_metric(
        "checkpoint_seconds",
        "seconds",
        "Host time that snapshots and saves took from the loop since the previous step; absent "
        "without checkpoints. A GPU copies in parallel.",
        scope="rank",
    ),
    _step_metric(
        "evaluation_seconds",
        "seconds",
        "Host time since the previous step in which the loop evaluated: within "
        '`monitor.phase("evaluate")`, and what came before a call of `Monitor.evaluate`. It is in '
        "`forward_backward_seconds` too; absent where it was not told.",
        scope="rank",
    ),
    _step_metric(
        "optimizer_seconds",
        "seconds",
        "Host time in the optimizers' and schedulers' steps; a GPU runs asynchronously behind.",
        scope="rank",
    ),
    _step_metric(
        "communication_seconds",
        "seconds",
        "Device time of the step's all-reduce between ranks, including the wait for the slowest "
        "rank; absent on one rank.",
        scope="rank",
    ),
    _step_metric(
        "memory_estimate_bytes",
        "bytes",
        "Device memory that parameters, gradients, optimizer states and buffers need; the rest of "
        "the peak is activations and workspace.",
        scope="rank",
    ),
    _step_metric(
        "memory_alloc_retries",
        "",
        "Allocations that succeeded only after the allocator freed its cache.",
        scope="rank",
        dtype="i8",
        kind="counter",
        name="train_memory_alloc_retries_total",
    ),
    _step_metric(
        "memory_ooms",
        "",
        "Allocations that failed with out of memory.",
        scope="rank",
        dtype="i8",
        kind="counter",
        name="train_memory_ooms_total",
    ),
    _step_metric(
        "weight_norm",
        "",
        "L2 norm of all parameters before the step. Opt-in: costs one pass over them per sampled "
        "step.",
    ),
    _step_metric(
        "update_norm",
        "",
        "L2 norm of the previous step's update. Opt-in: costs a copy of the parameters and three "
        "passes over them per sampled step.",
    ),
    _step_metric(
        "update_ratio",
        "ratio",
        "Update norm divided by weight norm; it rises before the loss does. Opt-in, as "
        "`update_norm`.",
    ),
    _step_metric(
        "noise_scale_ratio",
        "ratio",
        "Gradient noise scale divided by the global batch size: above 1, a larger batch still pays "
        "off. Opt-in, DDP only: costs one pass over the gradients per sampled step.",
    ),
    _step_metric(
        "max_norm",
        "",
        "Gradient norm that the loop clips to; absent if it does not clip, or nobody said.",
    ),
    _step_metric(
        "auto_max_norm",
        "",
        'Gradient norm that `max_norm="auto"` clips to; absent in the first steps, and if the loop '
        "does not use it.",
    ),
    _step_metric("weight_decay", "", "Largest weight decay of any parameter group."),
    _step_metric(
        "rank_grad_norm",
        "",
        "L2 norm of this rank's own gradients before they are averaged. Opt-in, as "
        "`noise_scale_ratio`.",
        scope="rank",
    ),
    _step_metric(
        "reduction_error",
        "",
        "Difference between the averaged gradients of one bucket on this rank and the sum of what "
        "the ranks put in, in standard errors of rounding. Opt-in, `SignalSettings.reduction`.",
        scope="rank",
    ),
    _step_metric(
        "critical_batch_tokens",
        "tokens",
        "Gradient noise scale in tokens. Opt-in, as `noise_scale_ratio`.",
    ),
    _step_metric(
        "before_forward_seconds",
        "seconds",
        "Time from the end of the previous step to the model's forward, without the wait for data "
        "and checkpoints. This and the next four: with DDP and FSDP2 on several ranks.",
        scope="rank",
    ),
    _step_metric(
        "forward_seconds",
        "seconds",
        "Time in the model's forward and the loss, without FSDP2's all-gathers.",
        scope="rank",
    ),
    _step_metric(
        "backward_seconds",
        "seconds",
        "Time in backward, without the wait for other ranks' gradients.",
        scope="rank",
    ),
    _step_metric(
        "gradient_wait_seconds",
        "seconds",
        "Time that forward and backward waited for other ranks: in DDP's all-reduce of the "
        "gradients, in FSDP2's all-gathers and reduce-scatters.",
        scope="rank",
    ),
    _step_metric(
        "after_backward_seconds",
        "seconds",
        "Time from the end of backward to `Monitor.step`.",
        scope="rank",
    ),
    _step_metric(
        "run_queue_seconds",
        "seconds",
        "Time in which the training thread could run and had no CPU core, apart from waits for "
        "other ranks; it is in the other parts of the step too. Linux only, where forward and "
        "backward are placed.",
        scope="rank",
    ),
)


def _layer_metric(column: str, unit: str, text: str) -> MetricSpec:
    """Define a metric of a layer: a column of the ``layers`` rows."""
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
    _layer_metric(
        "grad_norm",
        "",
        "L2 norm of one layer's gradients before clipping; on /metrics as top-k only.",
    ),
    _layer_metric(
        "weight_norm",
        "",
        "L2 norm of one layer's parameters. Opt-in, as `weight_norm`. Without it, only of a layer "
        "whose weights were found damaged after bad steps.",
    ),
    _layer_metric(
        "update_norm", "", "L2 norm of one layer's last update. Opt-in, as `update_norm`."
    ),
    _layer_metric(
        "activation_rms",
        "",
        "Root mean square of a module's output on rank 0. Opt-in: costs a forward hook and two "
        "passes over the output per sampled step.",
    ),
    _layer_metric(
        "activation_max",
        "",
        "Largest absolute value in a module's output on rank 0. Opt-in, as `activation_rms`.",
    ),
    _layer_metric(
        "activation_dead_ratio",
        "ratio",
        "Share of a module's features that output 0 for rank 0's whole batch. Opt-in, as "
        "`activation_rms`.",
    ),
    _layer_metric(
        "weight_written_ratio",
        "ratio",
        "Relative change of a layer's squared weights between an update and the next step: above "
        "0 if something else than the optimizer wrote them. Opt-in, as `outside_writes`.",
    ),
    _layer_metric(
        "moment_written_ratio",
        "ratio",
        "The same of the optimizer's state for the layer. Opt-in, as `outside_writes`.",
    ),
)
