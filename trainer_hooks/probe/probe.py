"""The probe: re-evaluates batches from before a suspected problem with the current weights.

    for batch in monitor.batches(loader, probe=loss_of):

``loss_of(batch)`` returns the training loss. Only ``step()`` calls it, on all ranks together, and
it has no effect on training: the trajectory is bitwise the same as without a probe. For one batch
the gradient is computed too, unless the model is sharded: damaged weights can give a normal loss
and a non-finite gradient. The first call is a rehearsal: it must reproduce the loss of the step.

Limits: if ``loss_of`` raises on one rank in the middle of a forward with collectives (FSDP,
SyncBatchNorm, a pipeline), the other ranks wait there, as in training. Side effects outside the
model (a list, a file, a separate generator) are not undone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_hooks.exchange.emit import Emitter
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.probe.bank import EVERY, BankedBatches, BatchBank, copy_to_device, same_content
from trainer_hooks.probe.isolated_forward import (
    RefusedError,
    is_sharded,
    isolated_forward,
    seed_all,
)
from trainer_hooks.ranks import Ranks
from trainer_hooks.tensors.optimizer_state import params_of
from trainer_hooks.tensors.pipeline import check_can_evaluate, schedule_as_before
from trainvitals.policy.evidence import MIN_BATCHES, NONFINITE_GRADIENT, Ask, ProbeResult
from trainvitals.printable import name_type
from trainvitals.records import Note

LossOf = Callable[[Any], Tensor | float]
"""Returns the training loss of a batch: one number."""

_NEAREST, _FARTHEST = 16, 40
"""Steps before an onset; batches of these steps decide."""
_FARTHEST_OF_FEW = 100
"""Used if too few steps were kept there, for example after withheld steps."""
_OLDER = (64, 256)
_TOLERANCE = 0.25
"""Allowed deviation of a rehearsal, as a fraction of the step's loss. Dropout, the mode of batch
norm and token weights change it by about a tenth; a sum, another kind of loss or a wrong sign by
more. Four times the noise of RNG and choice of batches is added."""
_WIDEST = 0.9
"""Maximum of that sum: a loss of zero and a wrong sign always fail."""
_TRIES = 7
"""Rehearsals without a result, with growing pauses (1, 2, 4... kept steps)."""

_ENTERS, _DONE, _FAILED = 1.0, 2.0, 3.0


class Probe:
    """Keeps batches of healthy steps, and evaluates them with the current weights.

    Order of calls in a step: ``keep`` for each batch before it is yielded; ``fed``; ``rehearse``
    before the update; ``update_readiness``, and ``accepted`` or ``dropped``, when the verdict
    arrives, possibly one step later; ``evaluate`` after the update, if the policy requests it.
    Before each forward of ``model`` all ranks agree to continue. ``rewind`` restores the buffers
    from the start of the step, for a rehearsal after its forward.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        ranks: Ranks,
        emitter: Emitter,
        faults: FaultCounter,
        max_bytes: int | None = None,
        rewind: Callable[[], object] | None = None,
        schedule: Any = None,
        computes_loss: bool = True,
    ) -> None:
        """``schedule`` runs a pipeline, where only the rank of the last stage ``computes_loss``."""
        self._schedule = schedule
        self._computes_loss = computes_loss
        self._model = model
        self._optimizers = tuple(optimizers)
        self._ranks = ranks
        self._emitter = emitter
        self._faults = faults
        self.bank = BatchBank(max_bytes)
        self._rewind = rewind
        self._loss_of: LossOf | None = None
        self.has_loss = False
        """Whether this rank has a loss function; without one, steps do no work for the probe."""
        self._next_step = 0
        self._attempt = 0
        self._was_fed = False
        self._why_not = ""
        """Why this rank keeps no more batches."""
        self._earlier: BankedBatches | None = None
        """Batches of a step before the rehearsal, to check that the loss depends on the batch."""
        self._all_ready = False
        self._is_over = False
        self._tries = 0
        self._pause = 0
        self.is_on = False
        """Whether the probe can be used; equal on all ranks."""

    # --------------------------------------------------------------------- batches of a step

    def set_loss(self, loss_of: LossOf, *, step: int, attempt: int) -> None:
        """Set the loss of batches that are yielded from now on; the first of them feed ``step``.

        Raises:
            UsageError: the pipeline's schedule cannot run forward only.
        """
        if self._schedule is not None:
            check_can_evaluate(self._schedule)
        self._loss_of, self.has_loss = loss_of, True
        self._next_step, self._attempt = step, attempt

    @property
    def is_ready(self) -> bool:
        """Whether this rank can be probed; a value in the reduce vector."""
        return self._loss_of is not None and self._was_fed and not self._why_not

    def keep(self, batch: Any) -> None:
        """Copy a batch before it is yielded, if batches of this step are kept."""
        if self._is_over or self._why_not or not self.bank.wants(self._next_step):
            return
        try:
            self.bank.copy(batch)
        except Exception as error:  # noqa: BLE001 - a batch that cannot be copied must not stop training
            self._faults.count("probe.keep", error)
            self._stop_keeping(f"a batch cannot be copied: {type(error).__name__}: {error}")
            return
        if self.bank.is_full:
            mib = self.bank.max_bytes / (1 << 20)
            self._stop_keeping(f"the batches do not fit into {mib:.3g} MiB")

    def _stop_keeping(self, reason: str) -> None:
        """Drop all batches, and keep no more of them for the probe, with this reason."""
        self._why_not = reason
        self.bank.clear()
        self._earlier = None
        if self._ranks.rank:  # rank 0 reports after all have switched off
            text = f"rank {self._ranks.rank} keeps no batches: {reason}"
            self._emit_note("probe_off", text, "warning")

    def fed(self, step: int, num_batches: int, *, attempt: int = 0) -> None:
        """Assign the kept batches since the last call to this step; call before its update."""
        self._attempt = attempt
        if self._loss_of is not None:
            self._was_fed = self._was_fed or num_batches > 0
            self.bank.fed(step, num_batches, self._loss_of)
        self._next_step = step + 1

    def accepted(self, step: int, attempt: int, own_loss: float | None) -> None:
        """Keep the batches of a step that was judged clean. ``own_loss``: loss of this rank."""
        if not self._computes_loss:
            own_loss = 0.0
        if own_loss is None or not math.isfinite(own_loss):
            self.bank.dropped(step)
        else:
            self.bank.accepted(step, own_loss)

    def dropped(self, step: int) -> None:
        """Drop the batches of a step that has findings."""
        self.bank.dropped(step)

    def rolled_back(self, step: int) -> None:
        """Drop batches of this step and later; training continues at this step."""
        self.bank.rolled_back(step)
        self._next_step = step
        if self._earlier is not None and self._earlier.step >= step:
            self._earlier = None

    def update_readiness(self, num_ready: float) -> None:
        """Record the number of ranks with ``is_ready`` in a step; the same number on all ranks."""
        self._all_ready = num_ready >= self._ranks.world_size
        if self.is_on and not self._all_ready:
            self._switch_off(self._why_not or "a rank no longer keeps batches")

    # ---------------------------------------------------------------------------- a rehearsal

    def rehearse(self, step: int, own_loss: Callable[[], float | None]) -> None:
        """Check that ``loss_of`` reproduces the loss of the step. Collective, if one is due.

        Call on all ranks before the update of each step, after ``fed``. ``own_loss`` returns the
        local loss of the step, and waits for the device.
        """
        if self.is_on or self._is_over or not self._all_ready or step % EVERY:
            return
        if self._pause:
            self._pause -= 1
            return
        saved, earlier = self.bank.waiting(step), self._earlier
        self._earlier = earlier or saved
        loss = own_loss() if self._computes_loss else 0.0
        can = saved is not None and earlier is not None and loss is not None and math.isfinite(loss)
        counts = (len(saved.batches), len(earlier.batches)) if saved and earlier and can else (0, 0)
        everywhere = self._ranks.gather(counts)
        fewest = min(c[0] for c in everywhere), min(c[1] for c in everywhere)
        if not all(fewest):
            self._try_again("no step has a kept batch on every rank")
            return
        assert saved is not None and earlier is not None and loss is not None, "just looked at"
        self._verify_probe(saved, earlier, fewest, loss)

    def _verify_probe(
        self, saved: BankedBatches, earlier: BankedBatches, fewest: tuple[int, int], loss: float
    ) -> None:
        """Turn the probe on if its losses match the step's on all ranks; otherwise off or later."""
        now, before = saved.batches[: fewest[0]], earlier.batches[: fewest[1]]
        present = _Task(saved, now, rewind=self._rewind)
        tasks = (present, present._replace(seed=1), _Task(earlier, before))
        results = self._evaluate_tasks(tasks)
        if results is None:
            return
        verdict = ""
        if self._computes_loss:
            verdict = _rehearsal_mismatch(results, saved, len(now), loss)
            is_same = not verdict and _ignores_input(results)
            if is_same and not same_content(saved.batches, earlier.batches):
                verdict = "again"
        everyone = self._ranks.gather((verdict, self._computes_loss, results[0].loss, loss))
        for rank, (each, *_) in enumerate(everyone):
            if each not in ("", "again"):
                self._switch_off(each, rank)
                return
        if any(each == "again" for each, *_ in everyone):
            self._try_again("loss_of returns the same number for different batches")
            return
        self.is_on = True
        self._earlier = None
        expected = self.bank.expected_bytes() / (1 << 20)
        rank = next(r for r, (_, computes_loss, *_) in enumerate(everyone) if computes_loss)
        _, _, gave, saw = everyone[rank]
        self._emit_note(
            "probe_bank",
            f"the probe is on: loss_of gave {gave:.6g} where step {saved.step} saw "
            f"{saw:.6g} on rank {rank}; each rank keeps batches of past steps, up to "
            f"{expected:.3g} MiB of at most {self.bank.max_bytes / (1 << 20):.3g} MiB",
        )

    def _try_again(self, reason: str) -> None:
        """Rehearse the probe again after a longer pause; turn it off after the last attempt."""
        self._pause = (1 << self._tries) - 1
        self._tries += 1
        if self._tries >= _TRIES:
            self._switch_off(reason)

    # -------------------------------------------------------------------------------- an answer

    def evaluate(self, ask: Ask) -> ProbeResult:
        """Evaluate batches from before the onset with the current weights. Collective.

        Call on all ranks after the update, the schedulers and ``zero_grad``.
        """
        if not self.is_on:
            return _empty_probe_result("the probe is off")
        everywhere = self._ranks.gather(self.bank.num_batches())
        near, far = _select_batches(everywhere, ask.onset_step)
        if len(near) < MIN_BATCHES:
            return _empty_probe_result(
                f"{len(near)} kept steps are 16 to 100 before step {ask.onset_step}"
            )
        # Use the same number of batches on each rank: a forward may contain collectives.
        fewest = [(step, min(saved[step] for saved in everywhere)) for step in (*near, *far)]
        tasks = [_Task(self.bank[step], self.bank[step].batches[:n]) for step, n in fewest]
        latest = len(near) - 1
        tasks[latest] = tasks[latest]._replace(with_gradient=True)
        results = self._evaluate_tasks(tasks)
        if results is None:
            return _empty_probe_result("the probe failed and is now off")
        numbers = [(r.loss, t.banked.loss) for r, t in zip(results, tasks, strict=True)]
        if not self._computes_loss:
            numbers = []
        everything = self._ranks.gather((numbers, results[latest].has_gradient))
        now, then = _mean_losses([numbers for numbers, _ in everything if numbers])
        bad_ranks = [rank for rank, (_, has_gradient) in enumerate(everything) if not has_gradient]
        return _build_probe_result(ask, near, far, now, then, bad_ranks)

    # ---------------------------------------------------------------------------- its forwards

    def _evaluate_tasks(self, tasks: Iterable[_Task]) -> list[_TaskResult] | None:
        """Evaluate the losses on all ranks together; None if it failed on any rank."""
        meeting = _ForwardBarrier(self._ranks)
        results: list[_TaskResult] = []
        with meeting.at_each_forward(self._model, self._schedule):
            for task in tasks:
                try:
                    results.append(self._evaluate_task(task))
                except _EvaluationAbortedError:
                    break
                except Exception as error:  # noqa: BLE001 - user function; the error is reported below
                    meeting.failed(error)
                    break
                if not meeting.meet(_DONE):
                    break
        if not meeting.is_over:
            return results
        reasons = self._ranks.gather(meeting.reason)
        rank = next((r for r, reason in enumerate(reasons) if reason), -1)
        reason = reasons[rank] if rank >= 0 else "the ranks call the model differently"
        self._switch_off(f"loss_of {reason}" if rank >= 0 else reason, rank)
        return None

    def _evaluate_task(self, task: _Task) -> _TaskResult:
        """Return the losses of a task's batches with the current weights."""
        losses = []
        has_gradient = True
        for i, batch in enumerate(task.batches):
            with isolated_forward(self._model, self._optimizers) as check:
                if task.rewind is not None:
                    task.rewind()
                seed_all(task.seed)
                value = task.banked.loss_of(copy_to_device(batch))
                check()
                losses.append(_loss_number(value) if self._computes_loss else 0.0)
                if task.with_gradient and not i:
                    seed_all(task.seed)
                    has_gradient = self._has_gradient(task.banked.loss_of, batch)
        return _TaskResult(sum(losses) / len(losses), losses, has_gradient)

    def _has_gradient(self, loss_of: LossOf, batch: Any) -> bool:
        """Return whether the gradient of a batch is finite; True if that is unknown.

        ``torch.autograd.grad`` runs no parameter hooks: DDP reduces nothing, and ``.grad`` is
        unchanged. A sharded model gathers and reduces in such hooks, so it is not checked, and
        neither is a pipeline, whose backward passes through all ranks.
        """
        if self._schedule is not None or is_sharded(self._model):
            return True
        parameters = params_of(self._optimizers)
        parameters = [p for p in parameters if p.requires_grad and not p.is_sparse]
        with torch.enable_grad():
            try:
                loss = loss_of(copy_to_device(batch))
                if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
                    return True
                gradients = torch.autograd.grad(loss.sum(), parameters, allow_unused=True)
            except Exception as error:  # noqa: BLE001 - reentrant checkpoints refuse autograd.grad
                self._faults.count("probe.gradient", error)
                return True
        found = [g.coalesce().values() if g.is_sparse else g for g in gradients if g is not None]
        return bool(torch.stack([torch.isfinite(g).all() for g in found]).all()) if found else True

    # ---------------------------------------------------------------------------------- its end

    def close(self) -> None:
        """Drop the batches on this rank; the probe is off from now on."""
        self.is_on, self._is_over = False, True
        self.bank.clear()
        self._earlier = None

    def _switch_off(self, reason: str, rank: int = -1) -> None:
        """Turn the probe off permanently; call on all ranks."""
        self.close()
        where = f" on rank {rank}" if rank >= 0 and self._ranks.world_size > 1 else ""
        if self._ranks.rank == 0:
            self._emit_note("probe_off", f"the probe is off: {reason}{where}", "warning")

    def _emit_note(
        self, code: str, text: str, severity: Literal["info", "warning"] = "info"
    ) -> None:
        """Write a note about the probe: on rank 0, or on any rank that turns it off."""
        if self._ranks.rank == 0 or code == "probe_off":
            event = Note(code=code, text=text, severity=severity)
            self._emitter.event(event, step=self._next_step, attempt=self._attempt)


