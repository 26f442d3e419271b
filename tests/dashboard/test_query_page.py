import io
import json
from collections.abc import Callable

import pyarrow.parquet
from streamlit.testing.v1 import AppTest

from tests.dashboard import samples
from tests.dashboard.conftest import texts
from tests.dashboard.stub import Stub
from trainvitals.views import Problem, TableReply
from vitals_dashboard import exports

Open = Callable[..., AppTest]


def shown(app: AppTest) -> str:
    """Return what a page says; it never shows a traceback."""
    assert [] == list(app.exception)
    return texts(app)


REPLY = TableReply(
    columns=("step", "loss", "name", "acted", "time_unix_ns"),
    data=(
        (1, 2, 3),
        (2.5, "nan", "-inf"),
        ("=HYPERLINK(1)", " @SUM(1)", "-1"),
        (True, None, False),
        (samples.NOW_NS, 0, None),
    ),
    num_total=7,
    num_discarded=66,
)


def test_a_question_comes_from_the_address_and_its_answer_is_counted(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    stub.table = REPLY
    address = {"table": "steps", "where": "loss > 3\n\n skipped = 1", "columns": "step, loss"}
    address |= {"from": "10", "branch": "lineage"}
    app = open_page("query", run=samples.run_id(1), newest="true", limit="5", **address)
    assert "3 of 7 rows match; raise the number of rows to see more; 66 rolled-back rows" in shown(
        app
    )
    asked = stub.questions[-1]
    assert ("steps", samples.run_id(1), ("loss > 3", "skipped = 1"), ("step", "loss")) == (
        asked.table, asked.run_id, asked.where, asked.columns,
    )  # fmt: skip
    assert (10, None, True, 5, "lineage") == (
        asked.from_step, asked.to_step, asked.newest_first, asked.limit, asked.branch,
    )  # fmt: skip
    assert 3 == len(app.dataframe[0].value)


def test_a_small_rate_is_shown_with_its_digits(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    rates = (2.1216e-4, None, 3e-5)
    stub.table = TableReply(
        columns=("step", "learning_rate"), data=((1, None, 3), rates), num_total=3, num_discarded=0
    )
    app = open_page("query", run=samples.run_id(1), table="steps")
    formats = json.loads(app.dataframe[0].proto.columns)
    assert "%.9g" == formats["learning_rate"]["type_config"]["format"]
    assert "format" not in formats["step"].get("type_config", {})


def test_what_cannot_be_asked_is_said_with_the_way_out(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    app = open_page("query", table="ranks")
    assert "Pick a run to query" in shown(app) and [] == stub.questions
    stub.table = Problem(code="V100", text="there is no column 'los'", hint="did you mean loss?")
    said = shown(open_page("query", table="runs", where="los > 3"))
    assert "Invalid query" in said and "did you mean loss?" in said
    stub.table = TableReply(columns=("name",), data=((),), num_total=0)
    assert "No row matches all conditions." in shown(open_page("query", table="runs"))


def test_an_answer_stands_still_unless_it_is_to_follow_the_run(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    stub.table = REPLY
    how = {"run": samples.run_id(1), "newest": "true"}
    app = open_page("query", **how)
    assert [False] == [toggle.value for toggle in app.toggle if toggle.key == "live"]
    stub.broken = True
    assert "tries again by itself" not in shown(app.run())
    assert "Try again" in [button.label for button in app.button]
    app.toggle(key="live").set_value(True).run()
    assert "This page retries by itself." in shown(app)
    assert "Try again" not in [button.label for button in app.button]
    stub.broken = False
    assert "3 of 7 rows" in shown(app.run())
    app = open_page("query", live="true", **how)
    assert [True] == [toggle.value for toggle in app.toggle if toggle.key == "live"]


def test_every_branch_is_asked_for_unless_one_is_chosen(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    stub.table = REPLY
    app = open_page("query", run=samples.run_id(1), table="ranks")
    assert "all" == stub.questions[-1].branch
    app.selectbox(key="branch").set_value("discarded").run()
    assert "discarded" == stub.questions[-1].branch
    app.button_group(key="table").set_value("decisions").run()
    assert ("decisions", "all") == (stub.questions[-1].table, stub.questions[-1].branch)


def test_a_run_that_is_not_here_is_said_and_not_asked_for(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    stub.table = REPLY
    app = open_page("query", run="nope", table="decisions")
    assert "Run not found" in shown(app) and "There is no run nope" in shown(app)
    assert [] == stub.questions and None is app.selectbox(key="query_run").value
    app.selectbox(key="query_run").set_value(samples.run_id(1)).run()
    assert "not here" not in shown(app)
    assert samples.run_id(1) == stub.questions[-1].run_id
    app.selectbox(key="query_run").set_value("all runs").run()
    assert ("", "decisions") == (stub.questions[-1].run_id, stub.questions[-1].table)


def test_no_text_of_a_csv_is_run_as_a_formula_and_numbers_are_whole() -> None:
    lines = exports.csv_bytes(REPLY).decode().splitlines()
    assert "step,loss,name,acted,time_unix_ns" == lines[0]
    assert f"1,2.5,'=HYPERLINK(1),True,{samples.NOW_NS}" == lines[1]
    assert "2,nan,' @SUM(1),,0" == lines[2]
    assert "3,-inf,-1,False," == lines[3]


def test_parquet_has_a_type_for_each_column() -> None:
    table = pyarrow.parquet.read_table(io.BytesIO(exports.parquet_bytes(REPLY)))
    kinds = [str(field.type) for field in table.schema]
    assert ["int64", "double", "string", "bool", "int64"] == kinds
    assert [True, None, False] == table["acted"].to_pylist()
