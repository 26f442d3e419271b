"""What the SQL database keeps is asked together with the lake: names, decisions, ends of runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert

from tests.collector.numbers.written import OTHER_RUN, RUN, batch, identity
from trainvitals.errors import UsageError
from vitals_collector.numbers.interface import StepWindow
from vitals_collector.numbers.lake import Lake
from vitals_collector.numbers.lake_sql import LakeReader
from vitals_collector.storage import schema
from vitals_collector.storage.store import open_data_store

SECOND = 1_700_000_000_000_000_000


def write(connection: Connection) -> None:
    """Store what a collector would of a run that skipped a step and ended."""
    named = {"run_id": RUN, "name": "small", "project": "p", "user_name": "ada", "info": b"secret"}
    connection.execute(insert(schema.runs), named)
    connection.execute(
        insert(schema.runs),
        {"run_id": OTHER_RUN, "name": "large", "started_unix_ns": SECOND},
    )
    who = {"run_id": RUN, "incarnation": identity().incarnation}
    connection.execute(
        insert(schema.sources),
        [
            who
            | {"source": "rank:0", "rank": 0, "last_step": 2, "loss": 1.5}
            | {"ended_state": "finished"}
        ],
    )
    connection.execute(
        insert(schema.names),
        [
            who | {"stream": "scalars", "id": 1, "name": "eval/loss"},
            who | {"stream": "layers", "id": 1, "name": "blocks.0"},
        ],
    )
    connection.execute(
        insert(schema.decisions),
        who
        | {"seq": 1, "action": "skip", "step": 2, "rule": "nonfinite", "acted": True}
        | {"time_unix_ns": SECOND, "body": b"secret"},
    )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LakeReader]:
    """Give a reader of a collector's data folder while the collector holds it open."""
    tmp_path = tmp_path_factory.mktemp("collector") / "data"
    store = open_data_store(tmp_path)
    with store.write() as connection:
        write(connection)
    lake = Lake(tmp_path / "lake")
    lake.append([batch(identity(), [{"loss": 1.5, "Loss": 2.5, "run_id": 1.0}])])
    lake.append([batch(identity(), [{"loss": 4}], first_seq=1, kinds={"loss": "i8"})])
    kinds = {"name": "i8", "value": "f8"}
    rows = [{"name": 1, "value": 0.5}, {"name": 2, "value": 0.25}]
    lake.append([batch(identity(), rows, kinds=kinds, stream="scalars")])
    kinds = {"layer": "i8", "grad_norm": "f8"}
    rows = [{"layer": 1, "grad_norm": 2.0}]
    lake.append([batch(identity(), rows, kinds=kinds, stream="layers")])
    with LakeReader(tmp_path / "lake", database=tmp_path / "vitals.db") as reader:
        yield reader
    lake.close()
    store.close()


def test_names_stand_where_rows_have_numbers(reader: LakeReader) -> None:
    assert reader.ask("SELECT name, value FROM scalars ORDER BY value").rows == [
        ("2", 0.25),  # its name has not come yet
        ("eval/loss", 0.5),
    ]
    assert reader.ask("SELECT run_id, layer, grad_norm FROM layers").rows == [
        (RUN, "blocks.0", 2.0)
    ]


def test_a_column_of_two_types_is_one_and_names_that_differ_by_case_are_two(
    reader: LakeReader,
) -> None:
    assert reader.ask("SELECT loss FROM steps ORDER BY step").rows == [(1.5,), (4.0,)]
    names = reader.ask("FROM steps").names
    assert len(names) == len({name.casefold() for name in names})
    assert {"run_id", "rank", "step", "time", "loss"} <= set(names)
    assert "run" not in names
    assert "$epoch" not in names


def test_old_steps_are_asked_for_as_levels(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for rank in range(4):
        lake.append([batch(identity(rank=rank), [{"rank_loss": float(rank)}])])
    lake.roll_up(RUN, StepWindow(1, 0, 512), 1)
    with LakeReader(tmp_path) as reader:
        asked = 'SELECT step, num_ranks, "rank_loss:max" FROM levels'
        assert reader.ask(asked).rows == [(0, 3, 3.0)]
        assert len(reader.ask("FROM ranks").rows) == 2
    lake.close()


def test_every_view_answers_and_none_shows_bodies(reader: LakeReader) -> None:
    assert {"runs", "decisions", "findings", "alerts", "checkpoints", "events", "annotations"} <= (
        set(reader.views)
    )
    for view in reader.views:
        answer = reader.ask(f"FROM {view}")
        assert "run_id" in answer.names
        assert "secret" not in str(answer.rows)
        assert "body" not in answer.names
    assert reader.ask("SELECT step, action, acted, time::VARCHAR FROM decisions").rows == [
        (2, "skip", True, "2023-11-14 22:13:20")
    ]


def test_runs_say_how_they_ended_and_numbers_are_joined_to_them(reader: LakeReader) -> None:
    assert reader.ask(
        'SELECT run_id, name, "user", last_step, loss, ended_state, started IS NULL FROM runs'
        " ORDER BY run_id"
    ).rows == [
        (RUN, "small", "ada", 2, 1.5, "finished", True),
        (OTHER_RUN, "large", "", None, None, "", False),
    ]
    assert reader.ask(
        "SELECT max(s.loss) FROM steps s JOIN runs USING (run_id) WHERE runs.name = 'small'"
    ).rows == [(4.0,)]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM db.commands",
        "SELECT * FROM db.engine_state",
        "SELECT * FROM audit",
        'SELECT * FROM "db"."runs"',
        "SELECT * FROM db.main.decisions",
        "SELECT (SELECT body FROM db.alerts LIMIT 1)",
        "WITH commands AS (SELECT 1) SELECT * FROM commands",
        "SELECT * FROM sqlite_query('db', 'SELECT * FROM commands')",
        "SELECT body FROM decisions",
        "SELECT info FROM runs",
    ],
)
def test_the_collectors_own_tables_are_out_of_reach(reader: LakeReader, sql: str) -> None:
    with pytest.raises(UsageError):
        reader.ask(sql)
