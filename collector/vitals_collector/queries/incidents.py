"""Incidents: related records (``grouping``), with their evidence and their text (``story``)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection, Row, select

from trainvitals import alerting, views
from trainvitals.detect.fleet.origin.onsets import Onset, find_origin_onset
from trainvitals.io.capsules import is_capsule, read_capsule_verdict
from trainvitals.records import BatchNoted, Finding, Note, RunEnded, Severity
from vitals_collector.ingest.ingest import is_being_removed
from vitals_collector.ingest.projections import loss_kind_of
from vitals_collector.live.live_monitor import WatchedOnsets, conditions_of, watched_onsets
from vitals_collector.live.overview import info_of
from vitals_collector.live.restarts import Restart, restarts_of
from vitals_collector.queries import grouping, story
from vitals_collector.queries.attribution import Precursor, precursor, reset_onsets
from vitals_collector.queries.cost import late_seconds, lost_work
from vitals_collector.queries.evidence import IncidentEvidence, gather_evidence
from vitals_collector.queries.ledger import (
    alerts_of,
    decisions_of,
    event_view,
    run_row,
)
from vitals_collector.queries.series import attempt_rows
from vitals_collector.queries.verdict import (
    SETTLED_STEPS,
    Precedent,
    VerdictFacts,
    is_about_wait,
    of_healthy,
    verdict,
)
from vitals_collector.queries.why import with_kept_samples
from vitals_collector.storage.schema import decisions, events, findings, runs
from vitals_collector.storage.store import ReadSnapshot

HEALTHY_STEPS = 100
"""Steps without a problem after which an incident is over."""
MAX_INCIDENTS = 200
"""Maximum number of incidents in a response: the latest."""
MAX_EVIDENCE = 20
"""Incidents with evidence from the measurements: the most severe, then the latest."""
MAX_OTHER_RUNS = 200
"""Number of latest other runs that are searched for the same cause."""
MAX_RECORDS = 20_000
"""Maximum number of findings, and of selected events, that are read: the latest."""
MAX_LISTED = 200
"""Maximum number of records of one kind in an incident; its story counts all."""
_NEAR_NS = 120 * 10**9
"""Agent records have no step: they belong to an incident within this time."""
_OF_NOTE = (
    "Note", "RunEnded", "CheckpointChanged", "CommandAcknowledged", "TrainingPaused",
    "DataWindowSkipped",
    "AttemptStarted", "ChangeExpected", "StateRead",
)  # fmt: skip

T = TypeVar("T")
_finding = msgspec.msgpack.Decoder(Finding).decode
_batch = msgspec.msgpack.Decoder(BatchNoted).decode
_note = msgspec.msgpack.Decoder(Note).decode
_ended = msgspec.msgpack.Decoder(RunEnded).decode


class IncidentEvent(NamedTuple):
    """A selected event."""

    view: views.EventView
    code: str
    """Code of the incident that the event starts; "" if it only belongs to others."""


class RunRecords(msgspec.Struct, frozen=True):
    """All records of a run that may be part of an incident."""

    findings: tuple[views.FindingView, ...]
    attempts: tuple[int, ...]
    """Attempt of each finding."""
    decisions: tuple[views.DecisionView, ...]
    alerts: tuple[views.AlertView, ...]
    events: tuple[IncidentEvent, ...]
    data: tuple[tuple[int, views.StepData], ...]
    """Samples of bad steps, with the step."""
    loss_kind: str = "minimize"
    decided: dict[int, set[str]] = {}
    """Actions decided, by the step they are about."""
    restarts: tuple[Restart, ...] = ()
    """Restarts that lost steps."""

    def alerts_for(self, view: views.FindingView) -> tuple[alerting.Alert, ...]:
        """Return an incident's alerts that a finding raises: none if a decision covers it."""
        finding = view.finding
        if alerting.is_answered(finding, self.decided.get(finding.step, ())):
            return ()
        return alerting.alerts_for_finding(finding, run_id=view.run_id, loss_kind=self.loss_kind)


