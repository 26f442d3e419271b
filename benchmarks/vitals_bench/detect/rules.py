"""Published rules of others, reimplemented from their descriptions, with default settings.

Each rule judges a log that is not affected by it: a skip, an exception or a clip of the rule is an
alarm here. If a rule would end the run, the log continues anyway. The revisions that were read are
of June 2026 or older.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from vitals_bench.detect.series import Number, Rule


class NonFinite:
    """Only looks for NaN and infinities: the check that every framework has."""

    def update(self, step: int, loss: Number, norm: Number, rate: Number) -> str | None:
        """Say ``nonfinite`` where the loss or the norm is."""
        is_fine = (loss is None or math.isfinite(loss)) and (norm is None or math.isfinite(norm))
        return None if is_fine else "nonfinite"


class TimesMean:
    """The tutorials' rule: a loss above so many times the mean of the last 100."""

    def __init__(self, factor: float, *, window: int = 100, least: int = 10) -> None:
        self._factor, self._least = factor, least
        self._losses: deque[float] = deque(maxlen=window)

    def update(self, step: int, loss: Number, norm: Number, rate: Number) -> str | None:
        """Compare the loss, then take it in, whatever it is."""
        if loss is None:
            return None
        losses = self._losses
        is_spike = len(losses) >= self._least and loss > self._factor * sum(losses) / len(losses)
        losses.append(loss)
        return "spike" if is_spike else None


class NormAbove:
    """The tutorials' other rule: a gradient norm above a constant."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def update(self, step: int, loss: Number, norm: Number, rate: Number) -> str | None:
        """Compare the norm; a NaN is above nothing."""
        return "grad_explosion" if norm is not None and norm > self._limit else None


class _Ring:
    """The last values, and whether the next one is usual among them."""

    def __init__(self, size: int) -> None:
        self._values = np.zeros(size)
        self._size, self._at = 0, 0

    def __len__(self) -> int:
        return self._size

    def push(self, value: float) -> None:
        self._values[self._at] = value
        self._at = (self._at + 1) % len(self._values)
        self._size = min(self._size + 1, len(self._values))

    def is_within(self, value: float, sigmas: float) -> bool:
        """Compare as tensors do: a NaN in the window makes it False."""
        values = self._values[: self._size]
        with np.errstate(all="ignore"):
            mean = values.mean()
            deviations = values - mean
            deviation = math.sqrt(float(deviations @ deviations) / (self._size - 1))
            return bool(value - mean <= sigmas * deviation)


class OlmoCore:
    """OLMo-core's SkipStepOptimizer: 6 standard deviations above the mean of the last 128.

    Source: ``src/olmo_core/optim/skip_step_optimizer.py``. From the 64th record on. What was
    skipped enters the window like the rest; a NaN in it makes every comparison false, and a false
    one skips.
    """

    def __init__(self, *, window: int = 128, sigmas: float = 6.0) -> None:
        self._losses, self._norms = _Ring(window), _Ring(window)
        self._unguarded, self._sigmas, self._seen = max(2, window // 2), sigmas, 0

    def update(self, step: int, loss: Number, norm: Number, rate: Number) -> str | None:
        """Say which of the two is unusual, the loss first."""
        if loss is None:
            return None
        self._seen += 1
        kind = None
        if self._seen >= self._unguarded:
            if not self._losses.is_within(loss, self._sigmas):
                kind = "spike"
            elif norm is not None and len(self._norms) > 1:
                kind = None if self._norms.is_within(norm, self._sigmas) else "grad_explosion"
        self._losses.push(loss)
        if norm is not None:
            self._norms.push(norm)
        return kind


class _RunningScore:
    """The z-score of a value within the window that it just entered, from running sums."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque()
        self._size, self._sum, self._squares = size, 0.0, 0.0

    def update(self, value: float) -> float:
        is_full = len(self._values) == self._size
        if is_full:
            oldest = self._values.popleft()
            self._sum -= oldest
            self._squares -= oldest * oldest
        self._values.append(value)
        self._sum += value
        self._squares += value * value
        if not is_full:
            return math.nan
        mean = self._sum / self._size
        variance = self._squares / self._size - mean * mean
        if variance == 0.0:
            return 0.0
        return (value - mean) / math.sqrt(variance) if variance > 0.0 else math.nan


class LlmC:
    """llm.c's OutlierDetector: the z-score within the last 128, of the loss and of the norm.

    Source: ``llmc/outlier_detector.h`` and the options -sl and -sg of ``train_gpt2.cu``. Both are
    0, that is off, by default; 3 and 6 are the values of its scripts and users. A non-finite score
    skips nothing, and one NaN stays in the running sums forever.
    """

    def __init__(self, limit: float, *, window: int = 128) -> None:
        self._limit = limit
        self._loss, self._norm = _RunningScore(window), _RunningScore(window)

    def update(self, step: int, loss: Number, norm: Number, rate: Number) -> str | None:
        """Score both, and compare the loss first."""
        of_loss = math.nan if loss is None else self._loss.update(loss)
        of_norm = math.nan if norm is None else self._norm.update(norm)
        if math.isfinite(of_loss) and of_loss > self._limit:
            return "spike"
        if math.isfinite(of_norm) and of_norm > self._limit:
            return "grad_explosion"
        return None


