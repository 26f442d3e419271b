"""Injects the fault of a drill in its rank, and ends the training at the planned step.

Loaded by `watch` and `attach` only if `VITALS_DRILL` is set. Every injection is recorded in a file
before it happens, because some of them end the process.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from trainer_hooks.features.probe import ProbeFeature
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep, ReturnedStep, StepFeature
from trainer_hooks.tensors.gradients import local_tensor, unwrap
from trainvitals.io.discovery import NOTICE_FILE
from trainvitals.policy.evidence import Ask, ProbeResult
from trainvitals.records import AttemptStarted
from vitals_plugins.lab.drill.faults import (
    CONTINUED_STEPS,
    FAULTS,
    POISONED_STEPS,
    VARIABLE,
    DrillPlan,
    DrillRecord,
    read_records,
)

SPIKE = 1e6
POISON = 100.0
FORGOTTEN_RATE = 10.0
"""Factor of the learning rate in a second start, as if an earlier decay was forgotten."""
MIN_DELAY_SECONDS = 0.05
MAX_WAIT_SECONDS = 180.0
MAX_FULL_SECONDS = 60.0
"""Time for the agent to report a full disk, which it examines every 10 seconds."""
WARM_UP_STEPS = 20
"""Steps whose times do not count."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXPONENT_BITS = {torch.float16: 5, torch.bfloat16: 8, torch.float32: 8, torch.float64: 11}


def prepare_drill(mode: str) -> list[type[StepFeature]]:
    """Return the feature that injects the fault; in mode ``off`` measure the steps instead."""
    if mode != "off":
        return [DrillFeature]
    recorder = Recorder(_read_plan(), rank=int(os.environ.get("RANK", "0")))
    recorder.write("started")
    register_optimizer_step_post_hook(OffSteps(recorder).on_step)
    return []


def _read_plan() -> DrillPlan:
    return msgspec.json.decode(os.environ[VARIABLE], type=DrillPlan)


