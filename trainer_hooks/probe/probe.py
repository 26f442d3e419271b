"""The probe: how does the present state do on batches that the training did well on before?

    for batch in monitor.batches(loader, probe=loss_of):

``loss_of(batch)`` gives the loss that the loop trains on. It is called by ``step()`` alone, on all
ranks alike, and leaves no trace: the trajectory is that of a training without it. Of one batch the
gradient is computed too, unless the model is sharded: weights can give a usual loss and a gradient
that is not finite. Its first call is a rehearsal: it must give what the step saw.

What it cannot help: a ``loss_of`` that raises on one rank in the middle of a forward which holds
collectives (FSDP, SyncBatchNorm) leaves the other ranks waiting there, as it would in training. And
what a forward writes where nobody looks (a list, a file, a generator of its own) stays written.
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

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.probe.bank import EVERY, Bank, BankedBatches, given_out, same_content
from trainer_hooks.probe.untouched import RefusedError, is_sharded, isolated_forward, seed_all
from trainer_hooks.ranks import Ranks
from trainer_hooks.step.emit import Emitter
from trainvitals.policy.evidence import MIN_BATCHES, NONFINITE_GRADIENT, Ask, ProbeResult
from trainvitals.printable import name_type
from trainvitals.records import Note

LossOf = Callable[[Any], Tensor | float]
"""Gives the loss of a batch, as the loop trains on it: one number."""

_NEAREST, _FARTHEST = 16, 40
"""Steps before an onset: the batches that decide."""
_FARTHEST_OF_FEW = 100
"""The same where too few were kept there, as behind a stretch that was withheld."""
_OLDER = (64, 256)
_TOLERANCE = 0.25
"""Of the step's loss, within which a rehearsal must give it: dropout, batch norm in another mode
and weights of tokens move it by a tenth or so; a sum, another kind of loss or a wrong sign by more.
What the generators and the choice of batches alone make is added, four times over."""
_WIDEST = 0.9
"""Of the step's loss: a zero and a wrong sign are never within its noise."""
_TRIES = 7
"""Rehearsals without a result, with ever longer pauses (1, 2, 4... kept steps)."""

_ENTERS, _DONE, _FAILED = 1.0, 2.0, 3.0


