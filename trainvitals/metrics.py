"""Definition of a metric, and the metrics that a training rank measures.

Columns are only added and are found by name: a run from before a column was added stays readable.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainvitals.records import VERDICT_BITS

Kind = Literal["gauge", "counter", "info"]
Scope = Literal["run", "rank", "gpu", "node", "process", "agent", "collector", "hooks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
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


_ROW = re.compile(r"(\w+)(?:\{([\w, ]+)\})?(?: \(([\w, ]+)\))?:\s(.+)", re.DOTALL)
_UNITS = frozenset({"seconds", "bytes", "ratio", "watts", "joules", "celsius", "hertz", "tokens"})


class MetricRow(NamedTuple):
    """One row of a table of metrics: ``name{labels} (unit, flags): help``."""

    name: str
    labels: tuple[str, ...]
    words: tuple[str, ...]
    text: str

    @property
    def unit(self) -> str:
        """The base unit, or ""."""
        return next((word for word in self.words if word in _UNITS), "")

    def sampled_metric(
        self, prefix: str, scope: Scope, stream: str, labels: tuple[str, ...]
    ) -> MetricSpec:
        """Return the catalog entry of a column of a stream."""
        is_counter = "counter" in self.words
        name = _OTHER_NAMES.get(self.name, self.name)
        return MetricSpec(
            name=f"{prefix}_{name}{'_total' if is_counter else ''}",
            help=self.text,
            unit=self.unit,
            kind="counter" if is_counter else "gauge",
            scope=scope,
            stream=stream,
            column=self.name,
            dtype="i8" if "i8" in self.words else "f8",
            labels=labels,
        )


_OTHER_NAMES = {"tokens_seen": "tokens"}
"""Columns whose metric has another name."""


def read_metric_rows(table: str) -> Iterator[MetricRow]:
    """Yield the rows of a table; an indented line continues the row above it."""
    for row in re.split(r"\n(?! )", table.strip()):
        match = _ROW.fullmatch(row)
        if match is None:
            raise ValueError(f"{row!r} is not NAME{{LABELS}} (WORDS): HELP")
        labels, words = (tuple(re.findall(r"\w+", match[part] or "")) for part in (2, 3))
        yield MetricRow(match[1], labels, words, " ".join(match[4].split()))


_BITS = ", ".join(f"{bit} {text}" for bit, text in VERDICT_BITS.items())
_STEP_TABLE = f"""
loss: Training loss of the step: weighted mean over all ranks.
loss_max: Highest loss of any rank in the step.
loss_max_rank (i8): Rank with the highest, or a non-finite, loss.
grad_norm: L2 norm of all gradients before clipping.
grad_norm_clipped: L2 norm of all gradients after clipping.
loss_limit: Loss above which the step is an outlier; absent in warm-up.
grad_norm_limit: Gradient norm above which the step is an outlier.
learning_rate: Learning rate of the first parameter group, as applied.
lr_factor (ratio): Factor by which Vitals scales the learning rate; 1 means unchanged.
loss_scale: Loss scale of the gradient scaler.
verdict (i8): Bits: {_BITS}.
skipped (i8): 1 if the update was not applied.
culprit_rank (i8): Rank that alone caused the bad step, or -1.
nonfinite_params (i8): Number of ranks with non-finite parameters; measured only after a bad step.
readback_lag (i8): Steps between an update and the host's decision about it.
tokens_seen (tokens, i8, counter): Tokens consumed, skipped steps included, over all ranks.
tokens_trained (tokens, i8, counter): Tokens whose update was applied.
tokens_per_second (tokens): Tokens of all ranks per second of the step.
mfu_ratio (ratio): Model FLOPs utilization, 0 to 1: of the FLOPs counted by `count_flops`, given as
    `flops_per_token`, or 6 per parameter and token; absent if the device's peak FLOPS are unknown.
rank_loss (rank): This rank's local loss.
step_duration_seconds (seconds, rank): Wall time from the end of the previous step to the end of
    this one.
data_wait_seconds (seconds, rank): Time of the step spent waiting for the next batch.
monitor_seconds (seconds, rank): Host time of the step spent in Vitals, without the all-reduce.
memory_allocated_bytes (bytes, rank): Device memory allocated to tensors at the end of the step.
memory_peak_bytes (bytes, rank): Peak device memory allocated to tensors since the run started.
epoch (i8, rank): Epoch of the batch.
batch_index (i8, rank): Index in the epoch of the batch that fed this step; with several, the last
    one.
num_batches (i8, rank): Batches of this rank that fed the step, up to `batch_index`.
perplexity: Exponential of the loss in nats per token; absent without a token count.
loss_spread: Highest minus lowest per-rank loss; absent on one rank.
overflow_steps (i8, counter): Updates the gradient scaler skipped since the start; absent without a
    scaler.
overflow_ratio (ratio): Share of the last 100 steps in which the gradient scaler overflowed.
samples_per_second (rank): Samples of this rank's batches per second of the step; available with
    `Monitor.batches` over a map-style DataLoader.
