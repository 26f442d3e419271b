"""Rows of a span out of the lake: which of them, said in SQL, and their columns."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from vitals_collector.numbers.interface import (
    NOT_A_RANK,
    ORDER,
    Columns,
    Keyed,
    Span,
    in_order,
    none_of,
    rank_of,
)
from vitals_collector.numbers.lake_engine import Engine
from vitals_collector.numbers.lake_known import Known
from vitals_collector.numbers.lake_tables import (
    Places,
    expression,
    own_expression,
    table_of,
    to_column,
)


class Chosen(NamedTuple):
    """Which rows of a stream's table are asked for."""

    run: int
    joins: str
    where: str
    values: list[object]
    tables: dict[str, pa.Table]

    def also(self, where: str, *values: object) -> "Chosen":
        """Return those of which this holds as well."""
        return self._replace(where=f"{self.where} AND {where}", values=[*self.values, *values])


def chosen_of(span: Span, run: int, places: Places) -> Chosen:
    """Return the rows of a span of the run with this number."""
    chosen = Chosen(run, "", "run = ?", [run], {})
    if span.sources:
        chosen = of_sources(chosen, span.sources)
    for side, bound in (
        ("step >= ?", span.from_step),
        ("step < ?", span.to_step),
        ("time_unix_ns >= ?", span.from_unix_ns),
        ("time_unix_ns < ?", span.to_unix_ns),
    ):
        if bound is not None:
            chosen = chosen.also(side, bound)
    if span.seqs is not None:
        chosen = of_seqs(chosen, span.seqs)
    return chosen if span.keyed is None else _of_key(chosen, span.keyed, places)


def of_sources(chosen: Chosen, sources: Iterable[str]) -> Chosen:
    """Return those of these sources."""
    ranks = sorted({rank_of(source) for source in sources} - {NOT_A_RANK})
    others = [source for source in sources if rank_of(source) == NOT_A_RANK]
    sides, values = list[str](), list[object]()
    if ranks:
        sides.append(f"rank IN ({', '.join(map(str, ranks))})")
    if others:
        sides.append(f"source IN ({', '.join('?' * len(others))})")
        values += others
    return chosen.also(f"({' OR '.join(sides)})", *values)


def of_seqs(chosen: Chosen, seqs: Mapping[str, tuple[int, int]]) -> Chosen:
    """Return those of these writers, each with its first number and the one behind its last."""
    bounds = table_of(
        ("incarnation", "first_seq", "end_seq"),
        [(incarnation, *bounds) for incarnation, bounds in seqs.items()],
    )
    if not seqs:
        return chosen.also("false")
    # What can be skipped is skipped by these; what holds for each writer is joined.
    chosen = chosen.also("seq >= ?", min(first for first, _ in seqs.values()))
    chosen = chosen.also("seq < ?", max(end for _, end in seqs.values()))
    return chosen._replace(
        joins=f"{chosen.joins} JOIN span_seqs USING (incarnation)",
        tables={**chosen.tables, "span_seqs": bounds},
    ).also("seq >= first_seq AND seq < end_seq")


def _of_key(chosen: Chosen, keyed: Keyed, places: Places) -> Chosen:
    column = own_expression(keyed.column, places)
    if (keyed.column, "S") in places or keyed.number_of == {}:
        return chosen.also("false")
    if isinstance(keyed.number_of, int):
        return chosen.also(f"{column} = ?", keyed.number_of)
    keys = table_of(("incarnation", "span_key"), keyed.number_of.items())
    return chosen._replace(
        joins=f"{chosen.joins} JOIN span_keys USING (incarnation)",
        tables={**chosen.tables, "span_keys": keys},
    ).also(f"{column} = span_key")


def select(engine: Engine, stream: str, chosen: Chosen, expressions: Mapping[str, str]) -> pa.Table:
    """Return what the expressions give of the chosen rows, by their names, in no order.

    Raises:
        StorageError: a file that may hold some of them is damaged.
    """
    engine.files.need(stream, chosen.run)
    listed = ", ".join(f"{sql} AS c{i}" for i, sql in enumerate(expressions.values()))
    answer = engine.ask(
        f"SELECT {listed} FROM {stream}{chosen.joins} WHERE {chosen.where}",
        chosen.values,
        chosen.tables,
    )
    return answer.rename_columns(list(expressions))


def located(known: Known, span: Span) -> tuple[int, Places] | None:
    """Return the run's number and the places of its columns; None where it has no such rows."""
    places = known.columns(span.run_id, span.stream)
    return (known.runs[span.run_id], places) if places else None


def scan(engine: Engine, known: Known, span: Span, names: Sequence[str]) -> Columns:
    """Return columns of the rows in the span, in order."""
    wanted = tuple(dict.fromkeys((*ORDER, *names)))
    place = located(known, span)
    if place is None:
        return {name: none_of(0) for name in names}
    run, places = place
    chosen = chosen_of(span, run, places)
    rows = select(engine, span.stream, chosen, {n: expression(n, places) for n in wanted})
    return in_order({name: to_column(rows[name]) for name in wanted}, names)


def num_rows(engine: Engine, known: Known, span: Span) -> int:
    """Return how many rows the span has."""
    place = located(known, span)
    if place is None:
        return 0
    counted = select(engine, span.stream, chosen_of(span, *place), {"num": "count(*)"})
    return int(counted["num"][0].as_py())


def last_steps(engine: Engine, known: Known, run_id: str) -> dict[int, int]:
    """Return the last step of each attempt that has rows of steps."""
    place = located(known, Span(run_id, "steps"))
    if place is None:
        return {}
    answer = engine.ask(
        "SELECT attempt, max(step) AS step FROM steps"
        " WHERE run = ? AND attempt IS NOT NULL AND step IS NOT NULL GROUP BY attempt",
        [place[0]],
    )
    return dict(zip(answer["attempt"].to_pylist(), answer["step"].to_pylist(), strict=True))
