"""Grouping of findings, decisions and events by time, and by cause or place. Pure.

Two items of one attempt belong together if their cause is the same and they are near each other.
They also belong together if one directly follows the other, and they name the same rank, or share a
domain (numbers, speed, GPUs...) and do not name different ranks: a NaN gradient, and the parameters
that it damaged. A single NaN step among high losses is separate. Healthy steps separate independent
faults. A rollback includes the items of its cause on the attempt that it left. It also includes
those on the new attempt up to the step of the original problem.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from trainvitals.detect.registry import DOMAINS
from trainvitals.records import Decision, Finding, Severity

SAME_CAUSE_STEPS = 20
"""Items of one cause within this number of steps belong together: as many clean steps end an
episode."""
NEAR_STEPS = 50
"""Events within this number of steps belong to an incident; a rollback's cause may recur within
it."""
FOLLOWING_STEPS = 10
"""Items of different causes, also of one rank, belong together if at most this many steps are
between them."""
SEVERITIES: tuple[Severity, ...] = ("log", "notify", "page")


ItemKind = Literal["finding", "decision", "alert", "event", "restart"]


class IncidentItem(NamedTuple):
    """Grouping data of one item."""

    kind: ItemKind
    which: int
    """Index among the items of its kind."""
    attempt: int
    onset: int
    first: int
    """First step at which others may belong to it; before the onset if a rollback restored an
    earlier step."""
    last: int
    time_unix_ns: int
    cause: str
    domain: str = "numbers"
    rank: int = -1
    new_attempt: int = 0
    """Attempt that a rollback started."""
    is_withheld: bool = False
    """Whether its update was skipped, so that it damaged no parameter."""
    excess: float = 0.0
    """A finding's value as a multiple of its limit, if it has both and they are finite; 0
    otherwise, and for a layer's gradient that is exactly 0."""


DEATHS = ("rank_gone", "RunFailed", "restart")
"""Codes of the end of a run, the root first: errors of other ranks follow from a death."""


def domain_of(name: str, default: str = "numbers") -> str:
    """Return the domain by which incidents group a finding or cause, such as numbers or speed."""
    if name in DEATHS:
        return "run"
    return DOMAINS.get(name, default)


def item_of_finding(index: int, finding: Finding, attempt: int, time_unix_ns: int) -> IncidentItem:
    """Convert a finding to an item that can be grouped with others to an incident."""
    onset = finding.onset_step if 0 <= finding.onset_step <= finding.step else finding.step
    domain, excess = domain_of(finding.kind), 0.0
    if finding.value is not None and finding.limit and math.isfinite(finding.value):
        excess = abs(finding.value / finding.limit)
    return IncidentItem(
        "finding", index, attempt, onset, onset, finding.step, time_unix_ns,
        finding.cause or finding.kind, domain, finding.rank, excess=excess,
    )  # fmt: skip


def item_of_decision(index: int, decision: Decision, time_unix_ns: int) -> IncidentItem:
    """Convert a decision to an item that can be grouped with others to an incident."""
    first = last = decision.step
    if decision.action != "skip_step":  # the steps up to the decision end with it
        last = max(first, decision.decided_at_step)
    is_rollback = decision.action == "rollback" and decision.acted
    if is_rollback and 0 <= decision.rollback_to_step < first:
        first = decision.rollback_to_step
    return IncidentItem(
        "decision", index, decision.attempt, decision.step, first, last, time_unix_ns,
        decision.cause or decision.rule, domain_of(decision.cause), decision.rank,
        decision.new_attempt if is_rollback else 0,
        decision.action == "skip_step" and decision.acted,
    )  # fmt: skip


class SecondProblem(NamedTuple):
    """A problem that began during high losses and does not follow from them."""

    attempt: int
    step: int
    is_lasting: bool
    """Whether later steps have it too: damaged weights, but not one layer's gradient."""
    is_of_data: bool = False
    """Whether it is wrong data in later steps too, which may have no findings of their own."""