def incidents(of_run: "RunIncidents", incident_id: str = "") -> tuple[views.IncidentView, ...]:
    """Query the incidents of a run, the latest first, with their evidence and text.

    With ``incident_id``, only that one: each has its own evidence to read.
    """
    bundles = [bundle for bundle in of_run.bundles if incident_id in ("", bundle.name)]
    gravest = sorted(bundles, key=lambda each: -grouping.SEVERITIES.index(of_run.severity(each)))
    detailed = {id(bundle) for bundle in gravest[:MAX_EVIDENCE]}
    return tuple(_incident_view(of_run, each, is_whole=id(each) in detailed) for each in bundles)


def run_verdict(of_run: "RunIncidents") -> views.RunVerdict:
    """Query the verdict on a run's worst open incident, otherwise on one with actions."""
    run, listed = of_run.run, list_incidents(of_run)
    if not listed.incidents:
        return replace(listed, verdict=of_healthy(run))
    bundle = max(of_run.bundles, key=of_run.gravity)
    first = precursor(of_run.moment, run.run_id, bundle.attempt, bundle.onset, bundle.cause)
    return replace(listed, verdict=of_run.verdict(bundle, first, is_whole=True))


def list_incidents(of_run: "RunIncidents") -> views.RunVerdict:
    """Query the incidents of a run without a judgement: its rows need not be read."""
    lines = tuple(
        views.IncidentLine(
            incident_id=bundle.name,
            title=story.incident_title(bundle),
            severity=of_run.severity(bundle),
            is_open=of_run.is_open(bundle),
            is_resolved=of_run.is_resolved(bundle),
            onset_step=bundle.onset,
            last_step=bundle.last,
            started_unix_ns=bundle.started_unix_ns,
            alerts=tuple(alert.fingerprint for alert in bundle.alerts),
        )
        for bundle in of_run.bundles
    )
    empty = views.VerdictView(state="")
    return views.RunVerdict(run_id=of_run.run.run_id, verdict=empty, incidents=lines)


def read_incidents(
    moment: ReadSnapshot,
    run: views.RunSummary,
    price: float,
    reach: frozenset[str] | None,
    run_dir: Path | None,
) -> "RunIncidents":
    """Return the run's incidents, the latest first.

    Only runs in ``reach`` are named as having had the same cause; None: all. ``run_dir`` is the
    run's directory, if a directory is read.
    """
    records = read_records(moment.sql, run.run_id)
    items, raised = items_of(records)
    holding = {_condition_key(finding) for finding in conditions_of(moment.sql, run.run_id)}
    live = watched_onsets(moment.sql, run.run_id)
    found = [view.finding for view in records.findings]
    resets = reset_onsets(zip(records.attempts, found, strict=True))
    seconds = [
        grouping.SecondProblem(onset.attempt, onset.step, onset.is_lasting, onset.subject == "data")
        for onset in (*(() if live is None else live.onsets), *resets)
        if onset.is_apart
    ]
    groups = [
        _to_last_step(_over_condition(members, records, run, holding), run)
        for members in _extend_by_changes(live, resets, grouping.group_incidents(items, seconds))
    ]
    attempts = attempt_rows(moment.sql, run.run_id)
    ordinals = {row.id: ordinal for ordinal, row in enumerate(attempts, start=1)}
    names = grouping.incident_ids(groups, ordinals)
    bundles: list[story.IncidentParts] = []
    bundle_of: dict[_ItemKey, story.IncidentParts] = {}
    for name, members in zip(names, groups, strict=True):
        bundles.append(_build_bundle(name, members, records, ordinals))
        bundle_of |= dict.fromkeys(map(_item_key, members), bundles[-1])
    _attach_alerts(bundle_of, records, raised)
    bundles.sort(key=lambda bundle: (bundle.started_unix_ns, bundle.name), reverse=True)
    return RunIncidents(
        moment, run, records, bundles[:MAX_INCIDENTS], price, reach, run_dir, frozenset(holding)
    )


def _condition_key(finding: Finding) -> tuple[str, str, int, int]:
    """Return the key by which an incident finds that a finding's condition still holds."""
    return finding.kind, finding.cause, finding.step, finding.rank


