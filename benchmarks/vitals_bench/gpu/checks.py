"""The twelve checks of a training loop on one GPU. Seven of them also run on the CPU."""

from __future__ import annotations

import gc
import math
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainvitals
from vitals_bench.gpu.loops import (
    DEVICE,
    HALF,
    HAS_CUDA,
    HUGE,
    INF,
    NAN,
    OPTIMIZERS,
    SINGLE,
    GuardedLoop,
    compute_loss,
    find_differences,
    make_batches,
    make_model,
)
from vitals_bench.gpu.parts import Facts, part


@part("check", 40, num_gpus=1)
def nothing_waits(facts: Facts) -> None:
    """With a fused optimizer, no step waits for the device, whichever features are on."""
    checkpoints = trainvitals.CheckpointSettings(directory=Path("checkpoints"), snapshot_every=6)
    signals = trainvitals.SignalSettings(every=2, update_norm=True, activations=("*",))
    averaged, scaler = make_model(), torch.amp.GradScaler(DEVICE.type)
    variants: dict[str, Callable[[], GuardedLoop]] = {
        "watch": GuardedLoop,
        "attach": lambda: GuardedLoop(guard=trainvitals.attach),
        "heal": lambda: GuardedLoop(mode="heal", checkpoints=checkpoints),
        "signals": lambda: GuardedLoop(signals=signals),
        "EMA": lambda: GuardedLoop(averaged, ema=trainvitals.EMA(averaged)),
        "scaler": lambda: GuardedLoop(scaler=scaler),
    }
    for name, make_loop in variants.items():
        facts[name] = _find_wait(make_loop)
    # Waits for events are not visible in torch's sync debug mode, but in the profiler.
    for mode in ("off", "guard"):
        with GuardedLoop(mode=mode) as loop, torch.profiler.profile() as profiler:
            for batch in make_batches(20):
                loop.step(batch)
        counts = {item.key: item.count for item in profiler.key_averages() if "Synch" in item.key}
        facts[f"waits in 20 steps, {mode}"] = counts
    assert not any(facts[name] for name in variants), facts


def _find_wait(make_loop: Callable[[], GuardedLoop]) -> str:
    """Return where a step waited, or "". The first steps copy constants to the device."""
    try:
        with make_loop() as loop:
            for step, batch in enumerate(make_batches(60)):
                torch.cuda.set_sync_debug_mode("error" if step > 3 else "default")
                loop.step(batch, NAN if step == 40 else 1.0)
            torch.cuda.set_sync_debug_mode("default")
    except (RuntimeError, AssertionError) as error:
        torch.cuda.set_sync_debug_mode("default")
        frames = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        return f"{str(error).splitlines()[0]} in {frames[-3:]}"
    return ""


@part("check", 20)
def skips_are_exact(facts: Facts) -> None:
    """A NaN step changes no bit; later steps are equal to a run without that batch."""
    streams = (None, torch.cuda.Stream()) if HAS_CUDA else (None,)
    for name, make_optimizer in OPTIMIZERS.items():
        plain = GuardedLoop(make_optimizer=make_optimizer, mode="off")
        for batch in make_batches(12):
            compute_loss(plain.model, batch).backward()
            plain.optimizer.step()
            plain.optimizer.zero_grad()
        for stream in streams:
            with (
                torch.cuda.stream(stream),
                GuardedLoop(make_optimizer=make_optimizer, guard=trainvitals.attach) as loop,
            ):
                for step, batch in enumerate(make_batches(12)):
                    before = loop.state() if step == 7 else {}
                    for factor in (NAN, 1.0) if step == 7 else (1.0,):
                        loop.step(batch, factor)
                        if math.isnan(factor):
                            changed = find_differences(before, loop.state())
                            assert not changed, f"{name}: a skip changed {changed[:4]}"
                facts[name] = find_differences(loop.state(), plain.state())
                assert not facts[name], f"{name}: {facts[name][:4]} differ from a plain loop"


