"""``mode="off"``: the same calls, without Vitals."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.guard.averages import emas_in
from trainer_hooks.guard.optimizers import unscale
from trainer_hooks.guard.schedules import SchedulerEvery, end_epoch_error, optimizer_of
from trainer_hooks.guard.step_interception import StepInterception
from trainer_hooks.outcome import StepOutcome
from trainer_hooks.probe.probe import LossOf
from trainer_hooks.tensors.clearing import GradientClearing
from trainer_hooks.tensors.optimizer_state import params_of
from trainvitals.auto_clip import DELAY, AutoClip, MaxNorm
from trainvitals.records import Severity


class NullMonitor:
    """Same methods as ``Monitor``; only clips, steps, schedules and clears the gradients."""

    run_id = ""
    attempt = 0
    batch_position = None
    should_stop = False

    def __init__(
        self,
        optimizers: tuple[Optimizer, ...],
        schedulers: tuple[Any, ...],
        scaler: torch.amp.GradScaler | None,
        state: Mapping[str, Any] | None = None,
        scheduler_every: SchedulerEvery = "step",
    ) -> None:
        self._optimizers = optimizers
        self._scheduler_every = scheduler_every
        self._ends_epochs = False
        self._emas = emas_in(state or {})
        self._schedulers = schedulers
        self._clearing = GradientClearing(optimizers)
        self._clipper = _Clipper()
        self._scaler = scaler
        self.step_index = 0
        self.swallowed_errors: dict[str, int] = {}
        self._state: dict[str, Any] = {}

    def batches(self, loader: Iterable[Any], *, epochs: int = 1, **_: object) -> Iterator[Any]:
        """Yield the loader's batches, epoch after epoch, unwatched."""
        first = self.step_index
        for epoch in range(epochs):
            set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            yield from loader
            if self._scheduler_every == "epoch" and self.step_index > first:
                self._ends_epochs = True
                self._step_schedulers()

    def end_epoch(self) -> None:
        """Step schedulers that count epochs; ``batches`` does it if it is used."""
        if self._scheduler_every == "step" and self._schedulers:
            raise end_epoch_error()
        if not self._ends_epochs:
            self._step_schedulers()

    def _step_schedulers(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Step the schedulers of these optimizers, or all of them; the monitor is off."""
        for scheduler in self._schedulers:
            if not optimizers or any(optimizer_of(scheduler) is o for o in optimizers):
                scheduler.step()

    def micro(self, loss: Tensor, weight: Tensor | float = 1.0) -> None:
        """Ignore a micro-batch's loss: the monitor is off."""

    def observe(self, **values: float) -> None:
        """Record no scalars: the monitor is off."""

    def observe_samples(self, prompts: object, completions: object, rewards: object) -> None:
        """Keep no completions: the monitor is off."""

    def evaluate(self, **values: float) -> None:
        """Record no validation metrics: the monitor is off."""

    def alert(
        self,
        name: str,
        *,
        when: Tensor | bool | None = None,
        level: Severity = "notify",
        value: Tensor | float | None = None,
        message: str = "",
    ) -> None:
        """Raise no custom alert: the monitor is off."""

    def restore_best(self) -> None:
        """Do nothing, because the monitor is off: no other state was saved."""

    def expect(self, reason: str, *, steps: int = 200) -> None:
        """Ignore an announced change: the monitor is off."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the body without announcing a phase: the monitor is off."""
        yield

    @contextmanager
    def count_flops(self) -> Iterator[None]:
        """Run the body without counting its FLOPs: the monitor is off."""
        yield

    def state_dict(self) -> dict[str, Any]:
        """Return the loaded state unchanged, so that a later watched run can continue from it."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state unchanged while the monitor is off."""
        self._state = dict(state)

    def step(
        self,
        loss: Tensor | float | None = None,
        *,
        weight: Tensor | float | None = None,
        max_norm: MaxNorm | None = None,
        optimizer: Optimizer | None = None,
    ) -> StepOutcome:
        """Clip, update, step the schedulers and clear the gradients; the monitor checks nothing."""
        scaler = self._scaler
        stepped = self._optimizers if optimizer is None else (optimizer,)
        if scaler is not None and scaler.is_enabled():
            unscale(scaler, stepped)
        if max_norm is not None:
            self._clipper.clip(stepped, max_norm)
        for one in stepped:
            if scaler is not None:
                scaler.step(one)
            else:
                one.step()
        self._clearing.clear()
        if scaler is not None:
            scaler.update()
        stepped_params = set(map(id, params_of(stepped)))
        for ema in self._emas:
            if ema.averages_any(stepped_params):
                ema.update()
        if self._scheduler_every == "step":
            self._step_schedulers(() if optimizer is None else stepped)
        self.step_index += 1
        return StepOutcome(step=self.step_index - 1, next_step=self.step_index)

    def close(self) -> None:
        """Leave the model as it was found; the monitor was off."""
        self._clearing.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Unattached(NullMonitor):
    """Same methods as ``Attached``; only clips, if ``attach`` was given ``max_norm``.

    A registered EMA is updated after the last optimizer's step.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        max_norm: MaxNorm | None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tuple(optimizers), (), scaler, state)
        self._clearing.release()  # this loop clears its own gradients
        self._hooks = [
            optimizer.register_step_post_hook(lambda *_, ema=ema: ema.update())
            for optimizer in optimizers[-1:]
            for ema in self._emas
        ]
        self._hooks += [o.register_step_post_hook(self._count) for o in optimizers[-1:]]
        self._max_norm = max_norm
        self._route: StepInterception | None = None
        if max_norm not in (None, math.inf):
            self._route = StepInterception(optimizers, scaler, self._step_one, FaultCounter())

    def _count(self, *_: object) -> None:
        """Count an update of ``attach``'s loop in mode off."""
        self.step_index += 1

    def _step_one(self, index: int, begins: bool) -> None:
        """Step one optimizer in mode off, after the clip of ``attach(max_norm=...)``."""
        scaler = self._scaler if self._scaler is not None and self._scaler.is_enabled() else None
        if begins:
            if scaler is not None:
                unscale(scaler, self._optimizers)
            assert self._max_norm is not None, "without a norm to clip to nothing is routed"
            self._clipper.clip(self._optimizers, self._max_norm)
        if scaler is not None:
            scaler.step(self._optimizers[index])
        else:
            self._optimizers[index].step()

    def loss(self, loss: Tensor | float, weight: Tensor | float | None = None) -> None:
        """Ignore the step's loss: ``attach`` guards nothing in mode off."""

    def grad_norm(self, norm: Tensor | float) -> None:
        """Ignore the loop's gradient norm: ``attach`` guards nothing in mode off."""

    def before_clip(self, max_norm: float | None = None) -> None:
        """Measure nothing before the clip: ``attach`` guards nothing in mode off."""

    def keep_batch(self, batch: Any, probe: LossOf) -> None:
        """Keep no batch for a probe: ``attach`` guards nothing in mode off."""

    def when_rolled_back(self, rewind: Callable[[int], None]) -> None:
        """Never call ``rewind``: ``attach`` rolls nothing back in mode off."""

    def close(self) -> None:
        """Restore ``optimizer.step`` after ``attach`` in mode off."""
        for hook in self._hooks:
            hook.remove()
        if self._route is not None:
            self._route.close()

    def __exit__(self, *error: object) -> None:
        self.close()


class _Clipper:
    """Clips as a watched loop does: to a number, or with ``max_norm="auto"``."""

    def __init__(self) -> None:
        self._auto: dict[tuple[int, ...], AutoClip] = {}
        """Norms by the set of optimizers stepped together."""
        self._unread: deque[tuple[AutoClip, int, Tensor]] = deque()
        self._step = 0

    def clip(self, optimizers: Sequence[Optimizer], max_norm: MaxNorm) -> None:
        """Clip the gradients of the optimizers as a watched loop would; the monitor is off."""
        params = params_of(optimizers)
        if max_norm != "auto":
            torch.nn.utils.clip_grad_norm_(params, max_norm)
            return
        auto = self._auto.setdefault(tuple(map(id, optimizers)), AutoClip())
        # Read a norm only when a limit needs it: reading it at once would wait for the device.
        while self._unread and self._unread[0][1] <= self._step - DELAY:
            clip, step, norm = self._unread.popleft()
            clip.add(step, norm.item())
        total = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        limit = auto.limit(self._step)
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(params, limit, total)
        self._unread.append((auto, self._step, total))
        self._step += 1