def _extend_by_changes(
    live: WatchedOnsets | None,
    resets: Sequence[Onset],
    groups: Sequence[list[grouping.IncidentItem]],
) -> list[list[grouping.IncidentItem]]:
    """Extend each queried incident to the time in which its cause was out of range."""
    if live is None:
        return [*groups]
    moved = []
    for members in groups:
        first = members[0]
        mover = None
        key = first.attempt, first.onset
        if first.domain == "numbers" and live.cover(key, key):
            mover = find_origin_onset(
                (*live.onsets, *resets), attempt=first.attempt, step=first.onset, is_of_speed=False,
                is_of_setting=first.cause in grouping.SETTING_CAUSES,
            )  # fmt: skip
        if mover is not None:
            is_start = mover.is_cause and mover.step >= first.onset - grouping.FOLLOWING_STEPS
            first = first._replace(
                onset=mover.step if is_start else first.onset,
                last=max(first.last, mover.last_step),
            )
        moved.append([first, *members[1:]])
    return moved


def _to_last_step(
    members: list[grouping.IncidentItem], run: views.RunSummary
) -> list[grouping.IncidentItem]:
    """Move an incident's death to the run's last step: its reporter knows only earlier ones."""
    first, late = members[0], run.last_step
    if (
        run.state in ("failed", "lost")
        and first.cause in grouping.DEATHS
        and first.onset < late <= first.onset + grouping.NEAR_STEPS
    ):
        return [first._replace(onset=late, last=late), *members[1:]]
    return members


def _over_condition(
    members: list[grouping.IncidentItem],
    records: RunRecords,
    run: views.RunSummary,
    holding: Collection[tuple[str, str, int, int]],
) -> list[grouping.IncidentItem]:
    """Extend an incident to the latest step while the condition of a finding holds."""
    return [
        item._replace(last=max(item.last, run.last_step))
        if item.kind == "finding"
        and _condition_key(records.findings[item.which].finding) in holding
        else item
        for item in members
    ]


def _next_onset(bundle: story.IncidentParts, bundles: Sequence[story.IncidentParts]) -> int:
    """Return the onset of the run's next incident; -1 if there is none.

    An incident on an earlier attempt is never the next one, whatever its step.
    """
    later = (
        other.onset
        for other in bundles
        if other.onset > bundle.last and other.started_unix_ns >= bundle.started_unix_ns
    )
    return min(later, default=-1)


_ItemKey = tuple[str, int]
"""Kind of an item, and its index among those of its kind."""
_Raised = dict[str, list[tuple[int, _ItemKey]]]
"""By fingerprint, the step of an alert each time that an item raised it, and the item."""


def _item_key(item: grouping.IncidentItem) -> _ItemKey:
    """Return the key of an item, which stays when its steps are extended."""
    return item.kind, item.which


def items_of(records: RunRecords) -> tuple[list[grouping.IncidentItem], _Raised]:
    """Convert a run's records to items of incidents; return also the alerts that each raised.

    Alerts without such an item, such as that of a lost run, are items themselves.
    """
    items: list[grouping.IncidentItem] = []
    raised: _Raised = {}

    def add_item(item: grouping.IncidentItem, alerts: Iterable[alerting.Alert]) -> None:
        items.append(item)
        for alert in alerts:
            raised.setdefault(alert.fingerprint, []).append((alert.step, _item_key(item)))

    for i, (attempt, found) in enumerate(zip(records.attempts, records.findings, strict=True)):
        item = grouping.item_of_finding(i, found.finding, attempt, found.time_unix_ns)
        add_item(item, records.alerts_for(found))
    for i, view in enumerate(records.decisions):
        if view.decision.action != "continue":
            item = grouping.item_of_decision(i, view.decision, view.time_unix_ns)
            add_item(item, alerting.alerts_for_decision(view.decision, run_id=view.run_id))
    coded = [event for event in records.events if event.code]
    attempts = [item.attempt for item in items] + [event.view.attempt for event in coded]
    last = max((attempt for attempt in attempts if attempt), default=0)
    # Alerts and agents do not know the step of a death: use the step that the ranks reported.
    end = max((event.view.step for event in coded), default=0)

    def point(
        kind: grouping.ItemKind, i: int, attempt: int, step: int, when: int, cause: str, domain: str
    ) -> grouping.IncidentItem:
        step = step if step >= 0 else max(end, 0)
        return grouping.IncidentItem(kind, i, attempt, step, step, step, when, cause, domain)

    for i, alert in enumerate(records.alerts):
        if alert.fingerprint not in raised:
            items.append(
                point("alert", i, last, alert.step, alert.started_unix_ns, alert.name, "run")
            )
    for i, stop in enumerate(records.restarts):
        ended = stop.stopped_unix_ns
        items.append(point("restart", i, stop.before, stop.last_step, ended, "restart", "run"))
    for i, (event, code) in enumerate(records.events):
        if code:
            domain, attempt = grouping.domain_of(code, code), event.attempt or last
            items.append(point("event", i, attempt, event.step, event.time_unix_ns, code, domain))
    return items, raised


