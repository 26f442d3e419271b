"""Old rows of layers and hosts: every tenth step stays, and the least and greatest of each minute.

Layers: the first of every so many steps stays. Samples of a GPU, node or process: each stretch of
time becomes two rows, the first with the least value of every column, the second with the greatest,
so a peak stays to be seen and a counter keeps its first and its last. Text is that of the ends. A
sample with a value that is not finite stays as it is.
One commit takes a window's rows away, puts what is left in their place, and says which they were.
"""

import pyarrow as pa

from vitals_collector.numbers.interface import HOST_STREAMS, Due, Reason, Span, Thinned, Window
from vitals_collector.numbers.lake_engine import Engine
from vitals_collector.numbers.lake_known import LEVELLED, LEVELLED_COLUMNS, Known
from vitals_collector.numbers.lake_scan import located
from vitals_collector.numbers.lake_tables import (
    KEYS,
    Places,
    own_expression,
    quoted,
    table_of,
)

_GROUP = ("run", "incarnation", "source", "rank", "$epoch")


def next_window(
    engine: Engine, known: Known, run_id: str, stream: str, attempt: int, size: int
) -> Due | None:
    """Return the oldest window of a stream's rows that were not thinned yet; None where none is.

    Of steps those of ranks other than 0. Of hosts, nanoseconds stand for steps, and all attempts
    are one.
    """
    place = located(known, Span(run_id, stream))
    if place is None:
        return None
    run = place[0]
    where, along = _where(stream, attempt)
    done = engine.ask(
        f"SELECT max(end_at) AS at FROM {LEVELLED}"
        f" WHERE run = ? AND stream = '{stream}' AND attempt = ?",
        [run, attempt],
    )["at"].to_pylist()[0]
    # The first alone: groups of rows that begin behind the least one so far are skipped.
    first = engine.ask(
        f"SELECT {along} AS at FROM {stream} WHERE run = ? AND {where} AND {along} >= ?"
        f" ORDER BY {along} LIMIT 1",
        [run, -(2**62) if done is None else done],
    )["at"].to_pylist()
    if not first:
        return None
    start = first[0] // size * size
    window = Window(attempt, start, start + size)
    writers = engine.ask(
        f"SELECT incarnation, max(seq) AS seq, coalesce(max(time_unix_ns), 0) AS at FROM {stream}"
        f" WHERE run = ? AND {where} AND {along} >= ? AND {along} < ? GROUP BY incarnation",
        [run, window.first_step, window.end_step],
    )
    incarnations, seqs, times = writers.to_pydict().values()
    return Due(window, max(times), dict(zip(incarnations, seqs, strict=True)))


def _where(stream: str, attempt: int) -> tuple[str, str]:
    """Return which rows a window is of, and along what."""
    if stream in HOST_STREAMS:
        return "true", "time_unix_ns"
    return f"attempt = {attempt}" + (" AND rank > 0" if stream == "steps" else ""), "step"


def thin(
    engine: Engine,
    known: Known,
    run_id: str,
    stream: str,
    window: Window,
    every: int,
    *,
    is_whole: bool,
    reason: Reason,
) -> int:
    """Thin a window of layers or of a host's samples; return how many rows went.

    Args:
        engine: the lake.
        known: what is remembered of it.
        run_id: the run.
        stream: ``layers``, or one of hosts.
        window: as ``next_window`` gives it.
        every: steps of layers, or nanoseconds of samples.
        is_whole: let every row stay.
        reason: what ``thinned`` says of it.

    Raises:
        StorageError: nothing was changed, or it is to be called again.
    """
    place = located(known, Span(run_id, stream))
    if place is None:
        return 0
    run, places = place
    where, along = _where(stream, window.attempt)
    rows = (
        f"run = {run} AND {where} AND {along} >= {window.first_step}"
        f" AND {along} < {window.end_step}"
    )
    engine.files.need(stream, run)
    with engine.transaction():
        before = _writers(engine, stream, rows)
        if stream in HOST_STREAMS and not is_whole:
            ends = engine.read(_ends(stream, rows, places, every))
            engine.execute(f"DELETE FROM {stream} WHERE {rows}")
            engine.insert(stream, ends)
        elif not is_whole:
            firsts = f"SELECT min(step) FROM {stream} WHERE {rows} GROUP BY step // {every}"
            engine.execute(f"DELETE FROM {stream} WHERE {rows} AND step NOT IN ({firsts})")
        left = before if is_whole else _writers(engine, stream, rows)
        num_left = dict(zip(*(left[name].to_pylist() for name in ("writer", "num")), strict=True))
        listed = [
            (run, stream, *window, writer, first, last, num - num_left.get(writer, 0), reason)
            for writer, first, last, num in zip(*before.to_pydict().values(), strict=True)
        ]
        engine.insert(LEVELLED, table_of(LEVELLED_COLUMNS, listed))
    return len(before) and sum(before["num"].to_pylist()) - sum(num_left.values())


def _writers(engine: Engine, stream: str, rows: str) -> pa.Table:
    return engine.read(
        "SELECT incarnation AS writer, min(seq) AS first, max(seq) AS last, count(*) AS num"
        f" FROM {stream} WHERE {rows} GROUP BY incarnation"
    )


def _ends(stream: str, rows: str, places: Places, every: int) -> str:
    """Return the question for what is left of samples: of two or fewer, all."""
    keys = ", ".join(map(quoted, _GROUP))
    # A node's samples of several GPUs are told apart by the stream's own column.
    of = own_expression("rank", places)
    broken = [f"NOT isfinite({quoted(name)})" for (_, kind), name in places.items() if kind == "f8"]
    is_broken = " OR ".join(f"coalesce({each}, false)" for each in broken) or "false"
    columns = [*_GROUP, "seq", *places.values()]
    # What is not finite stays to be seen, and hides no peak of its minute.
    sides = [
        f"SELECT {', '.join(map(quoted, columns))} FROM {stream} WHERE {rows} AND ({is_broken})"
    ]
    for extreme in ("min", "max"):
        columns = [f"{extreme}(seq) AS seq"]
        for (_, kind), name in places.items():
            value = f"arg_{extreme}({quoted(name)}, seq)" if kind == "S" else ""
            columns.append(f"{value or f'{extreme}({quoted(name)})'} AS {quoted(name)}")
        is_two = "" if extreme == "min" else " HAVING count(*) > 1"
        sides.append(
            f"SELECT {keys}, {', '.join(columns)} FROM {stream} WHERE {rows} AND NOT ({is_broken})"
            f" GROUP BY {keys}, {of}, time_unix_ns // {every}{is_two}"
        )
    return " UNION ALL BY NAME ".join(sides)


def thinned(engine: Engine, known: Known, run_id: str) -> list[Thinned]:
    """Return what was taken away of the run, by stream and reason."""
    run = known.number(run_id)
    if run is None:
        return []
    taken = engine.ask(
        "SELECT stream, reason, sum(num_taken)::BIGINT AS num, max(end_at) AS end_at"
        f" FROM {LEVELLED} WHERE run = ? AND num_taken > 0 GROUP BY ALL ORDER BY ALL",
        [run],
    )
    return [
        Thinned(stream, reason, num, -1, end)
        if stream in HOST_STREAMS
        else Thinned(stream, reason, num, end - 1, 0)
        for stream, reason, num, end in zip(*taken.to_pydict().values(), strict=True)
    ]


assert set(_GROUP) < set(KEYS), "all but the number"
