"""Writes a run's steps as they arrive, each once; after a rollback, again from the fork."""

import sys
from collections.abc import Sequence

from trainvitals.cli.output import Format, write_json_line, write_rows
from trainvitals.views import RunQuestion, RunSummary, SeriesQuestion
from vitals_collector.queries.open import Reader

_METRICS = ("steps.loss", "steps.grad_norm", "steps.learning_rate", "steps.skipped")
_HEADER = ("step", "attempt", "loss", "grad_norm", "learning_rate", "skipped")
_MAX_STEPS = 20_000

_Row = tuple[object, ...]


class StepTail:
    """Tracks the steps already written."""

    def __init__(self, reader: Reader, run_id: str, form: Format = Format.TABLE) -> None:
        self._reader = reader
        self._run_id = run_id
        self._form = form
        self._next_step = 0
        self._attempt = 0

    def columns(self, from_step: int) -> dict[str, Sequence[object]]:
        """Query the steps from ``from_step`` as columns of `vitals tail`, without writing."""
        self._next_step = from_step
        rows = self._read_new_rows()
        return {name: [row[at] for row in rows] for at, name in enumerate(_HEADER)}

    def write_header(self, from_step: int) -> None:
        """Query the steps from ``from_step`` and write them below a header, for `vitals tail`."""
        attempts = self._reader.ask(RunQuestion(run_id=self._run_id)).attempts
        self._attempt = attempts[-1].id if attempts else 0
        self._next_step = from_step
        self._write_steps(self._read_new_rows(), with_header=True)

    def write_new_steps(self) -> RunSummary:
        """Query and write a followed run's new steps; return the state of the run."""
        detail = self._reader.ask(RunQuestion(run_id=self._run_id))
        newest = detail.attempts[-1] if detail.attempts else None
        if newest is not None and newest.id != self._attempt:
            self._attempt, self._next_step = newest.id, newest.fork_step
        self._write_steps(self._read_new_rows(), with_header=False)
        return detail.summary

    def _read_new_rows(self) -> list[_Row]:
        """Query the steps of a followed run that were not written yet."""
        values: dict[tuple[int, int], dict[str, object]] = {}
        for metric in _METRICS:
            reply = self._reader.ask(
                SeriesQuestion(
                    run_id=self._run_id, metric=metric, points=_MAX_STEPS, from_step=self._next_step
                )
            )
            marks = {(mark.step, mark.attempt): mark.kind for mark in reply.nonfinite}
            for step, attempt, value in zip(reply.step, reply.attempt, reply.value, strict=True):
                reading = marks.get((step, attempt), "nan") if value is None else value
                values.setdefault((step, attempt), {})[metric] = reading
        if values:
            self._next_step = max(values)[0] + 1
        return [
            (*key, *(row.get(metric) for metric in _METRICS)) for key, row in sorted(values.items())
        ]

    def _write_steps(self, rows: list[_Row], *, with_header: bool) -> None:
        """Write queried steps to the terminal as a table, as CSV or as JSON lines."""
        if self._form is Format.JSON:
            for row in rows:
                write_json_line(dict(zip(_HEADER, row, strict=True)))
        elif rows or with_header:
            write_rows(_HEADER, rows, self._form, with_header=with_header, min_width=13)
        sys.stdout.flush()