class Probe:
    """Keeps batches, and reads what the present state makes of them.

    The order of a step: ``keep`` each batch as it is handed out; ``fed``; ``rehearse`` before the
    update; ``returned`` and ``accepted`` or ``dropped`` with the step's verdict, a step later
    perhaps; ``evaluate`` after the update, where the ladder asks.

    Args:
        model: the watched one; each of its forwards is a point where ranks agree to go on.
        optimizers: those that hold what is trained.
        ranks: this process among the others.
        emitter: tells what is kept, and why nothing is.
        faults: counts what fails in copying.
        max_bytes: bound of the copies; None is 256 MiB, and 2 % of the memory that is left.
        rewind: brings buffers back to where the step began, for a rehearsal behind its forward.
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
        rewind: Callable[[], None] | None = None,
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._ranks = ranks
        self._emitter = emitter
        self._faults = faults
        self.bank = Bank(max_bytes)
        self._rewind = rewind
        self._loss_of: LossOf | None = None
        self.has_loss = False
        """Whether this rank was given a loss to ask for; without one a step leaves all of this."""
        self._next_step = 0
        self._attempt = 0
        self._was_fed = False
        self._why_not = ""
        """Why this rank keeps no batches any more."""
        self._earlier: BankedBatches | None = None
        """A step's batches from before the rehearsal: a loss of other batches is another one."""
        self._all_ready = False
        self._is_over = False
        self._tries = 0
        self._pause = 0
        self.is_on = False
        """Whether it can be asked: known on all ranks alike."""

    # ------------------------------------------------------------------------- what comes in

    def use(self, loss_of: LossOf, *, step: int, attempt: int) -> None:
        """Take the loss of the batches handed out from now on; they feed ``step`` first."""
        self._loss_of, self.has_loss = loss_of, True
        self._next_step, self._attempt = step, attempt

    @property
    def is_ready(self) -> bool:
        """Whether this rank has what it takes; goes into the step's pack."""
        return self._loss_of is not None and self._was_fed and not self._why_not

    def keep(self, batch: Any) -> None:
        """Copy a batch that is about to be handed out, if its step is one to be kept."""
        if self._is_over or self._why_not or not self.bank.wants(self._next_step):
            return
        try:
            self.bank.copy(batch)
        except Exception as error:  # noqa: BLE001 - any batch is let through
            self._faults.count("probe.keep", error)
            self._stop_keeping(f"a batch cannot be copied: {type(error).__name__}: {error}")
            return
        if self.bank.is_full:
            mib = self.bank.max_bytes / (1 << 20)
            self._stop_keeping(f"the batches do not fit into {mib:.3g} MiB")

    def _stop_keeping(self, reason: str) -> None:
        self._why_not = reason
        self.bank.clear()
        self._earlier = None
        if self._ranks.rank:  # rank 0 speaks where all have switched off
            self._tell(
                "probe_off",
                f"rank {self._ranks.rank} keeps no batches: {reason}",
                "warning",
            )

    def fed(self, step: int, num_batches: int, *, attempt: int = 0) -> None:
        """Take what was kept since the last call for this step's; call before its update."""
        self._attempt = attempt
        if self._loss_of is not None:
            self._was_fed = self._was_fed or num_batches > 0
            self.bank.fed(step, num_batches, self._loss_of)
        self._next_step = step + 1

    def accepted(self, step: int, attempt: int, own_loss: float | None) -> None:
        """Keep the step's batches: it was judged clean. ``own_loss`` is this rank's."""
        if own_loss is None or not math.isfinite(own_loss):
            self.bank.dropped(step)
        else:
            self.bank.accepted(step, own_loss)

    def dropped(self, step: int) -> None:
        """Forget the step's batches: something was found in it."""
        self.bank.dropped(step)

    def rolled_back(self, step: int) -> None:
        """Forget what was kept from this step on; it comes next."""
        self.bank.rolled_back(step)
        self._next_step = step
        if self._earlier is not None and self._earlier.step >= step:
            self._earlier = None

    def returned(self, num_ready: float) -> None:
        """Take in how many ranks said ``is_ready`` in a step: the same number on all of them."""
        self._all_ready = num_ready >= self._ranks.world_size
        if self.is_on and not self._all_ready:
            self._switch_off(self._why_not or "a rank no longer keeps batches")

    # ---------------------------------------------------------------------------- a rehearsal

    def rehearse(self, step: int, own_loss: Callable[[], float | None]) -> None:
        """See whether ``loss_of`` gives what the step saw. Collective, where one is due.

        Call before the update of each step, after ``fed``; on all ranks.

        Args:
            step: the present one.
            own_loss: returns this rank's own loss of it; waits for the device.
        """
        if self.is_on or self._is_over or not self._all_ready or step % EVERY:
            return
        if self._pause:
            self._pause -= 1
            return
        saved, earlier = self.bank.waiting(step), self._earlier
        self._earlier = earlier or saved
        loss = own_loss()
        can = saved is not None and earlier is not None and loss is not None and math.isfinite(loss)
        counts = (len(saved.batches), len(earlier.batches)) if saved and earlier and can else (0, 0)
        everywhere = self._ranks.gather(counts)
        fewest = min(c[0] for c in everywhere), min(c[1] for c in everywhere)
        if not all(fewest):
            self._try_again("no step has a kept batch on every rank")
            return
        assert saved is not None and earlier is not None and loss is not None, "just looked at"
        self._judge(saved, earlier, fewest, loss)

    def _judge(
        self, saved: BankedBatches, earlier: BankedBatches, fewest: tuple[int, int], loss: float
    ) -> None:
        now, before = saved.batches[: fewest[0]], earlier.batches[: fewest[1]]
        present = _Task(saved, now, rewind=self._rewind)
        tasks = (present, present._replace(seed=1), _Task(earlier, before))
        results = self._forwards(tasks)
        if results is None:
            return
        verdict = _verdict(results, saved, len(now), loss)
        if (
            verdict == ""
            and _stands_still(results)
            and not same_content(saved.batches, earlier.batches)
        ):
            verdict = "again"
        verdicts = self._ranks.gather(verdict)
        for rank, each in enumerate(verdicts):
            if each not in ("", "again"):
                self._switch_off(each, rank)
                return
        if "again" in verdicts:
            self._try_again("loss_of returns the same number for different batches")
            return
        self.is_on = True
        self._earlier = None
        expected = self.bank.expected_bytes() / (1 << 20)
        self._tell(
            "probe_bank",
            f"the probe is on: loss_of gave {results[0].loss:.6g} where step {saved.step} saw "
            f"{loss:.6g} on rank {self._ranks.rank}; each rank keeps batches of past steps, up to "
            f"{expected:.3g} MiB of at most {self.bank.max_bytes / (1 << 20):.3g} MiB",
        )

    def _try_again(self, reason: str) -> None:
        self._pause = (1 << self._tries) - 1
        self._tries += 1
        if self._tries >= _TRIES:
            self._switch_off(reason)

    # -------------------------------------------------------------------------------- an answer

    def evaluate(self, ask: Ask) -> ProbeResult:
        """Return what the present state makes of batches from before the onset. Collective.

        Call after the update, the schedulers and ``zero_grad``, on all ranks alike.
        """
        if not self.is_on:
            return _nothing("the probe is off")
        everywhere = self._ranks.gather(self.bank.num_batches())
        near, far = _select_batches(everywhere, ask.onset_step)
        if len(near) < MIN_BATCHES:
            return _nothing(f"{len(near)} kept steps are 16 to 100 before step {ask.onset_step}")
        # As many of each step as every rank has: its forwards may hold collectives.
        fewest = [(step, min(saved[step] for saved in everywhere)) for step in (*near, *far)]
        tasks = [_Task(self.bank[step], self.bank[step].batches[:n]) for step, n in fewest]
        latest = len(near) - 1
        tasks[latest] = tasks[latest]._replace(with_gradient=True)
        results = self._forwards(tasks)
        if results is None:
            return _nothing("the probe failed and is now off")
        numbers = [(r.loss, t.kept.loss) for r, t in zip(results, tasks, strict=True)]
        everything = self._ranks.gather((numbers, results[latest].has_gradient))
        now, then = _means([numbers for numbers, _ in everything])
        bad_ranks = [rank for rank, (_, has_gradient) in enumerate(everything) if not has_gradient]
        return _reading(ask, near, far, now, then, bad_ranks)

    # ---------------------------------------------------------------------------- its forwards

    def _forwards(self, tasks: Iterable[_Task]) -> list[_TaskResult] | None:
        """Read the losses, on all ranks in step. None: some rank could not, and all know."""
        meeting = _Meeting(self._ranks)
        results: list[_TaskResult] = []
        with meeting.at_each_forward(self._model):
            for task in tasks:
                try:
                    results.append(self._losses(task))
                except _LeftError:
                    break
                except Exception as error:  # noqa: BLE001 - the loop's own function; told below
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

    def _losses(self, task: _Task) -> _TaskResult:
        losses = []
        has_gradient = True
        for i, batch in enumerate(task.batches):
            with isolated_forward(self._model, self._optimizers) as check:
                if task.rewind is not None:
                    task.rewind()
                seed_all(task.seed)
                value = task.kept.loss_of(given_out(batch))
                check()
                losses.append(_number(value))
                if task.with_gradient and not i:
                    seed_all(task.seed)
                    has_gradient = self._has_gradient(task.kept.loss_of, batch)
        return _TaskResult(sum(losses) / len(losses), losses, has_gradient)

    def _has_gradient(self, loss_of: LossOf, batch: Any) -> bool:
        """Return whether the gradient of a batch is finite; True where it cannot be known.

        ``torch.autograd.grad`` runs no hook of a parameter: DDP reduces nothing, and no ``.grad``
        is written. A sharded model gathers and reduces in its hooks, so it is not asked.
        """
        if is_sharded(self._model):
            return True
        parameters = [
            p for o in self._optimizers for group in o.param_groups for p in group["params"]
        ]
        parameters = [p for p in parameters if p.requires_grad and not p.is_sparse]
        with torch.enable_grad():
            try:
                loss = loss_of(given_out(batch))
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
        """Let go of the batches, on this rank alone: nothing is asked any more."""
        self.is_on, self._is_over = False, True
        self.bank.clear()
        self._earlier = None

    def _switch_off(self, reason: str, rank: int = -1) -> None:
        """Be off for good; called on all ranks alike."""
        self.close()
        where = f" on rank {rank}" if rank >= 0 and self._ranks.world_size > 1 else ""
        if self._ranks.rank == 0:
            self._tell("probe_off", f"the probe is off: {reason}{where}", "warning")

    def _tell(self, code: str, text: str, severity: Literal["info", "warning"] = "info") -> None:
        if self._ranks.rank == 0 or code == "probe_off":
            event = Note(code=code, text=text, severity=severity)
            self._emitter.event(event, step=self._next_step, attempt=self._attempt)