# ------------------------------------------------------------------------------------- reading


def read_records(connection: Connection, run_id: str) -> RunRecords:
    """Query the latest findings, decisions, events and alerts of a run, for its incidents."""
    table = findings.c
    query = select(table.time_unix_ns, table.attempt, table.body).where(table.run_id == run_id)
    order = (table.time_unix_ns.desc(), table.step.desc(), table.seq.desc(), table.incarnation)
    finding_rows = connection.execute(query.order_by(*order).limit(MAX_RECORDS)).all()[::-1]
    finding_rows = [row for row in finding_rows if row.body]
    noted_events, data = _read_events(connection, run_id)
    ledger = decisions_of(connection, run_id)[-MAX_RECORDS:]
    decided: dict[int, set[str]] = {}
    for view in ledger:
        if view.decision.action != "continue":
            decided.setdefault(view.decision.step, set()).add(view.decision.action)
    return RunRecords(
        findings=tuple(
            views.FindingView(
                run_id=run_id, time_unix_ns=row.time_unix_ns, finding=_finding(row.body)
            )
            for row in finding_rows
        ),
        attempts=tuple(row.attempt for row in finding_rows),
        decisions=ledger,
        alerts=alerts_of(connection, run_id),
        events=tuple(noted_events),
        data=tuple(
            (
                row.step,
                views.StepData(source=row.source, attempt=row.attempt, batch=_batch(row.body)),
            )
            for row in data
        ),
        loss_kind=loss_kind_of(connection, run_id),
        decided=decided,
        restarts=tuple(each for each in restarts_of(connection, [run_id])[run_id] if each.lost),
    )


def _read_events(
    connection: Connection, run_id: str
) -> tuple[list[IncidentEvent], Sequence[Row[Any]]]:
    """Query the events of a run that may belong to incidents, and those about batches."""
    table = events.c

    def newest(*kinds: str) -> Sequence[Row[Any]]:
        query = select(events).where(table.run_id == run_id, table.kind.in_(kinds))
        order = (table.time_unix_ns.desc(), table.id.desc())
        rows = connection.execute(query.order_by(*order).limit(MAX_RECORDS)).all()[::-1]
        return [row for row in rows if row.body]

    noted_events = [_noted_event(row) for row in newest(*_OF_NOTE)]
    return [event for event in noted_events if event is not None], newest("BatchNoted")


def _noted_event(row: Row[Any]) -> IncidentEvent | None:
    """Return an event that may belong to an incident; None for others."""
    view = event_view(row)
    if row.kind == "Note":
        note = _note(row.body)
        if note.severity == "info" and note.code != "wait_over":
            return None
        return IncidentEvent(view, note.code if note.severity == "error" else "")
    if row.kind == "RunEnded":
        ended = _ended(row.body)
        return IncidentEvent(view, "RunFailed" if ended.state == "failed" else "")
    if row.kind == "CheckpointChanged" and " is bad " not in row.summary:
        return None
    return IncidentEvent(view, "")


# ------------------------------------------------------------------------------------ bundling