def group_incidents(
    items: Sequence[IncidentItem], seconds: Sequence[SecondProblem] = ()
) -> list[list[IncidentItem]]:
    """Group items to incidents in the order of their start; each by step, then time."""
    sets = _DisjointSets(len(items))
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
            if _is_repeated_problem(item, items[j]):
                sets.join(i, j)
        for j in by_attempt[item.attempt] if item.cause in DEATHS else ():
            if _waits_for_dead(items[j], item):
                sets.join(i, j)
    groups: dict[int, list[IncidentItem]] = {}
    for i, item in enumerate(items):
        groups.setdefault(sets.find_root(i), []).append(item)
    clusters = [
        _deaths_first(_root_first(_slowdown_last(part)))
        for members in groups.values()
        for separate in _split_second(sorted(members, key=_item_sort_key), seconds)
        for later in _split_frozen_layer(separate)
        for half in _split_setting(later)
        for whole in _split_damage(half)
        for part in _split_isolated_step(whole)
    ]
    return sorted(
        clusters, key=lambda cluster: (cluster[0].attempt, cluster[0].onset, cluster[0].cause)
    )


_DEATH_NOTED_NS = 3_000_000_000
"""A rank's death may be noted so long after the others were seen to wait for it."""


def _waits_for_dead(item: IncidentItem, death: IncidentItem) -> bool:
    """Return whether an incident's wait follows from a death; an earlier one may be its reason."""
    is_wait = item.cause == "waiting" or item.cause.startswith("hang_")
    is_near = abs(item.onset - death.onset) <= FOLLOWING_STEPS
    return is_wait and is_near and item.time_unix_ns >= death.time_unix_ns - _DEATH_NOTED_NS


def _deaths_first(members: list[IncidentItem]) -> list[IncidentItem]:
    """Put an incident's waits for a dead rank after its death, which caused them."""
    deaths = [item for item in members if item.cause in DEATHS]
    waits = [item for item in members if any(_waits_for_dead(item, death) for death in deaths)]
    return [item for item in members if item not in waits] + waits


def _slowdown_last(members: list[IncidentItem]) -> list[IncidentItem]:
    """Put a straggler or slow data before the drop of throughput that it caused."""
    first = members[0]
    if first.cause != "throughput":
        return members
    limit = first.onset + SAME_CAUSE_STEPS
    roots = (i for i in members if i.domain == first.domain and i.cause != first.cause)
    root = next((item for item in roots if item.onset <= limit), None)
    return members if root is None else [root, *(item for item in members if item is not root)]


_FROM_PARAMS = ("nonfinite_loss", "nonfinite_gradient")