class Lightning:
    """Lightning Fabric's SpikeDetection: 3 times the mean of the last 10 that were no spikes.

    Source: ``lightning/fabric/utilities/spike.py``, 2.6. ``rtol`` 2 is a distance from the mean of
    twice the mean. A loss that is not above the last one is never a spike; despite what its help
    says, ``finite_only`` is what makes a non-finite loss one.
    """

    def __init__(self, *, window: int = 10, warm_up: int = 1, rtol: float = 2.0) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._warm_up, self._rtol, self._seen, self._last = warm_up, rtol, 0, 0.0

    def update(self, step: int, loss: Number, norm: Number, rate: Number) -> str | None:
        """Say what it would raise for."""
        if loss is None:
            return None
        self._seen += 1
        if self._seen > self._warm_up and self._is_spike(loss):
            return "spike" if math.isfinite(loss) else "nonfinite"
        self._losses.append(loss)
        self._last = loss
        return None

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if loss - self._last <= 0.0 or not self._losses:
            return False
        mean = sum(self._losses) / len(self._losses)
        return abs(loss - mean) >= abs(self._rtol * mean)


class LlmFoundry:
    """llm-foundry's KillLossSpike: more than four in a row of twice the mean, or half above a cap.

    Source: ``llmfoundry/callbacks/kill_loss_spike_callback.py``. The window is 100 here, its
    minimum; in a run whose length it knows it takes a 20th of that. The cap is the largest loss of
    the first window, and at most 10. A NaN is at least nothing: it resets the count, and as long as
    it is in the window the mean is NaN and nothing is an outlier.
    """

    def __init__(self, *, factor: float = 2.0, window: int = 100, patience: int = 4) -> None:
        self._factor, self._patience = factor, patience
        self._losses: deque[float] = deque(maxlen=window)
        self._cap: float | None = None
        self._in_a_row, self._seen = 0, 0

    def update(self, step: int, loss: Number, norm: Number, rate: Number) -> str | None:
        """Say ``spike`` for the persistent outliers and ``divergence`` for the high losses."""
        if loss is None:
            return None
        self._seen += 1
        size = self._losses.maxlen or 0
        kind = self._judge(loss, size) if len(self._losses) == size else None
        self._losses.append(loss)
        return kind

    def _judge(self, loss: float, size: int) -> str | None:
        if self._cap is None:
            self._cap = min(max(self._losses), 10.0)
        if loss >= sum(self._losses) / size * self._factor:
            self._in_a_row += 1
            if self._in_a_row > self._patience:
                return "spike"
        else:
            self._in_a_row = 0
        cap = self._cap
        is_high = self._seen >= 2 * size and sum(x > cap for x in self._losses) >= size / 2
        return "divergence" if is_high else None


class Megatron:
    """Megatron-LM's spiky loss check, with its checks for NaN and infinities.

    Source: ``is_unexpectedly_large`` in ``megatron/core/rerun_state_machine.py``, with the largest
    of the first 100 values, which it never updates, and ``--check-for-nan-in-loss-and-grad``.
    """

    def __init__(self, *, factor: float = 10.0, samples: int = 100) -> None:
        self._factor, self._samples = factor, samples
        self._seen, self._largest = 0, 0.0

    def update(self, step: int, loss: Number, norm: Number, rate: Number) -> str | None:
        """Sample first, compare later."""
        values = [value for value in (loss, norm) if value is not None]
        if not all(map(math.isfinite, values)):
            return "nonfinite"
        if loss is None:
            return None
        if self._seen < self._samples:
            self._seen += 1
            self._largest = max(self._largest, abs(loss))
            return None
        return "spike" if abs(loss) >= self._largest * self._factor else None


class FlagScale:
    """FlagScale's SpikyLossDetector: 20% above the last loss that was no spike.

    Source: ``--auto-skip-spiky-loss`` and ``--spiky-loss-threshold``. A NaN is taken for the last
    loss and said nothing about; after an infinite one everything is a spike.
    """

    def __init__(self, *, threshold: float = 0.2) -> None:
        self._threshold = threshold
        self._last: float | None = None

    def update(self, step: int, loss: Number, norm: Number, rate: Number) -> str | None:
        """Compare with the last loss that passed."""
        if loss is None:
            return None
        last = self._last
        if last is not None and not (math.isnan(loss) or math.isnan(last)):
            if math.isinf(loss) or math.isinf(last):
                return "spike"
            rise = loss - last
            if rise / last >= self._threshold if last else rise > 0.0:
                return "spike"
        self._last = loss
        return None


