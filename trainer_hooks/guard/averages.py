"""Averages of the weights that follow the verdict: a skipped step does not change them.

Each step updates ``EMA``; the loop updates torch's ``AveragedModel``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from trainer_hooks.guard.ema import EMA
from trainer_hooks.tensors.copying import wait_for_copies
from trainer_hooks.tensors.events import AsyncCopy
from trainer_hooks.tensors.optimizer_state import params_of, true_elements
from trainvitals.errors import UsageError


class GuardedAverages:
    """The registered averages: each follows the verdict of the step.

    During its update, an ``AveragedModel`` costs one more copy of the average and one pass over it;
    an ``EMA`` costs nothing.
    """

    def __init__(self, state: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
        self._emas = emas_in(state)
        self._names = self._names_by_optimizer(optimizers)
        self._updates = [
            _GuardedAverage(averaged, optimizers)
            for averaged in state.values()
            if isinstance(averaged, AveragedModel)
        ]
        for ema in self._emas:
            ema.watch()

    def _names_by_optimizer(self, optimizers: Sequence[Optimizer]) -> dict[int, list[list[str]]]:
        """Return the names of averaged parameters, by optimizer id and for each ``EMA``."""
        return {
            id(optimizer): [ema.names_of(params_of([optimizer])) for ema in self._emas]
            for optimizer in optimizers
        }

    def follow_groups(self, optimizers: Sequence[Optimizer]) -> None:
        """Guard the averages of parameters in groups that were added since."""
        self._names = self._names_by_optimizer(optimizers)
        for update in self._updates:
            update.follow_groups(optimizers)

    @property
    def is_swapped(self) -> bool:
        """Return whether averages currently replace the guarded weights."""
        return any(ema.is_swapped for ema in self._emas)

    def refuse_swapped(self) -> None:
        """Refuse a step while averages replace the weights."""
        for ema in self._emas:
            ema.refuse_swapped()

    def apply_verdict(self, bad: Tensor, optimizers: Sequence[Optimizer]) -> None:
        """Apply a step's verdict, 0.0 or 1.0 on the device; call before these optimizers move."""
        for update in self._updates:
            update.apply_verdict(bad, optimizers)
        for i, ema in enumerate(self._emas):
            if any(self._names[id(optimizer)][i] for optimizer in optimizers):
                ema.begin(bad)

    def average_after_step(self, optimizer: Optimizer) -> None:
        """Average in an optimizer's parameters; call directly after its step, even if skipped."""
        for ema, names in zip(self._emas, self._names[id(optimizer)], strict=True):
            if names:
                ema.follow(names)

    def reset_after_rollback(self, *, is_blocked: bool) -> None:
        """Forget what was pending: the averages have been restored.

        ``is_blocked``: updates by the loop are ignored until the next step; otherwise the restored
        average still lacks the loop's update of its step.
        """
        for update in self._updates:
            update.reset_after_rollback(is_blocked=is_blocked)
        for ema in self._emas:
            ema.forget()

    def release(self) -> None:
        """Restore the guarded averages to their original methods."""
        for update in self._updates:
            update.release()
        for ema in self._emas:
            ema.is_watched = False


def registered_averages(
    state: Mapping[str, Any], optimizers: Sequence[Optimizer]
) -> GuardedAverages | None:
    """Return the registered averages, which a skip must not change; None if there are none."""
    is_any = any(isinstance(value, EMA | AveragedModel) for value in state.values())
    return GuardedAverages(state, optimizers) if is_any else None


def refuse_averages(
    state: Mapping[str, Any], optimizers: Sequence[Optimizer], *, has_engine: bool
) -> None:
    """Refuse an ``EMA`` that later steps would not update, or would update twice."""
    for ema in emas_in(state):
        if has_engine:
            raise UsageError(
                "an EMA is registered, but a framework's engine makes the steps, so the average "
                "would not be updated",
                hint="remove it from state, and call ema.update() after each step of the engine",
            )
        ema.refuse_watch(params_of(optimizers))


def emas_in(state: Mapping[str, Any]) -> list[EMA]:
    """Return each registered ``EMA`` once, even if it has several names."""
    return [*{id(ema): ema for ema in state.values() if isinstance(ema, EMA)}.values()]


