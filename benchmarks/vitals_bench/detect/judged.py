"""All rules over the same logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vitals_bench.detect.ours import Verdicts, judge
from vitals_bench.detect.rules import PEERS
from vitals_bench.detect.scoring import SeriesScore, Total, score
from vitals_bench.detect.series import Alarm, Series, alarms_of

TELL, ACT = "Vitals, tell", "Vitals, act"
"""Every finding of ours; and of these, the steps that were skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What every rule said about some logs, and what it is worth."""

    series: Sequence[Series]
    verdicts: Sequence[Verdicts]
    """What ours found and would have done, log by log."""
    alarms: Mapping[str, Sequence[Sequence[Alarm]]]
    scores: Mapping[str, Sequence[SeriesScore]]
    """By rule, log by log: ours first, then the peers by their short names."""

    def totals(self, predicate: Callable[[Series], bool] = lambda series: True) -> dict[str, Total]:
        """Return each rule's total over the wanted logs."""
        rows = [i for i, series in enumerate(self.series) if predicate(series)]
        return {name: Total.of(scores[i] for i in rows) for name, scores in self.scores.items()}


def judge_all(series: Iterable[Series]) -> Judged:
    """Run our detectors and every peer on the logs, with a new instance for each log."""
    logs = list(series)
    verdicts = [judge(log) for log in logs]
    alarms: dict[str, list[list[Alarm]]] = {
        TELL: [verdict.alarms for verdict in verdicts],
        ACT: [verdict.skipped for verdict in verdicts],
    }
    for name, peer in PEERS.items():
        alarms[name] = [alarms_of(peer.make, log) for log in logs]
    scores = {
        name: [score(log, log_alarms) for log, log_alarms in zip(logs, rows, strict=True)]
        for name, rows in alarms.items()
    }
    return Judged(series=logs, verdicts=verdicts, alarms=alarms, scores=scores)


def full_name(rule: str) -> str:
    """Return a rule's name in full."""
    return PEERS[rule].name if rule in PEERS else rule


def best_peer(totals: Mapping[str, Total]) -> str:
    """Return the peer whose recall and precision are best together."""
    return max(PEERS, key=lambda name: totals[name].f1)