class _Task(NamedTuple):
    """Batches of one step, to be read."""

    kept: BankedBatches
    batches: list[Any]
    """Of those that were kept, as many as every rank has."""
    seed: int = 0
    rewind: Callable[[], None] | None = None
    """Brings what forward writes back to where the step began; within ``isolated_forward``."""
    with_gradient: bool = False
    """Whether the gradient of the first batch is looked at too."""


class _TaskResult(NamedTuple):
    """What was read of a task on this rank."""

    loss: float
    losses: list[float]
    has_gradient: bool = True
    """Whether the gradient that was looked at is finite."""


class _LeftError(BaseException):
    """All ranks have left a reading; no ``except Exception`` of the loop's own may stop this."""


class _Meeting:
    """Lets all ranks go on together, or none: each forward and each end of one is agreed on."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.is_over = False
        """Whether the ranks have parted: there is no more meeting."""
        self.reason = ""
        """What failed on this rank."""

    def meet(self, code: float) -> bool:
        """Return whether all ranks are at the same point."""
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
        """Leave, and take the others along."""
        text = str(error) if isinstance(error, RefusedError) else ""
        self.reason = text or f"raised {type(error).__name__}: {error}"[:500]
        self.meet(_FAILED)

    @contextmanager
    def at_each_forward(self, model: nn.Module) -> Iterator[None]:
        """Meet before each of the model's forwards: behind it are its own collectives."""
        if self._ranks.side is None:
            yield
            return

        def enter(_module: nn.Module, _inputs: Any) -> None:
            if not self.meet(_ENTERS):
                raise _LeftError

        # Before FSDP's own hooks: a forward that does not come must leave no trace in its states.
        hook: Any = torch.compiler.disable(enter)
        handle = model.register_forward_pre_hook(hook, prepend=True)
        try:
            yield
        finally:
            handle.remove()


