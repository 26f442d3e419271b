"""Speed on one GPU: updates, whole steps, the host's time, snapshots and EMA.

What is compared takes turns: rounds of steps without any wait, between two events of the device,
in a new order in each round. The peer runs twice, and the distance between its two medians is the
noise. On the CPU the sizes shrink, and the figures only show that the programs run.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import trainvitals
from trainer_hooks.demo.model import TransformerBlock
from vitals_bench.gpu.loops import DEVICE, HALF, HAS_CUDA, INF, SINGLE
from vitals_bench.gpu.parts import Facts, SkipPartError, part
from vitals_bench.measure import medians, spread
from vitals_bench.rows import Goal, Row, ratio_at_most
from vitals_bench.training import Gradients

CLIPPED = "clip_grad_norm_ and fused AdamW"
MAX_NORM = 1.0


class Size(NamedTuple):
    """Shape of a list of parameters: ``num`` square matrices and as many vectors."""

    title: str
    width: int
    num: int


SIZES = {
    "50M": Size("50M parameters", 1024, 48) if HAS_CUDA else Size("17K parameters", 64, 4),
    "1B": Size("1B parameters", 4096, 60) if HAS_CUDA else Size("34K parameters", 64, 8),
}
TEN_TENSORS = Size("ten tensors", 64, 5)
STATE_SIZE = Size("a state of 2 GB", 4096, 10) if HAS_CUDA else Size("a small state", 64, 4)
STEPS, ROUNDS = (30, 5) if HAS_CUDA else (2, 2)


def make_adamw(params: Iterable[nn.Parameter], *, is_fused: bool = True) -> torch.optim.Optimizer:
    """Return an AdamW that hardly changes the parameters, or the default of torch."""
    return torch.optim.AdamW(params, lr=1e-6, fused=True if is_fused else None)


class UpdateLoop:
    """An update without forward and backward: the same gradients are set before each step."""

    def __init__(
        self,
        size: Size,
        dtype: torch.dtype = SINGLE,
        *,
        is_mixed: bool = False,
        is_fused: bool = True,
        is_guarded: bool = False,
        **options: Any,
    ) -> None:
        """``is_mixed``: one matrix is float32. ``options``: those of ``watch``."""
        types = [dtype] * size.num
        types[-1] = SINGLE if is_mixed else dtype
        shape: Any = {"device": DEVICE}
        self.params = nn.ParameterList(
            tensor
            for each in types
            for tensor in (
                torch.zeros(size.width, size.width, dtype=each, **shape),
                torch.zeros(size.width, dtype=each, **shape),
            )
        )
        self.optimizer = make_adamw(self.params, is_fused=is_fused)
        self.gradients = Gradients(list(self.params))
        self.loss = torch.ones((), device=DEVICE)
        if options.pop("has_ema", False):
            ema = options.pop("ema", {})
            options["state"] = {"ema": trainvitals.EMA(self.params, **ema)}
        self.monitor: Any = None
        if is_guarded:
            self.monitor = trainvitals.watch(self.params, self.optimizer, **options)

    def step(self) -> Any:
        """Clip and update, guarded or not."""
        self.gradients.give_back()
        if self.monitor is not None:
            return self.monitor.step(self.loss, max_norm=MAX_NORM)
        nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.optimizer.step()
        return self.optimizer.zero_grad()

    def close(self) -> None:
        """Close the monitor; its own errors fail the part."""
        if self.monitor is not None:
            self.monitor.close()
            assert not self.monitor.swallowed_errors, self.monitor.swallowed_errors


class Stopwatch:
    """Time between marks: of the device's stream with CUDA, otherwise of the wall clock."""

    def __init__(self) -> None:
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Record the current position of the stream; the host does not wait."""
        if HAS_CUDA:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def read_ms(self) -> list[float]:
        """Return the milliseconds between each two marks, once the device is done."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if not HAS_CUDA:
            return [1e3 * (end - start) for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


def time_arms(
    arms: Mapping[str, Callable[[], object]], *, steps: int = STEPS, rounds: int = ROUNDS
) -> dict[str, float]:
    """Return each arm's median milliseconds per step, over rounds of ``steps`` steps."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    names, order = list(arms), random.Random(0)
    for index in range(rounds + 1):  # the first round warms up
        order.shuffle(names)
        for name in names:
            watch = Stopwatch()
            watch.mark()
            for _ in range(steps):
                arms[name]()
            watch.mark()
            (elapsed,) = watch.read_ms()
            if index:
                times[name].append(elapsed / steps)
    return medians(times)


def store_row(facts: Facts, row: Row) -> None:
    """Add a row to the part's figures."""
    facts.setdefault("rows", []).append(asdict(row))


def _compare(
    facts: Facts,
    name: str,
    bare: Callable[[], object],
    guarded: Callable[[], object],
    *,
    peer: str = CLIPPED,
    goal: Goal | None = None,
    steps: int = STEPS,
    note: str = "",
) -> None:
    arms = {"bare": bare, "guarded": guarded, "again": bare}
    median_ms = time_arms(arms, steps=steps)
    store_row(
        facts,
        Row(
            name=name,
            ours=median_ms["guarded"],
            unit="ms",
            peer=peer,
            theirs=median_ms["bare"],
            goal=goal,
            spread=spread(median_ms["again"], median_ms["bare"]),
            note=note,
        ),
    )


def _require_memory(size: Size, dtype: torch.dtype) -> None:
    """Skip the part if parameters, gradients and moments of two loops do not fit."""
    num_bytes = 2.2 * 4 * dtype.itemsize * size.num * size.width**2
    if HAS_CUDA and torch.cuda.mem_get_info()[0] < num_bytes:
        raise SkipPartError(f"needs {num_bytes / 2**30:.0f} GiB of free device memory")


def _compare_updates(facts: Facts, name: str, size: Size, **options: Any) -> None:
    _require_memory(size, options.get("dtype", SINGLE))
    bare = UpdateLoop(size, **options)
    guarded = UpdateLoop(size, **options, is_guarded=True)
    _compare(facts, f"{name}, {size.title}", bare.step, guarded.step)
    guarded.close()


@part("speed", 8, is_alone=True)
def update_50m_float32(facts: Facts) -> None:
    """Guard, clip and fused AdamW of 50M parameters in float32."""
    _compare_updates(facts, "guard, clip and fused AdamW, float32", SIZES["50M"])


@part("speed", 12, is_alone=True)
def update_1b_float32(facts: Facts) -> None:
    """Guard, clip and fused AdamW of 1B parameters in float32."""
    _compare_updates(facts, "guard, clip and fused AdamW, float32", SIZES["1B"])


@part("speed", 10, is_alone=True)
def update_1b_bfloat16(facts: Facts) -> None:
    """Guard, clip and fused AdamW of 1B parameters in bfloat16."""
    _compare_updates(facts, "guard, clip and fused AdamW, bfloat16", SIZES["1B"], dtype=HALF)


@part("speed", 10, is_alone=True)
def update_1b_mixed(facts: Facts) -> None:
    """The same with one matrix in float32: the norm must not lose its fast path."""
    name = "guard, clip and fused AdamW, bfloat16 with one float32 matrix"
    _compare_updates(facts, name, SIZES["1B"], dtype=HALF, is_mixed=True)


class TokenGPT(nn.Module):
    """A GPT of the shape of GPT-2: a vocabulary of 50,304 tokens, and a tied head."""

    def __init__(self, *, width: int, num_layers: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, width // 64) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy of ``tokens`` (batch, context + 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = nn.functional.linear(self.norm(x), self.tokens.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class TokenLoop:
    """A whole training step of a GPT under autocast to bfloat16."""

    def __init__(self, shape: Mapping[str, int], batch: Tensor, *, is_guarded: bool) -> None:
        torch.manual_seed(0)
        self.model = TokenGPT(**shape).to(DEVICE)
        self._batch = batch
        self._optimizer = make_adamw(self.model.parameters())
        self.monitor = trainvitals.watch(self.model, self._optimizer) if is_guarded else None

    def step(self) -> None:
        """Train one step."""
        with torch.autocast(DEVICE.type, HALF):
            loss = self.model(self._batch)
        loss.backward()
        if self.monitor is not None:
            self.monitor.step(loss, max_norm=MAX_NORM)
            return
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _compare_gpt(
    facts: Facts, shape: Mapping[str, int], rows: int, *, steps: int, goal: Goal | None
) -> None:
    batch = torch.randint(0, shape["vocabulary"], (rows, shape["context"] + 1), device=DEVICE)
    bare = TokenLoop(shape, batch, is_guarded=False)
    guarded = TokenLoop(shape, batch, is_guarded=True)
    millions = sum(p.numel() for p in bare.model.parameters()) / 1e6
    _compare(
        facts,
        f"whole step of a GPT, {millions:.3g}M parameters, {rows} x {shape['context']} tokens",
        bare.step,
        guarded.step,
        peer=f"the same with {CLIPPED}",
        goal=goal,
        steps=steps,
        note="autocast to bfloat16",
    )
    assert guarded.monitor is not None
    guarded.monitor.close()
    assert not guarded.monitor.swallowed_errors, guarded.monitor.swallowed_errors


@part("speed", 25, is_alone=True)
def step_124m(facts: Facts) -> None:
    """A whole step of a GPT with 124M parameters: at most 1.003 of the bare one."""
    shape = {"width": 768, "num_layers": 12, "context": 1024, "vocabulary": 50_304}
    small = {"width": 64, "num_layers": 2, "context": 32, "vocabulary": 128}
    goal, steps = ratio_at_most(1.003), 10 if HAS_CUDA else STEPS
    _compare_gpt(facts, shape if HAS_CUDA else small, 16 if HAS_CUDA else 2, steps=steps, goal=goal)


@part("speed", 10, is_alone=True)
def step_of_a_small_model(facts: Facts) -> None:
    """A whole step of 0.8M parameters: the time to launch kernels dominates."""
    layers = 4 if HAS_CUDA else 1
    shape = {"width": 128, "num_layers": layers, "context": 128, "vocabulary": 256}
    _compare_gpt(facts, shape, 8 if HAS_CUDA else 2, steps=STEPS, goal=None)


@part("speed", 8, is_alone=True)
def host_time(facts: Facts) -> None:
    """CPU time of the training thread in ``monitor.step``, compared with clip and optimizer."""
    for size, is_fused in ((TEN_TENSORS, True), (SIZES["50M"], True), (SIZES["50M"], False)):
        title = "fused AdamW" if is_fused else "default AdamW"
        loops = {
            "bare": UpdateLoop(size, is_fused=is_fused),
            "guarded": UpdateLoop(size, is_fused=is_fused, is_guarded=True),
        }
        times: dict[str, list[float]] = {name: [] for name in loops}
        for index in range(STEPS * ROUNDS + 5):
            for name, loop in loops.items():
                start = time.thread_time()
                loop.step()
                if index >= 5:
                    times[name].append(time.thread_time() - start)
            if HAS_CUDA:
                torch.cuda.synchronize()  # so that no step waits for the one before
        median_ms = medians(times, scale=1e3)
        loops["guarded"].close()
        store_row(
            facts,
            Row(
                name=f"CPU time of the training thread per update, {title}, {size.title}",
                ours=median_ms["guarded"],
                unit="ms",
                peer="clip_grad_norm_ and step",
                theirs=median_ms["bare"],
                note="the device is idle before each step",
            ),
        )


def _measure_snapshots(facts: Facts, *, overlap: bool) -> None:
    """Time the steps of a loop that takes a snapshot every five steps."""
    every, num_steps = 5, 24 if HAS_CUDA else 12
    settings = trainvitals.CheckpointSettings(
        directory=Path(f"checkpoints-{overlap}"), snapshot_every=every, overlap_copy=overlap
    )
    start = time.perf_counter()
    loop = UpdateLoop(STATE_SIZE, is_guarded=True, mode="heal", checkpoints=settings)
    watch_seconds = time.perf_counter() - start
    watch, host_ms = Stopwatch(), []
    for _ in range(num_steps):
        watch.mark()
        if HAS_CUDA:
            torch.cuda._sleep(400_000_000)  # instead of forward and backward: 0.2 s
        start = time.perf_counter()
        loop.step()
        host_ms.append(1e3 * (time.perf_counter() - start))
    watch.mark()
    step_ms = watch.read_ms()
    # The copy is part of the step that takes it or of the next one, whose forward waits for it.
    cycles_ms = [sum(step_ms[i : i + every]) for i in range(0, num_steps - every + 1, every)]
    usual_ms = statistics.median(step_ms)
    gigabytes = 3e-9 * sum(p.numel() * p.element_size() for p in loop.params)
    stall_ms = statistics.median(cycles_ms[1:]) - every * usual_ms
    name = f"snapshots of {gigabytes:.3g} GB, {'with' if overlap else 'without'} overlap"
    facts[name] = {
        "watch_seconds": watch_seconds,
        "first_cycle_ms": cycles_ms[0],
    }
    store_row(facts, Row(name=f"{name}: added time of the device", ours=stall_ms, unit="ms"))
    if stall_ms > 0 and not overlap:
        bandwidth = gigabytes / (stall_ms / 1e3)
        store_row(facts, Row(name=f"{name}: bandwidth", ours=bandwidth, unit="GB/s"))
    wait_ms = max(host_ms) - statistics.median(host_ms)
    store_row(facts, Row(name=f"{name}: longest added wait of the host", ours=wait_ms, unit="ms"))
    if not overlap:
        store_row(facts, _measure_rollback(loop, gigabytes))
    loop.close()


def _measure_rollback(loop: UpdateLoop, gigabytes: float) -> Row:
    """Damage the optimizer state, and time the step that rolls back."""
    for step in range(120):
        if step == 40:
            next(iter(loop.optimizer.state.values()))["exp_avg_sq"].view(-1)[3] = INF
        start = time.perf_counter()
        if loop.step().rolled_back_to is not None:
            if HAS_CUDA:
                torch.cuda.synchronize()
            elapsed_ms = 1e3 * (time.perf_counter() - start)
            return Row(name=f"rollback of {gigabytes:.3g} GB", ours=elapsed_ms, unit="ms")
    raise AssertionError("there was no rollback")


@part("speed", 30, is_alone=True)
def snapshots(facts: Facts) -> None:
    """Bandwidth of a snapshot, the time that it adds, and a rollback."""
    for overlap in (False, True) if HAS_CUDA else (False,):
        _measure_snapshots(facts, overlap=overlap)


@part("speed", 12, is_alone=True)
def ema(facts: Facts) -> None:
    """EMA weights on the device at each step, and on the host at every tenth."""
    size = SIZES["50M"]
    variants: dict[str, Facts] = {"on the device": {}, "on the host, every 10": {"every": 10}}
    if HAS_CUDA:
        variants["on the host, every 10"]["device"] = "cpu"
    bare = UpdateLoop(size, is_guarded=True)
    for title, options in variants.items():
        loop = UpdateLoop(size, is_guarded=True, has_ema=True, ema=options)
        name = f"guarded update with EMA {title}, {size.title}"
        _compare(facts, name, bare.step, loop.step, peer="the same without EMA")
        loop.close()
    bare.close()