def _build_bundle(
    name: str,
    members: Sequence[grouping.IncidentItem],
    records: RunRecords,
    ordinals: Mapping[int, int],
) -> story.IncidentParts:
    def of(kind: str, of_kind: Sequence[T]) -> list[T]:
        return [of_kind[item.which] for item in members if item.kind == kind]

    times = [item.time_unix_ns for item in members]
    ranks = {item.rank for item in members if item.rank >= 0}
    bundle = story.IncidentParts(
        name=name,
        attempt=members[0].attempt,
        ordinal=ordinals.get(members[0].attempt, members[0].attempt),
        onset=members[0].onset,
        last=max(item.last for item in members),
        started_unix_ns=min(times),
        ended_unix_ns=max(times),
        cause=members[0].cause,
        rank=ranks.pop() if len(ranks) == 1 and members[0].rank >= 0 else -1,
        findings=of("finding", records.findings),
        decisions=of("decision", records.decisions),
        alerts=of("alert", records.alerts),
        errors=[event.view for event in of("event", records.events)],
        restarts=of("restart", records.restarts),
    )
    members_of = {item.which for item in members if item.kind == "event"}
    near = _near_events(bundle, members, records)
    bundle.events = [records.events[i].view for i in sorted(members_of | near)]
    others = [records.events[i].view for i in sorted(near)]
    bundle.ends = [e for e in others if e.kind == "RunEnded" or is_about_wait(e)]
    steps = {(item.attempt, step) for item in members for step in (item.onset, item.last)}
    bundle.data = [(step, data) for step, data in records.data if (data.attempt, step) in steps]
    return bundle


def _near_events(
    bundle: story.IncidentParts, members: Sequence[grouping.IncidentItem], records: RunRecords
) -> set[int]:
    """Return the indices of the events near an incident that start none themselves."""
    spans: dict[int, tuple[int, int]] = {}
    for item in members:
        low, high = spans.get(item.attempt, (item.onset, item.last))
        spans[item.attempt] = (min(low, item.onset), max(high, item.last))
        if item.new_attempt:
            spans.setdefault(item.new_attempt, (item.first, item.first))
    near: set[int] = set()
    for i, (view, code) in enumerate(records.events):
        if code:
            continue
        if view.step < 0 or not view.attempt:
            early, late = bundle.started_unix_ns - _NEAR_NS, bundle.ended_unix_ns + _NEAR_NS
            is_near = early <= view.time_unix_ns <= late
        else:
            low, high = spans.get(view.attempt, (1, 0))
            # A reading is about one problem, not about others near it.
            is_reading = view.kind == "StateRead"
            before = 0 if is_reading else grouping.NEAR_STEPS
            after = grouping.FOLLOWING_STEPS if is_reading else grouping.NEAR_STEPS
            is_near = low - before <= view.step <= high + after and low <= high
        if is_near:
            near.add(i)
    return near


def _attach_alerts(
    bundle_of: Mapping[_ItemKey, story.IncidentParts], records: RunRecords, raised: _Raised
) -> None:
    """Assign each alert to the incident whose item raised it last."""
    for alert in records.alerts:
        if origins := raised.get(alert.fingerprint):
            _, key = min(reversed(origins), key=lambda origin: abs(origin[0] - alert.step))
            bundle_of[key].alerts.append(alert)


# ------------------------------------------------------------------------------- presentation