_ENGINE = 0
"""Key for the optimizers of a framework's engine, which are not accessible."""


class _GuardedAverage:
    """Replaces one average's ``update_parameters``."""

    def __init__(self, average: AveragedModel, optimizers: Sequence[Optimizer]) -> None:
        self._average = average
        self.follow_groups(optimizers)
        self._bad: dict[int, Tensor] = {}
        """Verdict of each optimizer's last step, the latest last."""
        self._late: AsyncCopy[tuple[Tensor, Tensor]] | None = None
        self._waits = False
        average.update_parameters = self  # type: ignore[method-assign]

    def follow_groups(self, optimizers: Sequence[Optimizer]) -> None:
        """Determine again which optimizer moves which parameters of the average."""
        self._held = {id(o): {*map(id, params_of([o]))} for o in optimizers} or {_ENGINE: set()}
        self._owners: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        """Copy and pickle as the original method of the average's copy."""
        return partial, (type(self._average).update_parameters, self._average)

    def __call__(self, model: nn.Module) -> None:
        """Average the model in, unless its last step was skipped; never waits."""
        plain = type(self._average).update_parameters
        verdict = self._verdict_of(model)
        wait_for_copies()
        if verdict is None:
            plain(self._average, model)
            return
        with torch.no_grad():
            tensors = (*self._average.parameters(), *self._average.buffers())
            live = [true_elements(tensor) for tensor in tensors]
            copies = [tensor.clone() for tensor in live]
            plain(self._average, model)
            for tensor, before in zip(live, copies, strict=True):
                if is_far_counter(tensor, verdict):
                    self._settle_later(tensor, before, verdict)
                else:
                    bad = verdict.to(tensor.device) != 0
                    tensor.copy_(torch.where(bad, before, tensor))

    def _verdict_of(self, model: nn.Module) -> Tensor | None:
        """Return the verdict of the latest step that moved the model; None before the first.

        If optimizers alternate, the last verdict may belong to another model.
        """
        if model not in self._owners:
            params = {id(param) for param in model.parameters()}
            owners = {one for one, held in self._held.items() if not held.isdisjoint(params)}
            self._owners[model] = owners or {*self._held}
        owners = self._owners[model]
        return next((bad for one, bad in reversed(self._bad.items()) if one in owners), None)

    def _settle_later(self, counter: Tensor, before: Tensor, bad: Tensor) -> None:
        """Correct ``n_averaged``, which torch keeps on the host, once the verdict has arrived."""
        if self._late is None:
            self._late = AsyncCopy(lag=1, size=1, device=bad.device)
        if not self._waits:  # a second update in one step has the same verdict
            self._late.push(bad.reshape(1), (counter, before))
            self._waits = True

    def apply_verdict(self, bad: Tensor, optimizers: Sequence[Optimizer]) -> None:
        """Correct the average's counter for the previous verdict, and store this one."""
        self._settle()
        for one in [*map(id, optimizers)] or [_ENGINE]:
            self._bad.pop(one, None)
            self._bad[one] = bad

    def reset_after_rollback(self, *, is_blocked: bool) -> None:
        """Discard pending corrections; block or allow the average's update by the loop."""
        if self._late is not None:
            self._late.pop()
            self._waits = False
        is_bad = float(is_blocked)
        self._bad = {one: torch.full_like(bad, is_bad) for one, bad in self._bad.items()}

    def _settle(self, patience_seconds: float | None = None) -> None:
        """Restore an average's update counter if the previous step was skipped."""
        if self._late is None:
            return
        ready, self._waits = self._late.pop(patience_seconds=patience_seconds), False
        if ready is not None and ready[0][0]:
            counter, before = ready[1]
            counter.copy_(before)

    def release(self) -> None:
        """Restore the average's own method."""
        self._settle(patience_seconds=2.0)
        vars(self._average).pop("update_parameters", None)


def is_far_counter(tensor: Tensor, bad: Tensor) -> bool:
    """Return whether an average's counter is on the host and the verdict elsewhere.

    Reading the verdict would wait for the device.
    """
    return tensor.dim() == 0 and tensor.device != bad.device
