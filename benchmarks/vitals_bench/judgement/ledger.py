"""Output of a run, read from its journal while it trains, as an agent would."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainvitals.alerting import Alert, alerts_for_decision, alerts_for_finding, is_answered
from trainvitals.detect.fleet import FleetDetectors
from trainvitals.detect.registry import KINDS
from trainvitals.io.journal import JournalReader, find_journals
from trainvitals.io.private import private_base
from trainvitals.records import (
    Decision,
    DecisionMade,
    Finding,
    FindingRaised,
    NamesDefined,
    Note,
    StateRead,
    decode_events,
)
from trainvitals.wire import Batch
from vitals_bench.merged_rows import merge_batches

RESOLVES_AFTER = 100
"""Healthy steps after which an alert is over."""
READ_EVERY = 100
"""Steps between two looks: a journal is bounded, and forgets the oldest rows."""


@dataclass(slots=True)
class Ledger:
    """Everything of one run that a table of the benchmark asks for."""

    run_id: str
    loss_kind: str = "minimize"
    """What the run declared of its loss."""
    withheld: int = 0
    """Updates that were not applied although loss and gradients were finite."""
    nonfinite: int = 0
    """Updates that were not applied because something was not finite."""
    longest: int = 0
    """Most updates withheld in a row."""
    withheld_steps: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    readings: list[tuple[int, int, StateRead]] = field(default_factory=list)
    """What was read of the state, each with the attempt and the step of its event."""
    notes: Counter[str] = field(default_factory=Counter)
    _scalars: list[tuple[int, int, float]] = field(default_factory=list)
    """Step, name and value of each recorded scalar."""
    _names: dict[int, str] = field(default_factory=dict)
    _batches: list[Batch] = field(default_factory=list)
    """Everything read, for the fleet detectors."""
    _readers: dict[Path, JournalReader] = field(default_factory=dict)
    _row: int = 0

    def read(self) -> None:
        """Take in what is new in the journal of rank 0, which writes what all have in common."""
        for ref in find_journals(private_base(os.environ)):
            if ref.run_id == self.run_id and ref.directory.name.startswith("rank-0-"):
                reader = self._readers.setdefault(ref.directory, JournalReader(ref.directory))
                while batches := reader.read():
                    for batch in batches:
                        self._take(batch)

    def _take(self, batch: Batch) -> None:
        self._batches.append(batch)
        schema = batch.header.stream_schema
        if schema.stream == "steps":
            for start in range(0, len(batch.rows), schema.row_size):
                row = schema.unpack(memoryview(batch.rows)[start : start + schema.row_size])
                self._take_step(row)
        elif schema.stream == "scalars":
            for start in range(0, len(batch.rows), schema.row_size):
                row = schema.unpack(memoryview(batch.rows)[start : start + schema.row_size])
                step, name, value = row["step"], row["name"], row["value"]
                assert isinstance(step, int)
                assert isinstance(name, int)
                assert isinstance(value, float)
                self._scalars.append((step, name, value))
        elif schema.stream == "events":
            for event_row in decode_events(schema, batch.rows):
                event = event_row.event
                if isinstance(event, DecisionMade):
                    self.decisions.append(event.decision)
                elif isinstance(event, FindingRaised):
                    self.findings.append(event.finding)
                elif isinstance(event, StateRead):
                    self.readings.append((event_row.attempt, event_row.step, event))
                elif isinstance(event, NamesDefined):
                    self._names |= event.names if event.stream == "scalars" else {}
                elif isinstance(event, Note):
                    self.notes[event.code] += 1

    def _take_step(self, row: Mapping[str, object]) -> None:
        values = [row.get(name) for name in ("loss", "grad_norm")]
        is_finite = all(isinstance(v, float) and math.isfinite(v) for v in values)
        if not row.get("skipped"):
            self._row = 0
        elif not is_finite:
            self.nonfinite += 1
        else:
            self.withheld += 1
            self._row += 1
            self.longest = max(self.longest, self._row)
            step = row["step"]
            assert isinstance(step, int)
            self.withheld_steps.append(step)

    def add_fleet_findings(self) -> None:
        """Add findings of a collector's fleet detectors on numbers; call once, after the run.

        Findings on speed, memory and storage depend on the machine, and are left out.
        """
        detectors = FleetDetectors()
        for merged in merge_batches([self._batches]):
            findings = detectors.update(merged)
            self.findings += [f for f in findings if KINDS[f.kind].domain == "numbers"]

    def _alerts(self) -> Iterator[Alert]:
        """Yield the alerts that notify or page; an alert that lasts counts once."""
        actions: dict[int, set[str]] = {}
        for decision in self.decisions:
            actions.setdefault(decision.step, set()).add(decision.action)
        alerts = [a for d in self.decisions for a in alerts_for_decision(d, run_id=self.run_id)]
        for finding in self.findings:
            if not is_answered(finding, actions.get(finding.step, ())):
                alerts += alerts_for_finding(finding, run_id=self.run_id, loss_kind=self.loss_kind)
        latest: dict[str, int] = {}
        for alert in sorted(alerts, key=lambda alert: alert.step):
            before = latest.get(alert.fingerprint)
            latest[alert.fingerprint] = alert.step
            if alert.severity != "log" and (before is None or alert.step > before + RESOLVES_AFTER):
                yield alert

    def messages(self) -> dict[str, int]:
        """Return how many alerts notify or page, by name."""
        return dict(Counter(alert.name for alert in self._alerts()))

    def num_pages(self) -> int:
        """Return how many alerts page."""
        return sum(alert.severity == "page" for alert in self._alerts())

    def scalars(self) -> dict[int, dict[str, float]]:
        """Return the recorded scalars of each step, in order."""
        by_step: dict[int, dict[str, float]] = {}
        for step, name, value in self._scalars:
            by_step.setdefault(step, {})[self._names[name]] = value
        return dict(sorted(by_step.items()))

    def reported_after(self, begin: int) -> int | None:
        """Return the steps from ``begin`` to the first finding or decision; None: there is none."""
        steps = [finding.step for finding in self.findings]
        steps += [decision.step for decision in self.decisions if decision.action != "continue"]
        return min((step - begin for step in steps if step >= begin), default=None)

    def rollbacks(self) -> list[Decision]:
        """Return the rollbacks that were done."""
        return [d for d in self.decisions if d.action == "rollback" and d.acted]

    def halts(self) -> int:
        """Return whether the run was stopped."""
        return sum(d.action == "halt" and d.acted for d in self.decisions)