class RunIncidents(msgspec.Struct, frozen=True):
    """Incidents of a run, and the data of their texts."""

    moment: ReadSnapshot
    run: views.RunSummary
    records: RunRecords
    bundles: list[story.IncidentParts]
    price: float
    reach: frozenset[str] | None
    run_dir: Path | None
    holding: frozenset[tuple[str, str, int, int]] = frozenset()
    """Findings whose condition still holds."""
    by_cause: dict[str, tuple[Sequence[str], int]] = {}

    def severity(self, bundle: story.IncidentParts) -> Severity:
        """Return the highest severity of its parts."""
        severities: list[Severity] = [alert.severity for alert in bundle.alerts]
        for view in bundle.findings:
            severities += [alert.severity for alert in self.records.alerts_for(view)]
        for decided in bundle.decisions:
            raised = alerting.alerts_for_decision(decided.decision, run_id="")
            severities += [alert.severity for alert in raised]
        severities += ["notify"] * (len(bundle.errors) + len(bundle.restarts))
        return max(severities, key=grouping.SEVERITIES.index, default="log")

    def begun_at(self, step: int) -> tuple[int, str] | None:
        """Return attempt and cause of the gravest incident that begins at a step; None: none."""
        begun = [bundle for bundle in self.bundles if bundle.onset == step]
        gravest = max(begun, key=self.gravity, default=None)
        return None if gravest is None else (gravest.attempt, gravest.cause)

    def is_open(self, bundle: story.IncidentParts) -> bool:
        """Return whether the incident is still open."""
        run, decided = self.run, [view.decision for view in bundle.decisions]
        if run.state == "running" and self.is_lasting(bundle):
            return True
        if run.state == "finished":
            # The user keeps the last state, and no healthy step shows that the problem is over.
            steps = (decision.step for decision in decided)
            return max(steps, default=-1) >= run.last_step >= 0
        if any(alert.state == "firing" for alert in bundle.alerts):
            return True
        is_stopped = run.state in ("halted", "failed")
        if is_stopped and any(d.action == "halt" and d.acted for d in decided):
            return True
        if not bundle.findings and not decided:
            return run.state in ("lost", "failed") and not bundle.alerts
        return not alerting.point_is_over(
            raised_step=bundle.onset,
            last_step=run.last_step,
            last_unhealthy_step=bundle.last,
            healthy_steps=HEALTHY_STEPS,
        )

    def is_resolved(self, bundle: story.IncidentParts) -> bool:
        """Return whether enough healthy steps followed the incident."""
        healthy_steps = self.run.last_step - bundle.last
        return healthy_steps >= SETTLED_STEPS and not self.is_open(bundle)

    def is_lasting(self, bundle: story.IncidentParts) -> bool:
        """Return whether the condition of one of its findings held at the last step."""
        return any(_condition_key(view.finding) in self.holding for view in bundle.findings)

    def gravity(self, bundle: story.IncidentParts) -> tuple[bool, int, bool, int, int]:
        """Return the sort key: open incidents first, by severity; then those with actions."""
        is_open, severity = self.is_open(bundle), grouping.SEVERITIES.index(self.severity(bundle))
        has_acted = len(bundle.decisions) > 0
        return is_open, severity * is_open, has_acted, severity, bundle.started_unix_ns

    def verdict(
        self, bundle: story.IncidentParts, first: Precursor | None, *, is_whole: bool
    ) -> views.VerdictView:
        """Return the verdict on it; without ``is_whole``, the cost is counted, not measured."""
        run_id, found = self.run.run_id, bundle.findings
        lost = lost_work(
            self.moment,
            run_id,
            bundle.decisions,
            self.price,
            restarts=bundle.restarts,
            waits=[v for v in found if v.finding.kind in ("waiting", "hang")],
            is_timed=is_whole,
        )
        late, span = 0.0, (bundle.onset, bundle.last)
        if is_whole:
            late = late_seconds(self.moment.numbers, run_id, found, span)
        step, played = self._capsule(bundle)
        facts = VerdictFacts(
            run=self.run,
            incident=bundle,
            run_dir=info_of(run_row(self.moment.sql, run_id)).run_dir,
            next_onset=_next_onset(bundle, self.bundles),
            is_open=self.is_open(bundle),
            is_lasting=self.is_lasting(bundle),
            lost=lost,
            late_seconds=late,
            precursor=_precursor_of(first, bundle),
            blamed_rank=-1 if first is None or self.run.world_size < 2 else first.rank,
            precedent=self._precedent(bundle),
            capsule_step=step,
            played=played,
        )
        return verdict(facts)

    def _capsule(self, bundle: story.IncidentParts) -> tuple[int, str]:
        """Return its first step with a repro capsule (-1: none), and the result of the repro."""
        capsules = sorted(
            (step, data.batch.file) for step, data in bundle.data if is_capsule(data.batch.file)
        )
        if self.run_dir is not None:
            for step, file in capsules:
                if played := read_capsule_verdict(self.run_dir, file):
                    return step, played
        return (capsules[0][0], "") if capsules else (-1, "")

    def _precedent(self, bundle: story.IncidentParts) -> Precedent:
        earlier = [
            other.onset
            for other in self.bundles
            if other.cause == bundle.cause and other.started_unix_ns < bundle.started_unix_ns
        ]
        if bundle.cause not in self.by_cause:
            self.by_cause[bundle.cause] = _runs_that_had(
                self.moment.sql, self.run.run_id, bundle.cause, self.reach
            )
        labels, num_asked = self.by_cause[bundle.cause]
        return Precedent(steps=earlier, runs=labels, num_asked=num_asked)