class Recorder:
    """Appends records of one rank of a drill, and measures its steps."""

    def __init__(self, plan: DrillPlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.mode = "off"
        self.path = Path(plan.record)
        self._seconds: list[float] = []
        self._last = 0.0

    def write(self, kind: Any, **fields: Any) -> None:
        """Append a record with one write, so that ranks do not mix theirs."""
        record = DrillRecord(
            kind=kind,
            rank=self.rank,
            mode=self.mode,
            pid=os.getpid(),
            time_unix_ns=time.time_ns(),
            **fields,
        )
        line = msgspec.json.encode(record) + b"\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def measure(self) -> None:
        """Count a step's time; call once per step."""
        now = time.perf_counter()
        if self._last:
            self._seconds.append(now - self._last)
        self._last = now

    @property
    def step_seconds(self) -> float | None:
        """Median time of a drilled step so far."""
        seconds = self._seconds[WARM_UP_STEPS:]
        return statistics.median(seconds) if seconds else None

    def end(self, step: int) -> None:
        """End the drilled training; all ranks call it before the same step."""
        self.write("ended", step=step, step_seconds=self.step_seconds)
        if self.plan.waits_at_end:
            self.wait()
        raise SystemExit(0)

    def wait(self) -> None:
        """Wait in a rank until the drill has acknowledged; the limit is for a drill that died."""
        end = time.monotonic() + MAX_WAIT_SECONDS
        while not Path(self.plan.acknowledgment).exists() and time.monotonic() < end:
            time.sleep(0.01)


class OffSteps:
    """Counts the steps of a drilled training in mode ``off``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._first: Optimizer | None = None
        self._num_steps = 0

    def on_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        """Measure a step of the first optimizer, and end the training after the planned number."""
        if self._first is None:
            self._first = optimizer
        if optimizer is not self._first:
            return
        self._recorder.measure()
        self._num_steps += 1
        if self._num_steps >= self._recorder.plan.end_step:
            self._recorder.end(self._num_steps)


class DrillFeature(StepFeature):
    """The fault of a drill in one rank."""

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self._plan = plan = _read_plan()
        self._recorder = Recorder(plan, run.ranks.rank)
        earlier = read_records(self._recorder.path)
        kinds = ("injected", "impossible", "killed")
        self._is_injected = self._is_restart = any(each.kind in kinds for each in earlier)
        self._poison: Poison | None = None
        self._injected_step = -1
        self._first_step = 0
        self._turn = -1
        self._is_continued = False
        self._full_since = 0.0
        self._poisoned_until = self._full_until = self._num_late_steps = 0
        world_size, settings = run.ranks.world_size, run.recovery and run.recovery.settings
        self._is_target = run.ranks.rank == world_size - 1
        first_save = first_due = -1
        if settings:
            first_due = settings.save_every
            every = settings.snapshot_every or settings.healthy_after + 1
            first_save = settings.save_every + settings.healthy_after + 2 * every
        self._inject_step, self._end_step = plan.inject_step, plan.end_step
        spec = FAULTS.get(plan.fault)
        if spec is not None and spec.is_restarted and first_save > plan.inject_step:
            self._inject_step = first_save
            self._end_step += first_save - plan.inject_step
        if plan.fault == "full_disk":  # a save fails, and a later one succeeds
            self._inject_step = max(plan.inject_step, first_due)
            self._full_until = max(self._inject_step, first_save) + CONTINUED_STEPS
            self._num_late_steps = max(FAULTS[plan.fault].num_steps, first_save + CONTINUED_STEPS)
        self._recorder.mode = run.mode
        params = [local_tensor(param) for param in run.device.norms.params]
        num_bytes = sum(param.numel() * param.element_size() for param in params)
        self._recorder.write(
            "started",
            run_id=run.run_dir.run_id,
            world_size=world_size,
            first_save_step=first_save,
            owns_step=run.given.owns_step,
            state_bytes=num_bytes * (world_size if run.replicas is None else 1),
        )

    @classmethod
    def make(cls, run: RunContext) -> Self | None:
        """Return the feature for the first run of this process."""
        earlier = read_records(Path(_read_plan().record))
        return None if any(each.pid == os.getpid() for each in earlier) else cls(run)

    def on_attempt(self, attempt: AttemptStarted) -> None:
        """Remember where a restarted training continues, and forget its learning rate."""
        if self._poison is not None:
            self._poison.is_on = False  # the rollback skips these batches
        if self._turn < 0:
            self._first_step = attempt.fork_step
            if self._is_restart and self._plan.fault == "forgotten_lr" and attempt.fork_step:
                self._record(attempt.fork_step, self._is_target)
                self._raise_rates()

    def _raise_rates(self) -> None:
        """Multiply the learning rates, as if the restarted training had not restored them."""
        for optimizer in self._run.device.optimizers:
            for group in optimizer.param_groups:
                for name in {"lr", "initial_lr"} & group.keys():
                    group[name] = group[name] * FORGOTTEN_RATE
        for scheduler in self._run.device.schedulers:
            for name in ("base_lrs", "_last_lr"):
                rates = getattr(scheduler, name, [])
                setattr(scheduler, name, [rate * FORGOTTEN_RATE for rate in rates])

    def on_reduced(self, step: ReturnedStep) -> None:
        """Let the probe read its batches as they are."""
        if self._poison is not None and step.probe is not None:
            step.probe = self._poison.paused(step.probe)

    def before_measure(self, step: OutgoingStep) -> None:
        """Inject the fault at its step, and end the training at the last one."""
        plan, recorder = self._plan, self._recorder
        if self._turn < 0:
            self._turn = step.turn
        if step.turn != self._turn:
            return
        if step.step >= self._planned_end(step.step):
            recorder.end(step.step)
        if self._poison is not None:
            self._poison.end_step(self._gradients, is_last=step.step >= self._poisoned_until)
        if not self._is_injected:
            recorder.measure()
            if plan.fault and step.step >= self._inject_step:
                self._is_injected, self._injected_step = True, step.step
                self._inject(step.step)
        elif not self._is_continued and step.step >= self._injected_step + CONTINUED_STEPS:
            if plan.fault != "full_disk":
                self._is_continued = True
                recorder.write("continued", step=step.step)
            elif self._run.is_rank0:
                self._is_continued = self._free_disk(step.step)

    def _planned_end(self, step: int) -> int:
        """Return the step before which the drilled training ends, as far as it is known."""
        plan = self._plan
        if self._is_restart:
            return self._first_step + CONTINUED_STEPS
        if plan.fault != "full_disk":
            return self._end_step
        steps = {each.kind: each.step for each in read_records(self._recorder.path)}
        if "impossible" in steps:
            return self._end_step
        return steps["continued"] + self._num_late_steps if "continued" in steps else step + 1

    def _inject(self, step: int) -> None:
        """Inject the fault, or record why it is impossible in this loop."""
        fault = self._plan.fault
        if fault == "spike":  # of the averaged gradients: equal on all ranks
            self._record(step, self._is_target)
            for grad in self._gradients():
                grad.mul_(SPIKE)
        elif fault == "poisoned_window":
            self._record(step + 1, self._is_target)
            self._poisoned_until = step + POISONED_STEPS
            self._poison = Poison(self._models(), seed=self._run.ranks.rank)
        elif fault in ("killed_agent", "collector_down", "full_disk"):
            if self._run.is_rank0:
                getattr(self, f"_inject_{fault}")(step)
        elif self._is_target:
            injection: Callable[[int], None] = getattr(self, f"_inject_{fault}")
            injection(step)

    def _record(self, step: int, is_recorded: bool = True) -> None:
        """Record an injection before it happens."""
        if is_recorded:
            recorder = self._recorder
            probe = self._run.features[ProbeFeature].probe
            recorder.write(
                "injected",
                step=step,
                step_seconds=recorder.step_seconds,
                has_probe=probe.has_loss,
            )

    def _inject_killed_agent(self, step: int) -> None:
        agent = self._run.agent
        if agent is None or agent.pid is None:
            text = "this rank has not started an agent"
            self._recorder.write("impossible", step=step, text=text)
            return
        self._record(step)
        os.kill(agent.pid, signal.SIGKILL)
        # On a busy machine the training could otherwise end before the process has.
        end = time.monotonic() + MAX_WAIT_SECONDS
        while _is_alive(agent.pid) and time.monotonic() < end:
            time.sleep(0.01)

    def _inject_collector_down(self, step: int) -> None:
        """Wait until the drill has killed its collector, which is outside of the sandbox."""
        self._record(step)
        self._recorder.wait()

    def _gradients(self) -> list[Tensor]:
        """Return this rank's parts of the gradients."""
        params = self._run.device.norms.params
        return [local_tensor(p.grad.detach()) for p in params if p.grad is not None]

    def _inject_nan_gradient(self, step: int) -> None:
        self._record(step)
        grads = [grad for grad in self._gradients() if grad.numel() and not grad.is_sparse]
        grads[0].view(-1)[0] = float("nan")

    @torch.no_grad()
    def _inject_nan_parameters(self, step: int) -> None:
        self._record(step)
        for param in self._run.device.norms.params[:2]:
            local_tensor(param).fill_(float("nan"))

    @torch.no_grad()
    def _inject_bit_flip(self, step: int) -> None:
        """Flip the highest bit of the fraction of one parameter element."""
        replicas = self._run.replicas
        params = [
            local_tensor(param)
            for param in self._run.device.norms.params
            # A shard of FSDP2, also in a model in which ranks compare other tensors.
            if all(each.is_replicate() for each in getattr(param, "placements", ()))
            and param.dtype in _EXPONENT_BITS
        ]
        if replicas is None or not replicas.keys or not params:
            text = "no other rank holds the same parameters"
            self._recorder.write("impossible", step=step, text=text)
            return
        self._record(step)
        param = max(params, key=Tensor.numel)
        index = (0,) * param.dim()
        num_bits = 8 * param.element_size()
        bit = 1 << (num_bits - 2 - _EXPONENT_BITS[param.dtype])
        value = param[index].clone()
        param[index] = (value.view(_INTEGERS[param.element_size()]) ^ bit).view(param.dtype)

    def _inject_slow_rank(self, step: int) -> None:
        """Delay every forward from now on by the time of a step."""
        if self._run.given.pipeline is not None:
            text = "the parts of a step are not measured in a pipeline"
            self._recorder.write("impossible", step=step, text=text)
            return
        delay = max(self._recorder.step_seconds or 0.0, MIN_DELAY_SECONDS)

        def wait(module: nn.Module, arguments: Any) -> None:
            time.sleep(delay)

        self._record(step)
        for model in self._models():
            model.register_forward_pre_hook(wait)

    def _models(self) -> list[nn.Module]:
        """Return the modules that the loop calls: a container of models has no forward."""
        model, _ = unwrap(self._run.given.model)
        is_container = isinstance(model, (nn.ModuleDict, nn.ModuleList))
        return list(model.children()) if is_container else [model]

    def _inject_stopped_rank(self, step: int) -> None:
        self._record(step)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _inject_killed_rank(self, step: int) -> None:
        self._record(step)
        os.kill(os.getpid(), signal.SIGKILL)

    def _inject_forgotten_lr(self, step: int) -> None:
        """Kill this rank; the rates are forgotten in the second start."""
        if self._run.recovery is None:
            text = "without checkpoints a restart begins at step 0"
            self._recorder.write("impossible", step=step, text=text)
            return
        self._recorder.write("killed", step=step)
        os.kill(os.getpid(), signal.SIGKILL)

    def _inject_full_disk(self, step: int) -> None:
        """Leave no byte on the disk of the run directory."""
        if not os.path.ismount(self._plan.small_disk):
            text = "no disk could be mounted for it: the kernel allows no mount namespace"
            self._recorder.write("impossible", step=step, text=text)
            return
        self._record(step)
        with suppress(OSError), self._filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass

    @property
    def _filler(self) -> Path:
        """File that fills the disk of a drill."""
        return Path(self._plan.small_disk, "fill")

    def _free_disk(self, step: int) -> bool:
        """Delete the drill's file once the agent has reported the full disk; return whether."""
        self._full_since = self._full_since or time.monotonic()
        is_late = time.monotonic() > self._full_since + MAX_FULL_SECONDS
        if step < self._full_until:
            return False
        notices = Path(os.environ["VITALS_SHM"]).rglob(NOTICE_FILE)
        if not is_late and not any(notices):
            return False
        self._filler.unlink(missing_ok=True)
        self._recorder.write("continued", step=step)
        return True


class Poison:
    """Damages the inputs of a model: all elements change places, and floats are multiplied."""

    def __init__(self, models: Sequence[nn.Module], *, seed: int) -> None:
        self.is_on = True
        self._generator = torch.Generator().manual_seed(seed)
        self._num_forwards = 0
        self._hooks = [
            model.register_forward_pre_hook(self._on_forward, with_kwargs=True) for model in models
        ]

    def _on_forward(self, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        if not self.is_on or not module.training:
            return None
        self._num_forwards += 1
        return tree_map_only(Tensor, self._damage, (arguments, keywords))

    def _damage(self, value: Tensor) -> Tensor:
        order = torch.randperm(value.numel(), generator=self._generator)
        value = value.flatten()[order.to(value.device)].view(value.shape)
        return value * POISON if value.is_floating_point() else value

    def end_step(self, gradients: Callable[[], list[Tensor]], *, is_last: bool) -> None:
        """Reverse the gradients of a loop that does not call its model; call once per step."""
        if self.is_on and not self._num_forwards:
            for grad in gradients():
                grad.neg_()
        self._num_forwards = 0
        if is_last:
            self.is_on = False
            for hook in self._hooks:
                hook.remove()

    def paused(self, probe: Callable[[Ask], ProbeResult]) -> Callable[[Ask], ProbeResult]:
        """Return the probe of a poisoned training, which reads its batches undamaged."""

        def evaluate(ask: Ask) -> ProbeResult:
            was_on, self.is_on = self.is_on, False
            try:
                return probe(ask)
            finally:
                self.is_on = was_on

        return evaluate


def _is_alive(pid: int) -> bool:
    """Return whether a process that the drill killed has not ended yet; its parent may wait."""
    try:
        return str(psutil.Process(pid).status()) != str(psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