def _number(value: object) -> float:
    """Return the loss as a number.

    Raises:
        RefusedError: it is none, or knows gradients.
    """
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise RefusedError("returned a loss with gradients: it enables them itself")
        placements = getattr(value, "placements", ())
        if value.numel() == 1 and all(p.is_replicate() for p in placements):
            to_local = getattr(value, "to_local", None)
            return float(value if to_local is None else to_local())
        raise RefusedError(
            f"returned a tensor of shape {tuple(value.shape)}; it must be one number"
        )
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise RefusedError(f"returned {name_type(value)}; it must be one number")
    return float(value)


# ------------------------------------------------------------------------------ pure functions


def _verdict(
    results: Sequence[_TaskResult], saved: BankedBatches, num_read: int, loss: float
) -> str:
    """Return what is wrong with a rehearsal, or nothing."""
    first, second = results[0], results[1]
    read = (first.loss + second.loss) / 2
    # By itself, a loss differs by what dropout draws, and by which of many batches were kept.
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


def _stands_still(results: Sequence[_TaskResult]) -> bool:
    """Return whether other batches gave the very same loss."""
    first, other = results[0].losses, results[2].losses
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(first, other, strict=False))


def _select_batches(everywhere: Sequence[Iterable[int]], onset: int) -> tuple[list[int], list[int]]:
    """Return the steps to be read: kept by all ranks, shortly before the onset and long before."""
    common = sorted(set(everywhere[0]).intersection(*everywhere[1:]))
    before = [s for s in common if onset - _FARTHEST_OF_FEW <= s <= onset - _NEAREST]
    near = [s for s in before if s >= onset - _FARTHEST]
    if len(near) < MIN_BATCHES:
        near = before[-MIN_BATCHES:]
    far = [max((s for s in common if s <= onset - age), default=-1) for age in _OLDER]
    return near, sorted({s for s in far if s >= 0 and s not in near})


def _means(
    everywhere: Sequence[Sequence[tuple[float, float]]],
) -> tuple[list[float], list[float]]:
    """Return, batch for batch, the means over ranks of the losses now and then."""
    count = len(everywhere)
    by_step = list(zip(*everywhere, strict=True))
    now = [sum(pair[0] for pair in pairs) / count for pairs in by_step]
    then = [sum(pair[1] for pair in pairs) / count for pairs in by_step]
    return now, then


def _reading(
    ask: Ask,
    near: list[int],
    far: list[int],
    now: list[float],
    then: list[float],
    bad_ranks: Sequence[int] = (),
) -> ProbeResult:
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
    """Return the median; NaN where one is no finite number."""
    return statistics.median(losses) if all(map(math.isfinite, losses)) else math.nan


def _nothing(detail: str) -> ProbeResult:
    return ProbeResult(num_batches=0, then=math.nan, now=math.nan, detail=detail)


# ----------------------------------------------------------- the loop's own evaluations


_FLOOR = 0.02
"""Part of the metric's first value that is added to both sides, as for the probe."""
_LARGEST = 1e9


class LossEvaluations:
    """Rank 0's validation losses; the ratio of the newest travels with the next step's numbers.

    Every name that is or ends in ``loss`` counts: of an accuracy more is better, and of what nobody
    named nothing is known.
    """

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self.ratio = 0.0
        """The largest since a step took it along; 0: there was none."""

    def add(self, values: Mapping[str, float]) -> None:
        """Take an evaluation in."""
        for name, value in values.items():
            if name.lower().rpartition("_")[2] == "loss" and isinstance(value, int | float):
                self.ratio = max(self.ratio, self._one(name, float(value)))

    def _one(self, name: str, value: float) -> float:
        """Return the ratio of one metric's value; 1 where there is nothing to compare with."""
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