def _precursor_of(first: Precursor | None, bundle: story.IncidentParts) -> str | None:
    """Return the first change for the verdict; None if it is the loss that the cause names."""
    if first is None:
        return None
    onset = first.onset
    if (
        bundle.cause == "nonfinite_loss"
        and onset is not None
        and onset.subject in ("loss", "losses")
        and onset.value is None
        and onset.step == bundle.onset
    ):
        return None
    return first.text


def _runs_that_had(
    connection: Connection, run_id: str, cause: str, reach: frozenset[str] | None
) -> tuple[Sequence[str], int]:
    """Query which other runs had the same cause, for the verdict, and how many were searched.

    Only the latest runs are searched: each costs one index lookup.
    """
    newest = (
        select(runs.c.run_id, runs.c.name)
        .where(runs.c.run_id != run_id, ~is_being_removed())
        .order_by(runs.c.run_id.desc())
        .limit(MAX_OTHER_RUNS)
    )
    others = [row for row in connection.execute(newest) if reach is None or row.run_id in reach]
    ids = [row.run_id for row in others]
    had: set[str] = set()
    for table, column in ((decisions, decisions.c.cause), (findings, findings.c.kind)):
        query = select(table.c.run_id).where(table.c.run_id.in_(ids), column == cause).distinct()
        had |= set(connection.execute(query).scalars()) if ids else set()
    return [row.name or row.run_id for row in others if row.run_id in had], len(others)


def _incident_view(
    of_run: RunIncidents, bundle: story.IncidentParts, *, is_whole: bool
) -> views.IncidentView:
    """Build the response about one incident; ``is_whole`` adds evidence and measured cost."""
    moment, run = of_run.moment, of_run.run
    evidence = IncidentEvidence()
    if is_whole:
        evidence = gather_evidence(
            moment, run, bundle.attempt, bundle.onset, bundle.last, bundle.cause
        )
        if of_run.run_dir is not None and evidence.view is not None:
            view = with_kept_samples(evidence.view, of_run.run_dir)
            data = tuple(each for each in view.data if each.attempt == bundle.attempt)
            evidence = replace(evidence, view=replace(view, data=data))
    judgement = of_run.verdict(bundle, evidence.precursor, is_whole=is_whole)
    is_open = of_run.is_open(bundle)
    return views.IncidentView(
        incident_id=bundle.name,
        run_id=run.run_id,
        title=story.incident_title(bundle),
        severity=of_run.severity(bundle),
        is_open=is_open,
        is_resolved=of_run.is_resolved(bundle),
        onset_step=bundle.onset,
        last_step=bundle.last,
        started_unix_ns=bundle.started_unix_ns,
        ended_unix_ns=0 if is_open else bundle.ended_unix_ns,
        verdict=judgement,
        story=story.explain_incident(bundle, evidence),
        cost_steps=judgement.lost.steps,
        cost_seconds=judgement.lost.seconds or 0.0,
        decisions=tuple(bundle.decisions[:MAX_LISTED]),
        findings=tuple(bundle.findings[:MAX_LISTED]),
        alerts=tuple(bundle.alerts[:MAX_LISTED]),
        events=tuple(bundle.events[:MAX_LISTED]),
        data=tuple(data for _, data in bundle.data[:MAX_LISTED]),
    )