class ZClip:
    """ZClip: a norm whose z-score within exponential averages is above 2.5 is clipped.

    Source: arXiv 2504.02507 and ``zclip/zclip.py``: smoothing 0.97, 25 records of warm-up, and a
    clipped norm enters the averages with its clipped value. One NaN stays in them forever.
    """

    def __init__(self, *, alpha: float = 0.97, limit: float = 2.5, warm_up: int = 25) -> None:
        self._alpha, self._limit, self._warm_up = alpha, limit, warm_up
        self._first: list[float] = []
        self._mean, self._variance = math.nan, math.nan

    def update(self, step: int, loss: Number, norm: Number, rate: Number) -> str | None:
        """Say ``grad_explosion`` for a norm that is clipped for being an outlier."""
        if norm is None:
            return None
        if len(self._first) < self._warm_up:
            self._first.append(norm)
            if len(self._first) == self._warm_up:
                self._mean = sum(self._first) / self._warm_up
                distances = [value - self._mean for value in self._first]
                self._variance = sum(value * value for value in distances) / self._warm_up
            return None
        deviation = math.sqrt(self._variance)
        score = (norm - self._mean) / (deviation + 1e-6)
        is_outlier = score > self._limit
        if is_outlier:
            norm = self._mean + self._limit * deviation / (score / self._limit)
        self._mean = self._alpha * self._mean + (1.0 - self._alpha) * norm
        distance = norm - self._mean
        self._variance = self._alpha * self._variance + (1.0 - self._alpha) * distance * distance
        return "grad_explosion" if is_outlier else None


class FirstOf:
    """Several rules at once: what the first of them says."""

    def __init__(self, *rules: Rule) -> None:
        self._rules = rules

    def update(self, step: int, loss: Number, norm: Number, rate: Number) -> str | None:
        """Ask all of them, as each has its memory."""
        kinds = [rule.update(step, loss, norm, rate) for rule in self._rules]
        return next((kind for kind in kinds if kind is not None), None)


class Peer(NamedTuple):
    """A rule with its names."""

    name: str
    short: str
    make: Callable[[], Rule]
    about: str
    """What it compares, at its defaults, and where it is published."""


_TUTORIALS = "as in tutorials and notebooks"
_PEERS = (
    Peer(
        "OLMo-core, 6 sigma of 128", "OLMo", OlmoCore,
        "skips where loss or norm is above the mean of the last 128 by 6 standard deviations; "
        "SkipStepOptimizer",
    ),
    Peer(
        "llm.c, z > 6", "llm.c 6", lambda: LlmC(6.0),
        "skips where the z-score of loss or norm within the last 128 is above 6; -sl 6 -sg 6",
    ),
    Peer("llm.c, z > 3", "llm.c 3", lambda: LlmC(3.0), "the same with 3; -sl 3 -sg 3"),
    Peer(
        "Lightning SpikeDetection", "Lightning", Lightning,
        "raises where the loss is 3 times the mean of the last 10 that were no spikes, or not "
        "finite",
    ),
    Peer(
        "llm-foundry KillLossSpike", "foundry", LlmFoundry,
        "raises at the fifth loss in a row of twice the mean of the last 100, and where half of "
        "them are above the largest of the first 100",
    ),
    Peer(
        "Megatron-LM, 10x and NaN check", "Megatron", Megatron,
        "reruns or raises where the loss is 10 times the largest of the first 100, or not finite; "
        "is_unexpectedly_large, --check-for-nan-in-loss-and-grad",
    ),
    Peer(
        "FlagScale, +20 %", "FlagScale", FlagScale,
        "skips where the loss is 20 % above the last that passed; --auto-skip-spiky-loss",
    ),
    Peer(
        "ZClip, z > 2.5", "ZClip", ZClip,
        "clips where the z-score of the norm within averages of 0.97 is above 2.5; arXiv "
        "2504.02507",
    ),
    Peer("loss > 2x mean of 100", "2x", lambda: TimesMean(2.0), _TUTORIALS),
    Peer("loss > 3x mean of 100", "3x", lambda: TimesMean(3.0), _TUTORIALS),
    Peer("loss > 5x mean of 100", "5x", lambda: TimesMean(5.0), _TUTORIALS),
    Peer("loss > 10x mean of 100", "10x", lambda: TimesMean(10.0), _TUTORIALS),
    Peer("grad norm > 100", "norm 100", lambda: NormAbove(100.0), _TUTORIALS),
    Peer("isfinite only", "isfinite", NonFinite, "the check that every framework has"),
    Peer(
        "isfinite, loss > 3x or norm > 100",
        "all three",
        lambda: FirstOf(NonFinite(), TimesMean(3.0), NormAbove(100.0)),
        _TUTORIALS,
    ),
)  # fmt: skip
PEERS: Mapping[str, Peer] = {peer.short: peer for peer in _PEERS}
"""Every rule, by its short name."""