class _Task(NamedTuple):
    """Batches of one step to evaluate."""

    banked: BankedBatches
    batches: list[Any]
    """Kept batches, as many as every rank has."""
    seed: int = 0
    rewind: Callable[[], object] | None = None
    """Restores buffers to the start of the step; called inside ``isolated_forward``."""
    with_gradient: bool = False
    """Whether to check the gradient of the first batch, too."""


class _TaskResult(NamedTuple):
    """Result of one task on this rank."""

    loss: float
    losses: list[float]
    has_gradient: bool = True
    """Whether the checked gradient is finite."""


class _EvaluationAbortedError(BaseException):
    """All ranks abort an evaluation; a ``BaseException``, so that user code does not catch it."""


class _ForwardBarrier:
    """Synchronizes the ranks at the start and end of each forward: all continue, or none."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.is_over = False
        """Whether the ranks have stopped synchronizing."""
        self.reason = ""
        """Failure on this rank."""

    def meet(self, code: float) -> bool:
        """Return whether all ranks are at the same point of the probe. Collective."""
        if self.is_over:
            return False
        lowest = highest = code
        if self._ranks.side is not None:
            codes = torch.tensor([code, -code], dtype=torch.float64, device="cpu")
            dist.all_reduce(codes, op=dist.ReduceOp.MAX, group=self._ranks.side)
            highest, lowest = float(codes[0]), -float(codes[1])
        self.is_over = lowest != highest or code == _FAILED
        return not self.is_over

    def failed(self, error: Exception) -> None:
        """Abort the probe's evaluation on all ranks."""
        text = str(error) if isinstance(error, RefusedError) else ""
        self.reason = text or f"raised {type(error).__name__}: {error}"[:500]
        self.meet(_FAILED)

    @contextmanager
    def at_each_forward(self, model: nn.Module, schedule: Any) -> Iterator[None]:
        """Synchronize before each forward of the probed model: it may contain collectives.

        In a pipeline before each evaluation of the schedule: stages wait for each other inside it.
        """
        if self._ranks.side is None:
            yield
            return

        def enter(*_: Any) -> None:
            if not self.meet(_ENTERS):
                raise _EvaluationAbortedError

        if schedule is not None:
            evaluate = schedule.eval

            def evaluate_together(*args: Any, **kwargs: Any) -> Any:
                enter()
                return evaluate(*args, **kwargs)

            with schedule_as_before(schedule):  # removes this attribute too
                schedule.eval = evaluate_together
                yield
            return
        # Before FSDP's hooks: a forward that is aborted must not change FSDP's states.
        hook: Any = torch.compiler.disable(enter)
        handle = model.register_forward_pre_hook(hook, prepend=True)
        try:
            yield
        finally:
            handle.remove()