forward_backward_seconds (seconds, rank): Host time from the end of the previous step to
    `Monitor.step`, minus the wait for data where it is measured, and `checkpoint_seconds`; a GPU
    runs asynchronously behind.
checkpoint_seconds (seconds, rank): Host time that snapshots and saves took from the loop since the
    previous step; absent without checkpoints. A GPU copies in parallel.
evaluation_seconds (seconds, rank): Host time since the previous step in which the loop evaluated:
    within `monitor.phase("evaluate")`, and what came before a call of `Monitor.evaluate`. It is in
    `forward_backward_seconds` too; absent where it was not told.
optimizer_seconds (seconds, rank): Host time in the optimizers' and schedulers' steps; a GPU runs
    asynchronously behind.
communication_seconds (seconds, rank): Device time of the step's all-reduce between ranks, including
    the wait for the slowest rank; absent on one rank.
memory_estimate_bytes (bytes, rank): Device memory that parameters, gradients, optimizer states and
    buffers need; the rest of the peak is activations and workspace.
memory_alloc_retries (i8, counter, rank): Allocations that succeeded only after the allocator freed
    its cache.
memory_ooms (i8, counter, rank): Allocations that failed with out of memory.
weight_norm: L2 norm of all parameters before the step. Opt-in: costs one pass over them per sampled
    step.
update_norm: L2 norm of the previous step's update. Opt-in: costs a copy of the parameters and three
    passes over them per sampled step.
update_ratio (ratio): Update norm divided by weight norm; it rises before the loss does. Opt-in, as
    `update_norm`.
noise_scale_ratio (ratio): Gradient noise scale divided by the global batch size: above 1, a larger
    batch still pays off. Opt-in, DDP only: costs one pass over the gradients per sampled step.
max_norm: Gradient norm that the loop clips to; absent if it does not clip, or nobody said.
auto_max_norm: Gradient norm that `max_norm="auto"` clips to; absent in the first steps, and if the
    loop does not use it.
weight_decay: Largest weight decay of any parameter group.
rank_grad_norm (rank): L2 norm of this rank's own gradients before they are averaged. Opt-in, as
    `noise_scale_ratio`.
reduction_error (rank): Difference between the averaged gradients of one bucket on this rank and the
    sum of what the ranks put in, in standard errors of rounding. Opt-in,
    `SignalSettings.reduction`.
critical_batch_tokens (tokens): Gradient noise scale in tokens. Opt-in, as `noise_scale_ratio`.
before_forward_seconds (seconds, rank): Time from the end of the previous step to the model's
    forward, without the wait for data and checkpoints. This and the next four: with DDP and FSDP2
    on several ranks.
forward_seconds (seconds, rank): Time in the model's forward and the loss, without FSDP2's
    all-gathers.
backward_seconds (seconds, rank): Time in backward, without the wait for other ranks' gradients.
gradient_wait_seconds (seconds, rank): Time that forward and backward waited for other ranks: in
    DDP's all-reduce of the gradients, in FSDP2's all-gathers and reduce-scatters.
after_backward_seconds (seconds, rank): Time from the end of backward to `Monitor.step`.
run_queue_seconds (seconds, rank): Time in which the training thread could run and had no CPU core;
    it is in the other parts of the step too. Linux only, where forward and backward are placed.
"""
_LAYER_TABLE = """
grad_norm: L2 norm of one layer's gradients before clipping; on /metrics as top-k only.
weight_norm: L2 norm of one layer's parameters. Opt-in, as `weight_norm`.
update_norm: L2 norm of one layer's last update. Opt-in, as `update_norm`.
activation_rms: Root mean square of a module's output on rank 0. Opt-in: costs a forward hook and
    two passes over the output per sampled step.
activation_max: Largest absolute value in a module's output on rank 0. Opt-in, as `activation_rms`.
activation_dead_ratio (ratio): Share of a module's features that output 0 for rank 0's whole batch.
    Opt-in, as `activation_rms`.
weight_written_ratio (ratio): Relative change of a layer's squared weights between an update and the
    next step: above 0 if something else than the optimizer wrote them. Opt-in, as `outside_writes`.
moment_written_ratio (ratio): The same of the optimizer's state for the layer. Opt-in, as
    `outside_writes`.
"""


def _step_metric(row: MetricRow) -> MetricSpec:
    """Return the catalog entry of a column of the ``steps`` stream."""
    if "rank" in row.words:
        return row.sampled_metric("train", "rank", "steps", ("run", "rank"))
    return row.sampled_metric("train", "run", "steps", ("run",))


STEP_METRICS = tuple(map(_step_metric, read_metric_rows(_STEP_TABLE)))
LAYER_METRICS = tuple(
    row.sampled_metric("train_layer", "run", "layers", ("run", "layer"))
    for row in read_metric_rows(_LAYER_TABLE)
)
