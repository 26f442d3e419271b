"""Says what belongs together: in time, and in cause or place. Pure: no SQL, no clock.

Two things that happened near each other on one branch belong together where one of these holds:
their cause is the same; they name the same rank; they are of one domain (the numbers, the speed,
the GPUs...) and do not name different ranks. A rollback closes over the branch it left, and over
what came again on the new branch before it was past the place where the trouble had been.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from trainvitals.detect.registry import DOMAINS
from trainvitals.records import Decision, Finding, Severity

NEAR_STEPS = 50
"""Things so many steps apart may belong together."""
SEVERITIES: tuple[Severity, ...] = ("log", "notify", "page")


class Item(NamedTuple):
    """One thing that happened, as far as grouping goes."""

    kind: Literal["finding", "decision", "alert", "event"]
    which: int
    """Which of its kind, by its place among them."""
    attempt: int
    onset: int
    first: int
    """From which step on others may belong to it; before the onset, where a rollback went back."""
    last: int
    time_unix_ns: int
    cause: str
    domain: str = "numbers"
    rank: int = -1
    new_attempt: int = 0
    """The branch that a rollback began."""


def domain_of(name: str, default: str = "numbers") -> str:
    """Return the domain of a kind of finding, a cause or a code."""
    return DOMAINS.get(name, default)


def item_of_finding(index: int, finding: Finding, attempt: int, time_unix_ns: int) -> Item:
    """Return what grouping needs of a finding."""
    onset = finding.onset_step if 0 <= finding.onset_step <= finding.step else finding.step
    domain = domain_of(finding.kind)
    return Item(
        "finding", index, attempt, onset, onset, finding.step, time_unix_ns,
        finding.cause or finding.kind, domain, finding.rank,
    )  # fmt: skip


def item_of_decision(index: int, decision: Decision, time_unix_ns: int) -> Item:
    """Return what grouping needs of a ledger's entry."""
    first, last = decision.step, max(decision.step, decision.decided_at_step)
    is_rollback = decision.action == "rollback" and decision.acted
    if is_rollback and 0 <= decision.rollback_to_step < first:
        first = decision.rollback_to_step
    return Item(
        "decision", index, decision.attempt, decision.step, first, last, time_unix_ns,
        decision.cause or decision.rule, domain_of(decision.cause), decision.rank,
        decision.new_attempt if is_rollback else 0,
    )  # fmt: skip


def group(items: Sequence[Item]) -> list[list[Item]]:
    """Return what belongs together, each by step and time; the groups by their beginning."""
    sets = _Sets(len(items))
    by_attempt: dict[int, list[int]] = {}
    for i, item in enumerate(items):
        by_attempt.setdefault(item.attempt, []).append(i)
    for indices in by_attempt.values():
        _join_near(items, sorted(indices, key=lambda i: (items[i].first, items[i].last, i)), sets)
    for i, item in enumerate(items):
        if item.new_attempt:
            again = by_attempt.get(item.new_attempt, ())
            for j in again:
                if items[j].first <= item.last + NEAR_STEPS and is_alike(item, items[j]):
                    sets.join(i, j)
    groups: dict[int, list[Item]] = {}
    for i, item in enumerate(items):
        groups.setdefault(sets.top(i), []).append(item)
    clusters = [sorted(members, key=_order) for members in groups.values()]
    return sorted(
        clusters, key=lambda cluster: (cluster[0].attempt, cluster[0].onset, cluster[0].cause)
    )


def is_alike(item: Item, other: Item) -> bool:
    """Return whether two things may belong together by cause or place."""
    if item.cause == other.cause or (item.rank >= 0 and item.rank == other.rank):
        return True
    return item.domain == other.domain and (item.rank < 0 or other.rank < 0)


def _order(item: Item) -> tuple[int, int, int, str, int]:
    return item.attempt, item.onset, item.time_unix_ns, item.kind, item.which


def _join_near(items: Sequence[Item], order: Iterable[int], sets: "_Sets") -> None:
    """Join what is near and alike; of each cause, rank and domain the furthest reaching is kept."""
    reach: dict[tuple[str, str | int], int] = {}
    for i in order:
        item = items[i]
        of_rank = item.rank >= 0
        asked: list[tuple[str, str | int]] = [("cause", item.cause)]
        asked.append(("whole", item.domain) if of_rank else ("domain", item.domain))
        asked += [("rank", item.rank)] if of_rank else []
        registered_keys: list[tuple[str, str | int]] = [
            ("cause", item.cause),
            ("domain", item.domain),
        ]
        registered_keys.append(("rank", item.rank) if of_rank else ("whole", item.domain))
        for key in asked:
            j = reach.get(key)
            if j is not None and items[j].last >= item.first - NEAR_STEPS:
                sets.join(i, j)
        for key in registered_keys:
            j = reach.get(key)
            if j is None or items[j].last < item.last:
                reach[key] = i


class _Sets:
    """Disjoint sets of numbers."""

    def __init__(self, num: int) -> None:
        self._above = list(range(num))

    def top(self, i: int) -> int:
        while self._above[i] != i:
            self._above[i] = i = self._above[self._above[i]]
        return i

    def join(self, i: int, j: int) -> None:
        self._above[self.top(i)] = self.top(j)


def incident_ids(
    groups: Sequence[Sequence[Item]], ordinals: Mapping[int, int] | None = None
) -> list[str]:
    """Return a name for each: the attempt and step it began at, and its first cause.

    Args:
        groups: the incidents.
        ordinals: which attempt of the run an id is, as people count; one it lacks keeps its id.
    """
    names: dict[str, None] = {}
    for items in groups:
        cause = re.sub("[^A-Za-z0-9_.]+", "_", items[0].cause)[:80]
        attempt = (ordinals or {}).get(items[0].attempt, items[0].attempt)
        name = f"{attempt}-{items[0].onset}-{cause}"
        while name in names:  # of one place and cause there is one, but for odd characters
            name += "_"
        names[name] = None
    return list(names)


__all__ = [
    *("NEAR_STEPS", "SEVERITIES", "Item", "domain_of", "group", "incident_ids", "is_alike"),
    *("item_of_decision", "item_of_finding"),
]