def _loss_number(value: object) -> float:
    """Return the loss of a re-evaluated batch as a number."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise RefusedError("returned a loss with gradients: it enables them itself")
        placements = getattr(value, "placements", ())
        if value.numel() == 1 and all(p.is_replicate() for p in placements):
            to_local = getattr(value, "to_local", None)
            return float(value if to_local is None else to_local())
        shape = tuple(value.shape)
        raise RefusedError(f"returned a tensor of shape {shape}; it must be one number")
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise RefusedError(f"returned {name_type(value)}; it must be one number")
    return float(value)


# ------------------------------------------------------------------------------ pure functions


def _rehearsal_mismatch(
    results: Sequence[_TaskResult], saved: BankedBatches, num_read: int, loss: float
) -> str:
    """Return why the probe's rehearsal does not match the step's losses; empty if it does."""
    first, second = results[0], results[1]
    read = (first.loss + second.loss) / 2
    # Two forwards differ by the random numbers of dropout, and by the choice of batches.
    noise = abs(first.loss - second.loss)
    if num_read < saved.num_batches and len(first.losses) > 1:
        noise += statistics.stdev(first.losses) / math.sqrt(len(first.losses))
    elif num_read < saved.num_batches:
        noise += _TOLERANCE * abs(loss)
    tolerance = min(_TOLERANCE * abs(loss) + 4 * noise, _WIDEST * abs(loss))
    if math.isfinite(read) and abs(read - loss) <= tolerance + 1e-9:
        return ""
    return (
        f"loss_of gave {read:.6g} where step {saved.step} saw {loss:.6g} (within {tolerance:.3g}); "
        "it must return the loss that is passed to monitor.step() or monitor.micro()"
    )


def _ignores_input(results: Sequence[_TaskResult]) -> bool:
    """Return whether the probe's other batches gave exactly the same loss: it ignores its input."""
    first, other = results[0].losses, results[2].losses
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(first, other, strict=False))


