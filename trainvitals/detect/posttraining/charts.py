"""Quantities of a post-training run in the order in which people read them, by recorded metric."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from trainvitals.detect.posttraining import names
from trainvitals.detect.posttraining.names import NAMES, TASKS, plain_name

_SERIES = "scalars."
_LENGTH = "length"
_LENGTHS = (
    _LENGTH,
    "completions/mean_length",
    "response_length/mean",
    "rollout/response_length_mean",
    "response_lengths",
    "mean_gen_tokens_per_sample",
)
"""Mean length of a completion: own loops, TRL, verl, OpenRLHF, torchtune, NeMo-RL. No detector
reads it."""
_OF_SAMPLING = (
    ("Reward", (names.REWARD, names.HELD_OUT_REWARD)),
    ("KL divergence", (names.KL, names.KL_OF_SEQUENCE)),
    ("Entropy", (names.ENTROPY,)),
    ("Length", (_LENGTH,)),
    ("Clip ratio", (names.CLIP_SHARE,)),
    ("Cut completions", (names.CUT_SHARE,)),
    ("Equal rewards", (names.DEAD_SHARE,)),
)
_OF_PAIRS = (
    ("Log-probability", (names.CHOSEN, names.REJECTED)),
    ("Reward of the chosen", (names.CHOSEN_REWARD,)),
    ("Accuracy", (names.ACCURACY,)),
)


class QuantityChart(NamedTuple):
    """One chart of a post-training run: the metrics of one quantity, or of two to compare."""

    title: str
    lines: tuple[tuple[str, str], ...]
    """Name and metric of each line."""

    @property
    def metric(self) -> str:
        """Metric of the chart's first line, whose latest value pages show as a number."""
        return self.lines[0][1]


def quantity_charts(task: str, metrics: Collection[str]) -> tuple[QuantityChart, ...]:
    """Return the charts of a post-training run in reading order; none for any other run.

    Args:
        task: kind of the run; empty: any other run.
        metrics: recorded metrics, such as ``scalars.train/reward``.
    """
    if (spec := TASKS.get(task)) is None:
        return ()
    order = _OF_SAMPLING if spec.samples else _OF_PAIRS if spec.compares else ()
    recorded = _metrics_of_quantities(metrics) if order else {}
    charts = []
    for title, quantities in order:
        lines = tuple(recorded[name] for name in quantities if name in recorded)
        if lines:
            charts.append(QuantityChart(title, lines))
    return tuple(charts)


def _metrics_of_quantities(metrics: Collection[str]) -> Mapping[str, tuple[str, str]]:
    """Return name and metric of each quantity to chart; as for detectors, the first name counts.

    A scalar that has to be converted to its quantity would be drawn under a wrong title.
    """
    by_name = {
        plain_name(metric.removeprefix(_SERIES)): metric
        for metric in metrics
        if metric.startswith(_SERIES)
    }
    quantities = {
        name: reading.quantity for name, reading in NAMES.items() if not reading.is_converted
    }
    quantities |= dict.fromkeys(_LENGTHS, _LENGTH)
    recorded: dict[str, tuple[str, str]] = {}
    for name, quantity in quantities.items():
        if name in by_name:
            recorded.setdefault(quantity, (name, by_name[name]))
    return recorded
