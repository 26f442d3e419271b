"""Weight norms compared with what the optimizer can have changed: finds writes by something else.

An update of Adam moves each weight by at most the learning rate times a constant of its betas, by
the Cauchy-Schwarz inequality, so it changes the norm of a parameter with n elements by at most
sqrt(n) times that. Scaled weights and flipped bits of an exponent change it by more. Zeroed weights
lose a norm, and layers that grow in each step gain one, faster than many updates move weights
unless all of them agree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from trainer_hooks.tensors.events import AsyncCopy, copy_to
from trainer_hooks.tensors.gradients import GradNorms, by_kind, layer_of

_COST = 0.004
"""Share of a step's time that a reading may take; steps between two readings follow from it."""
_WITH_COMPARISON = 1.2
"""Time of reading and comparing the norms, relative to reading them."""
_MOST_STEPS = 50
"""Maximum number of steps between two readings, and between those that show slow changes."""
_SUDDEN, _SLOW = 0.1, 0.5
"""Relative change of a norm that is reported: between two readings, and within ``_MOST_STEPS``."""
_GROWS = 1.3
"""Growth in the window before, which a slow change also has: gradients that begin have none."""
_COHERENT = 1.5
"""Multiple of the learning rate by which updates move weights in the mean of many steps: the root
mean square of an update divided by it is about 1 if all gradients agree, and less otherwise. Only
gradients that begin after many steps without any move weights faster, and let norms grow."""
_ALONG = 0.5
"""Multiple of the learning rate that updates move weights along themselves at most, in the median
layer: if that changed more, the loop replaced the state."""
_BYTES_PER_SECOND = 1e12
"""Memory that a GPU reads in a second, about: the host does not see the time of a reading there."""
_CLEAR = 1.5
"""Multiple of the largest earlier change of gradients between two steps that dates a write."""
_DATED = 3
"""Steps of which the middle one is a date that is wrong by at most one step."""
DATED_STEPS = 100
"""Steps whose gradients date a write: those between two readings, and earlier ones."""
_MOST_PARAMETERS = 10_000
_MIN_LAYERS = 3
"""With fewer layers, there are not enough others that show that only one was written to."""
_MAX_SMALL = 8192
"""Elements up to which numpy is faster than torch."""
_DOT_TYPES = (torch.float32, torch.float64)
"""Types whose squares are summed on the host without a copy in another type."""

Floats = NDArray[np.float64]


class WeightNorms(NamedTuple):
    """Squared norms of the weights before the update of a step, and the limits of their updates."""

    step: int
    squares: Floats
    rates: Floats
    """Sum of the learning rates of all earlier updates, by parameter group."""
    decays: Floats
    """Sum of the shares of the weights that decay has removed, by parameter group."""
    factors: Floats
    """By how many learning rates an update moves a weight at most, by parameter group."""


class WeightWrite(NamedTuple):
    """A layer whose weights something else than the optimizer has changed."""

    layer: str
    first_step: int
    """First step that may have used the changed weights."""
    last_step: int
    """Step before whose update the change was read."""
    before: float
    """Norm of the parameter that changed most."""
    now: float
    most: float
    """Change of this norm that updates can explain."""