def _select_batches(everywhere: Sequence[Iterable[int]], onset: int) -> tuple[list[int], list[int]]:
    """Return steps to re-evaluate, kept by all ranks: near the onset, and long before it."""
    common = sorted(set(everywhere[0]).intersection(*everywhere[1:]))
    before = [s for s in common if onset - _FARTHEST_OF_FEW <= s <= onset - _NEAREST]
    near = [s for s in before if s >= onset - _FARTHEST]
    if len(near) < MIN_BATCHES:
        near = before[-MIN_BATCHES:]
    far = [max((s for s in common if s <= onset - age), default=-1) for age in _OLDER]
    return near, sorted({s for s in far if s >= 0 and s not in near})


def _mean_losses(
    everywhere: Sequence[Sequence[tuple[float, float]]],
) -> tuple[list[float], list[float]]:
    """Return the means over ranks of the probe's current and earlier losses, per batch."""
    count = len(everywhere)
    by_step = list(zip(*everywhere, strict=True))
    now = [sum(pair[0] for pair in pairs) / count for pairs in by_step]
    then = [sum(pair[1] for pair in pairs) / count for pairs in by_step]
    return now, then


def _build_probe_result(
    ask: Ask,
    near: list[int],
    far: list[int],
    now: list[float],
    then: list[float],
    bad_ranks: Sequence[int] = (),
) -> ProbeResult:
    """Return the probe's result from the losses near the onset and long before it."""
    n = len(near)
    ages = f"steps {near[0]} to {near[-1]}"
    if bad_ranks:
        shown = ", ".join(map(str, bad_ranks[:8]))
        ages = f"{NONFINITE_GRADIENT} (rank {shown}); {ages}"
    all_now, all_then = _median(now), statistics.median(then)
    older = None
    if far and all_then + ask.floor > 0.0 and math.isfinite(all_now):
        older = (all_now + ask.floor) / (all_then + ask.floor)
        ages += f"; with {', '.join(map(str, far))} it is {older:.3g} times"
    return ProbeResult(
        num_batches=n,
        then=statistics.median(then[:n]),
        now=_median(now[:n]),
        older=older,
        detail=ages,
        has_gradient=not bad_ranks,
    )