@part("check", 30)
def non_finite_values_are_detected(facts: Facts) -> None:
    """One non-finite element of any type and position skips the update; a huge one does not."""
    sizes = (1, 4097, 3 * 65536 + 5, 1_000_003) if HAS_CUDA else (1, 4097, 65537)
    num_updates = 0
    for types in ([SINGLE] * 4, [HALF] * 4, [SINGLE, HALF] * 2):
        zeros = (torch.zeros(n, device=DEVICE, dtype=t) for n, t in zip(sizes, types, strict=False))
        params = nn.ParameterList(zeros)
        positions = [(p, at) for p in params for at in sorted({0, len(p) // 2, len(p) - 1})]
        with GuardedLoop(params, guard=trainvitals.attach) as loop:
            for value in (NAN, INF, -INF, HUGE):
                for param, at in positions:
                    for planted in (1.0, value):
                        for each in params:
                            each.grad = torch.full_like(each, HUGE if value == HUGE else 1.0)
                        param.grad[at] = planted
                        before = loop.state()
                        loop.optimizer.step()
                        changed = find_differences(before, loop.state())
                        text = f"{planted} at {at} of {param.shape}, {param.dtype}: {changed}"
                        assert bool(changed) == math.isfinite(planted), text
                        num_updates += 1
    facts["updates"] = num_updates


@part("check", 10)
def clips_are_exact(facts: Facts) -> None:
    """The applied gradients are equal to a clip by the float64 norm."""
    for name, make_optimizer in OPTIMIZERS.items():
        options: Facts = {"guard": trainvitals.attach, "max_norm": 0.05}
        with GuardedLoop(make_optimizer=make_optimizer, **options) as loop:
            params = list(loop.model.parameters())
            for batch in make_batches(8):
                compute_loss(loop.model, batch).backward()
                before = [param.grad.double() for param in params if param.grad is not None]
                factor = min(1.0, 0.05 / float(sum(g.square().sum() for g in before)) ** 0.5)
                loop.optimizer.step()
                after = [param.grad.double() for param in params if param.grad is not None]
                errors = [(a - b * factor).norm() for a, b in zip(after, before, strict=True)]
                facts[name] = float(sum(errors)) / 0.05
                assert facts[name] < 1e-4, f"{name}: the error is {facts[name]:.2g} of the norm"


@part("check", 10)
def scaler_is_equal_to_torch(facts: Facts) -> None:
    """Scale and weights are equal to a plain loop with a GradScaler, including overflows."""
    scaler, torch_scaler = (
        torch.amp.GradScaler(DEVICE.type, 2.0**127, growth_interval=5) for _ in range(2)
    )
    plain = GuardedLoop(mode="off")
    with GuardedLoop(scaler=scaler) as loop:
        for batch in make_batches(30):
            loop.step(batch, 1e3)
            torch_scaler.scale(compute_loss(plain.model, batch) * 1e3).backward()
            torch_scaler.unscale_(plain.optimizer)
            torch_scaler.step(plain.optimizer)
            torch_scaler.update()
            plain.optimizer.zero_grad()
            facts["scales"] = scales = scaler.get_scale(), torch_scaler.get_scale()
            assert scales[0] == scales[1] < 2.0**127, facts
        # Vitals also restores the buffers that the forward of a skipped step wrote; torch does not.
        buffers = [name for name, _ in loop.model.named_buffers()]
        differences = find_differences(loop.state(), plain.state())
        facts["differences"] = [name for name in differences if name not in buffers]
    assert not facts["differences"], facts


@part("check", 15)
def averages_are_exact(facts: Facts) -> None:
    """EMA weights follow their formula; skips do not change them; a swap restores the weights."""
    cases = [(SINGLE, None), (HALF, None), *([(SINGLE, "cpu")] if HAS_CUDA else [])]
    for dtype, device in cases:
        model = make_model(dtype=dtype)
        expected = {n: p.detach().double() for n, p in model.named_parameters()}
        ema = trainvitals.EMA(model, 0.9, warmup=False, device=device)
        with GuardedLoop(model, ema=ema) as loop:
            for step, batch in enumerate(make_batches(16, dtype=dtype)):
                loop.step(batch, NAN if step == 9 else 1.0)
                for n, param in model.named_parameters() if step != 9 else ():
                    expected[n] += 0.1 * (param.detach().double() - expected[n])
                before = loop.state()
                with ema.swap():
                    assert find_differences(before, loop.state()), "the swap changed nothing"
                changed = find_differences(before, loop.state())
                assert not changed, f"{dtype}, {device}: a swap changed {changed[:4]}"
            averages = ema.state_dict()
        errors = {n: averages[n].to(DEVICE).double() - e for n, e in expected.items()}
        worst = max(float(d.norm() / expected[n].norm()) for n, d in errors.items())
        facts[f"{dtype}, {device}"] = worst
        assert worst < 1e-5, f"{dtype}, {device}: the error of the average is {worst:.2g}"


def check_rollback(facts: Facts, model: nn.Module, *, overlap: bool, width: int) -> None:
    """Damage the optimizer state of a training; compare the state after the rollback.

    Swaps write the weights between all steps, directly after a step: a snapshot may still be
    copied then.
    """
    options: Facts = {"directory": Path("checkpoints"), "snapshot_every": 5}
    settings = trainvitals.CheckpointSettings(**options, overlap_copy=overlap)
    states: dict[int, Any] = {}
    ema = trainvitals.EMA(model, 0.9)
    target = None
    with GuardedLoop(model, ema=ema, mode="heal", checkpoints=settings) as loop:
        for step, batch in enumerate(make_batches(150, width)):
            if step == 60:  # the loss stays finite
                next(iter(loop.optimizer.state.values()))["exp_avg_sq"].view(-1)[3] = INF
            if (target := loop.step(batch).rolled_back_to) is not None:
                break
            with ema.swap():
                pass
            if (index := loop.monitor.step_index) % 5 == 0:
                states[index] = loop.state()
                states.pop(index - 40, None)
        assert target is not None, "there was no rollback"
        differences = find_differences(loop.state(), states[target])
    facts[f"overlap {overlap}"] = {"step": step, "target": target, "differences": differences}
    assert not differences, f"overlap {overlap}: the rollback changed {differences[:4]}"


@part("check", 40)
def snapshots_are_exact(facts: Facts) -> None:
    """A rollback restores each bit although weights were swapped during the copies."""
    width, depth = (4096, 6) if HAS_CUDA else (64, 2)
    for overlap in (False, True) if HAS_CUDA else (False,):
        check_rollback(facts, make_model(width, depth), overlap=overlap, width=width)


@part("check", 60)
def two_ranks_share_a_snapshot(facts: Facts) -> None:
    """Two gloo ranks on one device roll back exactly, from shared memory."""
    if "RANK" not in os.environ:
        check_ranks(facts, "two_ranks_share_a_snapshot", num_ranks=2)
        return
    dist.init_process_group("gloo")
    width = 1024 if HAS_CUDA else 64
    check_rollback(facts, DistributedDataParallel(make_model(width)), overlap=HAS_CUDA, width=width)
    dist.destroy_process_group()


def check_ranks(facts: Facts, name: str, *, num_ranks: int, has_own_gpus: bool = False) -> None:
    """Run a part once per rank of one job; each rank must pass."""
    from vitals_bench.gpu.runner import run_ranks

    facts["ranks"] = run_ranks(name, num_ranks=num_ranks, has_own_gpus=has_own_gpus)
    assert all(result["status"] == "passed" for result in facts["ranks"]), facts["ranks"]


@part("check", 30, num_gpus=1)
def graphs_train(facts: Facts) -> None:
    """A captured CUDA graph of forward and backward is trained and guarded at each step."""
    for guard in (trainvitals.attach, trainvitals.watch):
        model, static, graph = make_model(), make_batches(1)[0], torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                compute_loss(model, static).backward()
        torch.cuda.synchronize()
        model.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = compute_loss(model, static)
            loss.backward()
        with GuardedLoop(model, guard=guard) as loop:
            for step, batch in enumerate((*make_batches(8), make_batches(1)[0] * NAN)):
                before = loop.state()
                static.copy_(batch)
                graph.replay()
                loop.update(loss)
                changed = find_differences(before, loop.state())
                trained = [name for name, _ in model.named_parameters() if name in changed]
                facts[f"{guard.__name__}, step {step}"] = len(trained if step < 8 else changed)
    wrong = {name: n for name, n in facts.items() if (n == 0) != name.endswith("step 8")}
    assert not wrong, f"not trained, or changed by the NaN in step 8: {wrong}"


@part("check", 50, num_gpus=1)
def compiled_models_train(facts: Facts) -> None:
    """A compiled loss is trained, guarded and probed; it can be read after the step."""
    for mode in ("default", "reduce-overhead"):
        with GuardedLoop() as loop:
            loss_fn = torch.compile(lambda x, model=loop.model: compute_loss(model, x), mode=mode)
            for step, batch in enumerate(loop.monitor.batches(make_batches(30), probe=loss_fn)):
                loss = loss_fn(batch) if step != 20 else loss_fn(batch) * NAN
                loss.backward()
                loop.update(loss)
                assert math.isfinite(loss.item()) == (step != 20), f"{mode}: step {step}"
        facts[mode] = "30 steps"


@part("check", 30, num_gpus=1)
def memory_does_not_grow(facts: Facts) -> None:
    """Vitals adds less than 32 MiB to the peak of device memory, for any parameter types."""

    def measure_peak_mib(types: Sequence[torch.dtype], mode: str) -> float:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        layers = [nn.Linear(8192, 8192, dtype=dtype, device=DEVICE) for dtype in types]
        with GuardedLoop(nn.ModuleList(layers), mode=mode) as loop:
            for x in make_batches(4, 8192):
                for layer in layers:
                    x = layer(x.to(layer.weight.dtype))
                loss = x.float().square().mean()
                loss.backward()
                loop.update(loss)
        return (torch.cuda.max_memory_allocated() - start) / 2**20

    for kind, types in {"float32": [SINGLE] * 4, "mixed": [HALF] * 3 + [SINGLE]}.items():
        bare, guarded = (measure_peak_mib(types, mode) for mode in ("off", "guard"))
        facts[kind] = {"bare_mib": bare, "added_mib": guarded - bare}
    assert all(figures["added_mib"] < 32 for figures in facts.values()), facts


@part("check", 20, num_gpus=1, is_alone=True)
def a_waiting_rank_is_idle(facts: Facts) -> None:
    """While the device hangs, the host uses no core; otherwise a hang looks like computation."""
    with GuardedLoop() as loop:
        for batch in make_batches(6):
            loop.step(batch)
        torch.cuda._sleep(6_000_000_000)  # cycles: about three seconds
        loop.step(batch)
        wall, cpu = time.monotonic(), time.thread_time()
        loop.step(batch)  # waits for the numbers of the step before
        facts |= {
            "waited_seconds": time.monotonic() - wall,
            "cpu_seconds": time.thread_time() - cpu,
        }
    assert facts["waited_seconds"] > 1.0, f"the device did not sleep: {facts}"
    assert facts["cpu_seconds"] < 0.5 * facts["waited_seconds"], f"the host spins: {facts}"
