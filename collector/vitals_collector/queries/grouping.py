"""Says what belongs together: in time, and in cause or place. Pure: no SQL, no clock.

Two things on one branch belong together where their cause is the same and they are near each other;
or where one follows the other at once, and they name the same rank, or are of one domain (the
numbers, the speed, the GPUs...) and do not name different ranks: a NaN gradient, and
the parameters that it spoiled. Between independent faults lie healthy steps. A rollback closes over
what of its cause lies on the branch it left, and over what came again on the new branch before it
was past the place where the trouble had been.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from trainvitals.detect.registry import DOMAINS
from trainvitals.records import Decision, Finding, Severity

SAME_CAUSE_STEPS = 20
"""Things of one cause, so many steps apart, belong together: as many clean steps end an episode."""
NEAR_STEPS = 50
"""Events so many steps away belong to an incident; a rollback's cause may come again so soon."""
FOLLOWING_STEPS = 10
"""Things of different causes, of one rank too, belong together if at most this many steps are
between them."""
SEVERITIES: tuple[Severity, ...] = ("log", "notify", "page")


class Item(NamedTuple):
    """One thing that happened, as far as grouping goes."""

    kind: Literal["finding", "decision", "alert", "event", "restart"]
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
    is_withheld: bool = False
    """Whether its update was skipped, so that it spoiled no parameter."""


DEATHS = ("rank_gone", "RunFailed", "restart")
"""Codes of how a run goes down, the root first: the errors of other ranks follow from a death."""


def domain_of(name: str, default: str = "numbers") -> str:
    """Return the domain of a kind of finding, a cause or a code."""
    if name in DEATHS:
        return "run"
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
        decision.action == "skip_step" and decision.acted,
    )  # fmt: skip


def group(items: Sequence[Item]) -> list[list[Item]]:
    """Return what belongs together, each by step and time; the groups by their beginning."""
    sets = _Sets(len(items))
    by_attempt: dict[int, list[int]] = {}
    for i, item in enumerate(items):
        by_attempt.setdefault(item.attempt, []).append(i)
    for indices in by_attempt.values():
        by_first = sorted(indices, key=lambda i: (items[i].first, items[i].last, i))
        _join_near(items, by_first, sets)
        _join_following(
            items, sorted(indices, key=lambda i: (items[i].onset, items[i].last, i)), sets
        )
    for i, item in enumerate(items):
        for j in by_attempt.get(item.new_attempt, ()) if item.new_attempt else ():
            if _came_again(item, items[j]):
                sets.join(i, j)
    groups: dict[int, list[Item]] = {}
    for i, item in enumerate(items):
        groups.setdefault(sets.top(i), []).append(item)
    clusters = [_root_first(sorted(members, key=_order)) for members in groups.values()]
    return sorted(
        clusters, key=lambda cluster: (cluster[0].attempt, cluster[0].onset, cluster[0].cause)
    )


_FROM_PARAMS = ("nonfinite_loss", "nonfinite_gradient")


def _root_first(members: list[Item]) -> list[Item]:
    """Put parameters that a later check found NaN before the loss that followed from them.

    They were the cause if every NaN before the check was withheld: nothing else spoiled them.
    """
    first = members[0]
    root = next((item for item in members if item.cause == "nonfinite_params"), None)
    if root is None or first.cause not in _FROM_PARAMS:
        return members
    withheld = {item.onset for item in members if item.is_withheld}
    if any(i.onset < root.onset and i.onset not in withheld for i in members):
        return members
    rest = [item for item in members if item is not root]
    return [root._replace(onset=first.onset, first=first.first), *rest]


def _came_again(rollback: Item, item: Item) -> bool:
    """Return whether something on the branch that a rollback began is the trouble it was about."""
    if item.cause == rollback.cause or (item.rank >= 0 and item.rank == rollback.rank):
        return item.first <= rollback.last + NEAR_STEPS
    if item.domain != rollback.domain or (item.rank >= 0 and rollback.rank >= 0):
        return False
    before, behind = rollback.onset - FOLLOWING_STEPS, rollback.last + FOLLOWING_STEPS
    return before <= item.last and item.first <= behind


def _order(item: Item) -> tuple[int, bool, int, int, int, str, int]:
    is_death = item.domain == "run"
    depth = DEATHS.index(item.cause) if item.cause in DEATHS else len(DEATHS)
    # What led to a death comes before it; of the deaths the root does, whatever its clock said.
    depth = depth * is_death
    sort_key = item.onset, item.time_unix_ns
    return item.attempt, is_death, depth, *sort_key, item.kind, item.which


_Keys = list[tuple[str, str | int]]


def _join_near(items: Sequence[Item], order: Iterable[int], sets: "_Sets") -> None:
    """Join what is near and of one cause, and what follows at once on one rank."""
    reach: dict[tuple[str, str | int], int] = {}
    for i in order:
        item = items[i]
        keys: _Keys = [("cause", item.cause)]
        keys += [("rank", item.rank)] if item.rank >= 0 else []
        for key in keys:
            distance = SAME_CAUSE_STEPS if key[0] == "cause" else FOLLOWING_STEPS
            _join(items, i, reach.get(key), item.first - distance, sets)
        _reach_further(items, i, keys, reach)


def _join_following(items: Sequence[Item], order: Iterable[int], sets: "_Sets") -> None:
    """Join what follows at once and is of one domain, unless both name a rank."""
    reach: dict[tuple[str, str | int], int] = {}
    for i in order:
        item = items[i]
        join_key = ("whole" if item.rank >= 0 else "domain", item.domain)
        _join(items, i, reach.get(join_key), item.onset - FOLLOWING_STEPS, sets)
        keys: _Keys = [("domain", item.domain)]
        keys += [] if item.rank >= 0 else [("whole", item.domain)]
        _reach_further(items, i, keys, reach)


def _join(items: Sequence[Item], i: int, j: int | None, since: int, sets: "_Sets") -> None:
    if j is not None and items[j].last >= since:
        sets.join(i, j)


def _reach_further(
    items: Sequence[Item], i: int, keys: _Keys, reach: dict[tuple[str, str | int], int]
) -> None:
    """Keep of each key the item that reaches furthest."""
    for key in keys:
        j = reach.get(key)
        if j is None or items[j].last < items[i].last:
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
    *(
        "DEATHS",
        "FOLLOWING_STEPS",
        "NEAR_STEPS",
        "SAME_CAUSE_STEPS",
        "SEVERITIES",
        "Item",
        "domain_of",
        "group",
        "incident_ids",
    ),
    *("item_of_decision", "item_of_finding"),
]