def _median(losses: Sequence[float]) -> float:
    """Return the median of the probe's losses; NaN if any is not finite."""
    return statistics.median(losses) if all(map(math.isfinite, losses)) else math.nan


def _empty_probe_result(detail: str) -> ProbeResult:
    """Return a probe's result without any batch, with the reason for it."""
    return ProbeResult(num_batches=0, then=math.nan, now=math.nan, detail=detail)


# ----------------------------------------------------------- the loop's own evaluations


_FLOOR = 0.02
"""Fraction of the metric's first value that is added to both sides of the ratio."""
_LARGEST = 1e9


class ValidationLosses:
    """Validation losses on rank 0; the largest ratio is sent with the numbers of the next step.

    Only metrics named ``loss`` or with that suffix count: for others, larger may be better.
    """

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self.ratio = 0.0
        """Largest ratio since it was last sent; 0 if there was none."""

    def add(self, values: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation, which complement the probe as evidence."""
        for name, value in values.items():
            if name.lower().rpartition("_")[2] == "loss" and isinstance(value, int | float):
                self.ratio = max(self.ratio, self._loss_ratio(name, float(value)))

    def _loss_ratio(self, name: str, value: float) -> float:
        """Return a metric relative to its reference, as evidence like a probe's; 1: none yet."""
        if name not in self._last:
            if math.isfinite(value):
                self._first[name] = self._last[name] = value
            return 1.0
        floor = _FLOOR * abs(self._first[name])
        before = self._last[name] + floor
        if not math.isfinite(value):
            return _LARGEST
        self._last[name] = value
        return min((value + floor) / before, _LARGEST) if before > 0.0 else 1.0