def _root_first(members: list[IncidentItem]) -> list[IncidentItem]:
    """Put NaN parameters, found by a later check, before the loss in the incident they caused.

    They were the cause if every NaN before the check was withheld: nothing else damaged them.
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


def _split_second(
    members: list[IncidentItem], seconds: Sequence[SecondProblem]
) -> list[list[IncidentItem]]:
    """Separate a problem that began during high losses, such as wrong data, from them."""
    first = members[0]
    starts = [s for s in seconds if s.attempt == first.attempt and s.step > first.onset]
    if not starts or first.domain != "numbers":
        return [members]
    start = min(starts, key=lambda second: second.step)
    key = (start.attempt, start.step)
    if start.is_lasting or start.is_of_data:  # also values found later, if they were high before
        later = [item for item in members[1:] if (item.attempt, item.last) >= key]
    else:
        later = [item for item in members[1:] if (item.attempt, item.onset) == key]
    if not later or not (start.is_of_data or any(item.onset >= start.step for item in later)):
        return [members]
    before = [item for item in members if item not in later]
    later = [item._replace(onset=max(item.onset, start.step)) for item in later]
    return [before, *_split_second(sorted(later, key=_item_sort_key), seconds)]


SETTING_CAUSES = ("lr_jump", "weight_decay")
"""Causes that the loop itself makes: they follow from nothing that was measured before."""


def _split_setting(members: list[IncidentItem]) -> list[list[IncidentItem]]:
    """Separate a changed setting, and what followed it, from an incident that came before it."""
    first = members[0]
    changed = [item.onset for item in members if item.cause in SETTING_CAUSES]
    if not changed or changed[0] <= first.onset or first.domain != "numbers":
        return [members]
    before = [item for item in members if item.onset < changed[0]]
    after = [item for item in members if item.onset >= changed[0]]
    after.sort(key=lambda item: item.cause not in SETTING_CAUSES)
    return [before, after]


def _split_frozen_layer(members: list[IncidentItem]) -> list[list[IncidentItem]]:
    """Separate a layer whose gradient stays at 0 from high losses around it, which end."""
    frozen = [i for i in members if i.cause == "layer_gradient" and not i.excess]
    if not frozen or frozen[0].onset == members[0].onset:
        return [members]
    rest = [item for item in members if item not in frozen]
    return [rest, frozen] if _are_mild(rest) else [members]


OVERFLOW = 1e3
"""Multiple of the limit up to which a loss or gradient does not overflow one step later."""


def _are_mild(items: list[IncidentItem]) -> bool:
    """Return whether the items of an incident cannot have broken the weights."""
    return bool(items) and all(0.0 < item.excess <= OVERFLOW for item in items)


def _split_damage(members: list[IncidentItem]) -> list[list[IncidentItem]]:
    """Separate NaN parameters, and the NaN losses that they cause, from high losses before them.

    A finite gradient makes no NaN of a parameter, unless the values were about to overflow.
    """
    first = members[0]
    bad = [i for i in members if i.cause == "nonfinite_params" or i.cause in _FROM_PARAMS]
    if first in bad or not any(item.cause == "nonfinite_params" for item in bad):
        return [members]
    before = [item for item in members if item.onset < bad[0].onset and item.kind == "finding"]
    if not _are_mild(before):
        return [members]
    return [before, [item for item in members if item not in before]]


_BLOW_UP = ("loss_outlier", "grad_norm_outlier")


def _split_isolated_step(members: list[IncidentItem]) -> list[list[IncidentItem]]:
    """Separate a single NaN step from high losses around it: an incident of its own.

    Its update was skipped, and the next step was finite, so the weights were not the cause. Between
    two outliers, or before a rollback, it belongs to the incident: a blow-up overflows.
    """
    steps = {item.onset for item in members if item.cause.startswith("nonfinite_")}
    first, step = members[0], next(iter(steps), -1)
    if len(steps) != 1 or first.onset == step or first.domain != "numbers":
        return [members]
    isolated = [item for item in members if item.cause in _FROM_PARAMS and item.last == step]
    rest = [item for item in members if item not in isolated]
    outliers = [item.first for item in rest if item.cause in _BLOW_UP]
    is_blow_up = any(0 < step - at <= FOLLOWING_STEPS for at in outliers) and any(
        0 < at - step <= FOLLOWING_STEPS for at in outliers
    )
    is_blow_up |= any(item.kind == "decision" and not item.is_withheld for item in rest)
    if is_blow_up or not any(item.is_withheld for item in isolated):
        return [members]
    return [rest, isolated]


def _is_repeated_problem(rollback: IncidentItem, item: IncidentItem) -> bool:
    """Return whether an item after a rollback belongs to the incident that it was for."""
    if item.cause == rollback.cause or (item.rank >= 0 and item.rank == rollback.rank):
        return item.first <= rollback.last + NEAR_STEPS
    if item.domain != rollback.domain or (item.rank >= 0 and rollback.rank >= 0):
        return False
    before, behind = rollback.onset - FOLLOWING_STEPS, rollback.last + FOLLOWING_STEPS
    return before <= item.last and item.first <= behind


def _item_sort_key(item: IncidentItem) -> tuple[int, bool, int, int, int, str, int]:
    """Return the order of items in an incident: by attempt and step, deaths last."""
    is_death = item.domain == "run"
    depth = DEATHS.index(item.cause) if item.cause in DEATHS else len(DEATHS)
    # The cause of a death precedes it; among deaths the root is first, regardless of its clock.
    depth = depth * is_death
    sort_key = item.onset, item.time_unix_ns
    return item.attempt, is_death, depth, *sort_key, item.kind, item.which


_Keys = list[tuple[str, str | int]]


def _join_near(items: Sequence[IncidentItem], order: Iterable[int], sets: "_DisjointSets") -> None:
    """Join near items of one cause to an incident, and items of a rank that directly follow."""
    reach: dict[tuple[str, str | int], int] = {}
    for i in order:
        item = items[i]
        keys: _Keys = [("cause", item.cause)]
        keys += [("rank", item.rank)] if item.rank >= 0 else []
        for key in keys:
            distance = SAME_CAUSE_STEPS if key[0] == "cause" else FOLLOWING_STEPS
            _join_within_reach(items, i, reach.get(key), item.first - distance, sets)
        _keep_longest_reach(items, i, keys, reach)


def _domains(item: IncidentItem) -> tuple[str, ...]:
    """Return the domains in which others may follow an item.

    A stalled loader makes no later step slow, unless all steps wait for their data.
    """
    if item.cause == "loader_stall":
        return ("stall",)
    return (item.domain, "stall") if item.cause.startswith("data_bound") else (item.domain,)


def _join_following(
    items: Sequence[IncidentItem], order: Iterable[int], sets: "_DisjointSets"
) -> None:
    """Join items of one domain that directly follow each other, unless both name a rank."""
    reach: dict[tuple[str, str | int], int] = {}
    for i in order:
        item = items[i]
        keys: _Keys = []
        for domain in _domains(item):
            join_key = ("whole" if item.rank >= 0 else "domain", domain)
            _join_within_reach(items, i, reach.get(join_key), item.onset - FOLLOWING_STEPS, sets)
            keys += [("domain", domain)]
            keys += [] if item.rank >= 0 else [("whole", domain)]
        _keep_longest_reach(items, i, keys, reach)


def _join_within_reach(
    items: Sequence[IncidentItem], i: int, j: int | None, since: int, sets: "_DisjointSets"
) -> None:
    """Join two items of an incident if the earlier one lasts until this step."""
    if j is not None and items[j].last >= since:
        sets.join(i, j)


def _keep_longest_reach(
    items: Sequence[IncidentItem], i: int, keys: _Keys, reach: dict[tuple[str, str | int], int]
) -> None:
    """Record which item of an incident reaches furthest for each key."""
    for key in keys:
        j = reach.get(key)
        if j is None or items[j].last < items[i].last:
            reach[key] = i


class _DisjointSets:
    """Disjoint sets of numbers."""

    def __init__(self, num: int) -> None:
        self._above = list(range(num))

    def find_root(self, i: int) -> int:
        """Return the item that represents the incident of item ``i``."""
        while self._above[i] != i:
            self._above[i] = i = self._above[self._above[i]]
        return i

    def join(self, i: int, j: int) -> None:
        """Join the incidents of two items."""
        self._above[self.find_root(i)] = self.find_root(j)


def incident_ids(
    groups: Sequence[Sequence[IncidentItem]], ordinals: Mapping[int, int] | None = None
) -> list[str]:
    """Return a name for each incident: attempt and step of its onset, and its first cause.

    ``ordinals`` are those of the attempts in the run; an attempt without one keeps its id.
    """
    names: dict[str, None] = {}
    for items in groups:
        cause = re.sub("[^A-Za-z0-9_.]+", "_", items[0].cause)[:80]
        attempt = (ordinals or {}).get(items[0].attempt, items[0].attempt)
        name = f"{attempt}-{items[0].onset}-{cause}"
        while name in names:  # one per place and cause, except for unusual characters
            name += "_"
        names[name] = None
    return list(names)