class WeightCheck:
    """Reads the norms of weights, as often as is cheap, and compares each with the one before.

    Call ``read`` before a step's gradients are measured, unless ``counts`` has, and ``find_writes``
    once the step's numbers have reached the host. Only for torch's Adam and AdamW, on replicated
    parameters.
    """

    def __init__(
        self,
        norms: GradNorms,
        optimizers: Sequence[Optimizer],
        *,
        excluded: Collection[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.norms, self._clock = norms, clock
        self._optimizers = tuple(optimizers)
        self._names: list[str] = []
        self._params: list[Tensor] = []
        names = {id(p): name for name, p in zip(norms.local_names, norms.params, strict=True)}
        group_of: list[int] = []
        for number, (optimizer, group) in enumerate(self._groups()):
            for param in group["params"] if _update_bound(optimizer, group) < math.inf else ():
                name = names.get(id(param))
                if name and id(param) not in excluded and _is_readable(param):
                    self._names.append(name)
                    self._params.append(param)
                    group_of.append(number)
        self._group_of = np.array(group_of, dtype=np.intp)
        self._spread = np.sqrt([param.numel() for param in self._params])
        self._layers = [layer_of(name) for name in self._names]
        self.is_possible = (
            norms.replicated
            and len(self._names) <= _MOST_PARAMETERS
            and len(set(self._layers)) >= _MIN_LAYERS
        )
        self._reader = _SquareReader(self._params, norms.device)
        self._last_step = 0
        self._last_time = -math.inf
        self._step_seconds = self._cost_seconds = math.inf
        """Shortest recent times: those in which nothing else interfered."""
        self.forget()

    def forget(self) -> None:
        """Discard all readings: the weights were replaced, or a learning rate is unknown."""
        self._rates = [0.0 for _ in self._groups()]
        self._decays = [0.0 for _ in self._groups()]
        self._latest: Sequence[float | None] = ()
        self._num_latest = 0
        """Steps with the latest rates that are not added to the sums yet."""
        self._pending: WeightNorms | None = None
        self._before: WeightNorms | None = None
        self._earlier: list[WeightNorms] = []
        """Two readings that are ``_MOST_STEPS`` apart: they show slow changes."""
        self._next_step = 0
        self._reader.discard()

    def counts(self, step: int, rates: Sequence[float | None]) -> bool:
        """Return whether a step was only counted: nothing is due, and its rates are the latest."""
        if step >= self._next_step or rates != self._latest:
            return False
        self._num_latest += 1
        return True

    def read(self, step: int, rates: Sequence[float | None]) -> None:
        """Start to read the norms before the update of a step, if that is due.

        Args:
            step: the step.
            rates: learning rates that its update will use, by parameter group.
        """
        if rates != self._latest:
            self._add_rates()
            self._latest = [*rates]
        if None in rates:
            self.forget()
            self._latest, self._next_step = [*rates], step + _MOST_STEPS
            return
        if step >= self._next_step and self._pending is None:
            self._add_rates()
            self._start_reading(step)
        self._num_latest += 1

    def _add_rates(self) -> None:
        """Add the rates of the latest steps to their sums."""
        num, self._num_latest = self._num_latest, 0
        groups = self._groups() if num else []
        for number, ((_, group), rate) in enumerate(zip(groups, self._latest, strict=False)):
            self._rates[number] += num * abs(rate or 0.0)
            self._decays[number] += num * abs(rate or 0.0) * float(group.get("weight_decay", 0.0))

    def _start_reading(self, step: int) -> None:
        """Start to read the norms, and choose the step of the next reading."""
        now = self._clock()
        if step > self._last_step:
            seconds = (now - self._last_time) / (step - self._last_step)
            self._step_seconds = min(1.1 * self._step_seconds, seconds)
        self._last_step, self._last_time = step, now
        self._reader.start()
        sums = np.array(self._rates), np.array(self._decays)
        factors = np.array([_update_bound(optimizer, group) for optimizer, group in self._groups()])
        self._pending = WeightNorms(step, np.empty(0), *sums, factors)
        cost = self._clock() - now + self._reader.num_bytes / _BYTES_PER_SECOND
        self._cost_seconds = min(1.1 * self._cost_seconds, cost)
        share = _WITH_COMPARISON * self._cost_seconds / max(self._step_seconds, 1e-9)
        self._next_step = step + max(1, min(_MOST_STEPS, math.ceil(share / _COST)))

    def read_soon(self) -> None:
        """Read the norms in the next step, whatever it costs: something else was found."""
        self._next_step = 0

    @property
    def is_reading(self) -> bool:
        """Return whether norms were read that were not compared yet."""
        return self._pending is not None

    def find_writes(self, step: int) -> list[WeightWrite]:
        """Return the layers written to between the last two readings, once they have come.

        Args:
            step: the step whose numbers have reached the host.
        """
        if self._pending is None or step < self._pending.step:
            return []
        pending, self._pending = self._pending, None
        values = self._reader.result()
        if values is None:
            return []
        now, before = pending._replace(squares=values), self._before
        self._before = now
        if before is None:
            self._earlier = [now]
            return []
        writes = self._compare(before, now, _SUDDEN)
        if writes:
            self._earlier = [now]
            return writes
        if now.step - self._earlier[-1].step >= _MOST_STEPS:
            writes = self._find_slow_writes(now)
            self._earlier = [self._earlier[-1], now]
        return writes

    def _find_slow_writes(self, now: WeightNorms) -> list[WeightWrite]:
        """Return the layers that grew or shrank fast in the last two windows."""
        if len(self._earlier) < 2:
            return []
        first, middle = self._earlier
        with np.errstate(all="ignore"):
            before = np.sqrt(middle.squares / first.squares)
            latest = np.sqrt(now.squares / middle.squares)
            is_same = (before >= _GROWS) & (latest >= _GROWS)
            is_same |= (before <= 1.0 / _GROWS) & (latest <= 1.0 / _GROWS)
        if not is_same.any():
            return []
        layers = {self._layers[i] for i in np.flatnonzero(is_same)}
        return [w for w in self._compare(middle, now, _SLOW) if w.layer in layers]

    def _compare(self, before: WeightNorms, now: WeightNorms, least: float) -> list[WeightWrite]:
        """Return the layers whose norms changed by more than updates explain.

        Args:
            before: the norms to compare with.
            now: the later ones.
            least: relative change that is never reported; it is added to that of the updates.
        """
        left, a, b = (1.0 - least) ** 2, before.squares, now.squares
        if not ((b < left * a) | (a < left * b)).any():
            return []
        num_updates = max(now.step - before.step, 1)
        with np.errstate(invalid="ignore", divide="ignore"):  # norms may be infinite or 0
            norm_before, norm_now = np.sqrt(a), np.sqrt(b)
            larger = np.maximum(norm_before, norm_now)
            factors = np.maximum(before.factors, now.factors)
            usual = np.minimum(factors, factors / num_updates + _COHERENT)
            # Only coherent gradients that begin move weights as far as `factors`: norms grow.
            factors = np.where(b < a, usual[self._group_of], factors[self._group_of])
            factors = usual[self._group_of] if least == _SLOW else factors
            rates = self._spread * (now.rates - before.rates)[self._group_of]
            most = factors * rates
            most += norm_before * (now.decays - before.decays)[self._group_of]
            change = np.abs(norm_now - norm_before)
            share = np.where(np.isinf(change), 1.0, change / larger)
            written = np.flatnonzero((change > most + least * larger) | np.isinf(change))
        layers: dict[str, int] = {}
        for i in written[np.argsort(-share[written], kind="stable")]:
            layers.setdefault(self._layers[i], int(i))
        others = np.array([layer not in layers for layer in self._layers])
        is_replaced = np.median((change > _ALONG * rates)[others]) > 0.5 if others.any() else True
        if not layers or is_replaced or len(layers) > max(1, len(set(self._layers)) // 4):
            return []
        steps = before.step + 1, now.step
        numbers = np.stack([norm_before, norm_now, most], axis=1)
        return [WeightWrite(layer, *steps, *numbers[i].tolist()) for layer, i in layers.items()]

    def _groups(self) -> list[tuple[Optimizer, Mapping[str, Any]]]:
        """Return the parameter groups as they are now: a loaded state replaces them."""
        return [
            (optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups
        ]


def date_write(
    write: WeightWrite, squares: Mapping[int, Sequence[float]], onsets: Iterable[int] = ()
) -> int:
    """Return the first step that used the changed weights, if it is known; else the first possible.

    It is known within one step if at most ``_DATED`` steps are possible, if the gradients of one of
    them differ from those of the step before more than ever, or if another problem began then.

    Args:
        write: the change.
        squares: squared norms of the gradients of recent steps, by step.
        onsets: first steps of other problems.
    """
    possible = range(write.first_step, write.last_step + 1)
    jumps = {
        step: _jump(squares[step - 1], squares[step]) for step in squares if step - 1 in squares
    }
    usual = [jump for step, jump in jumps.items() if step < write.first_step and jump < math.inf]
    largest = max(possible, key=lambda step: jumps.get(step, -1.0))
    if usual and jumps.get(largest, -1.0) > _CLEAR * max(usual):
        return largest
    if begun := [step for step in onsets if step in possible]:
        return min(begun)
    if len(possible) <= _DATED:
        return write.last_step - len(possible) // 2
    return write.first_step


def _jump(before: Sequence[float], now: Sequence[float]) -> float:
    """Return the median change of the logarithms of squared norms; inf if one turned non-finite."""
    with np.errstate(all="ignore"):
        a, b = np.array(before), np.array(now)
        if np.isfinite(a).all() != np.isfinite(b).all():
            return math.inf
        logs = np.abs(np.log(b) - np.log(a))
    logs = logs[np.isfinite(logs)]  # a parameter without gradients has none
    return float(np.median(logs)) if len(logs) else 0.0


def _update_bound(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Return by how many learning rates an update moves a weight at most; inf if unknown.

    With first moment m and second moment v, |m| <= (1-b1) / sqrt((1-b2) (1 - b1^2/b2)) sqrt(v);
    the corrections of the bias make it smaller. Coupled weight decay is in the gradient.
    """
    if type(optimizer) not in (Adam, AdamW):
        return math.inf
    first, second = map(float, group["betas"])
    if not first**2 < second < 1.0:
        return math.inf
    return (1.0 - first) / math.sqrt((1.0 - second) * (1.0 - first**2 / second))


class _SquareReader:
    """Computes squared norms of parameters: at once on the host, without waiting on a GPU."""

    def __init__(self, params: Sequence[Tensor], device: torch.device) -> None:
        self._params, self._device = params, device
        self._is_on_host = all(p.device.type == "cpu" for p in params) and device.type == "cpu"
        is_hidden = not self._is_on_host
        self.num_bytes = sum(p.numel() * p.element_size() for p in params) if is_hidden else 0
        """Bytes that a GPU reads while the host continues."""
        self._addresses: list[int] = []
        self._views: list[Any] = []
        self._squares: Floats | None = None
        self._copies: AsyncCopy[None] | None = None

    def discard(self) -> None:
        """Discard norms that were not returned yet."""
        self._squares = self._copies = None

    def start(self) -> None:
        """Start to compute the norms."""
        if self._is_on_host:
            self._squares = self._squares_on_host()
        else:
            self._start_copy()

    @torch.no_grad()
    def _start_copy(self) -> None:
        """Start to compute the norms on a device."""
        squares: list[Tensor] = [torch.empty(0)] * len(self._params)
        for positions in by_kind(self._params):
            group = [self._params[i].detach() for i in positions]
            of_group = torch.stack(torch._foreach_norm(group, 2.0, dtype=torch.float64))
            parts = copy_to(of_group.square_(), self._device).unbind()
            for i, part in zip(positions, parts, strict=True):
                squares[i] = part
        if self._copies is None:
            self._copies = AsyncCopy(lag=1, size=len(squares), device=self._device)
        self._copies.push(torch.stack(squares), None)

    def result(self) -> Floats | None:
        """Return the squared norms, float64 of shape (parameters,); waits for their copy only."""
        if self._is_on_host:
            return self._squares
        copied = self._copies.pop() if self._copies is not None else None
        return None if copied is None else np.array(copied[0])

    def _squares_on_host(self) -> Floats:
        """Return the squared norms of parameters on the host."""
        addresses = [param.data_ptr() for param in self._params]
        if addresses != self._addresses:
            self._addresses, self._views = addresses, [_flat_view(p) for p in self._params]
        with np.errstate(over="ignore"):  # a flipped exponent overflows
            return np.array([view.dot(view) for view in self._views], dtype=np.float64)


def _is_readable(param: Tensor) -> bool:
    """Return whether a matrix's norm can be computed without a copy or a collective.

    Vectors are not read: they would double the time, and hold few of the weights.
    """
    if param.dim() < 2 or type(param.data) is not Tensor or not param.is_floating_point():
        return False
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    is_dense = any(
        param.is_contiguous(memory_format=each)
        for each, dim in zip(formats, (param.dim(), 4, 5), strict=True)
        if dim == param.dim()
    )
    return is_dense and (param.device.type != "cpu" or param.dtype in _DOT_TYPES)


def _flat_view(param: Tensor) -> Tensor | NDArray[Any]:
    """Return the elements of a parameter on the host, in any order, in the same memory."""
    flat = param.detach().as_strided((param.numel(),), (1,))
    return flat.numpy() if flat.numel() <= _MAX_SMALL else flat


__all__ = ["DATED_STEPS", "WeightCheck", "WeightNorms", "WeightWrite", "date_write"]
