"""Tables by conditions: their grammar, and the rows that meet them."""

import math
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collector.lookback import BACK_TO, BAD, troubled_run
from tests.collector.rows import OTHER_RUN, RUN, Writer
from tests.support.examples import examples
from tests.support.queries import query
from tests.support.rolled_memory import RolledMemory
from tests.support.served import Served
from trainvitals.errors import UsageError
from trainvitals.records import AttemptStarted, Note, RunInfo, RunStarted
from trainvitals.views import Branch, TableQuestion, TableReply
from vitals_collector.ingest.ingest import ingest
from vitals_collector.numbers.chunk_stats import CHUNK_STEPS
from vitals_collector.numbers.interface import StepWindow
from vitals_collector.queries import step_tables
from vitals_collector.queries.conditions import OPERATORS, Kind, parse
from vitals_collector.storage.store import Store

BRANCHES: tuple[Branch, ...] = get_args(Branch)
COLUMNS: dict[str, Kind] = {"step": "number", "name": "text", "acted": "bool"}


def ask(store: Store, table: str, *where: str, run: str = RUN, **how) -> TableReply:
    return query(store).ask(TableQuestion(table=table, run_id=run, where=where, **how))


def rows(reply: TableReply) -> list[tuple]:
    return list(zip(*reply.data, strict=True))


def test_steps_of_the_lineage_are_those_that_no_rollback_left_behind(store: Store):
    troubled_run(store, num_after=60)
    own = ("step", "attempt", "loss")
    found = ask(store, "steps", columns=own, limit=1_000, branch="lineage")
    assert list(range(180)) == list(found.data[0])
    assert {1: BACK_TO, 2: 60} == {n: found.data[1].count(n) for n in (1, 2)}
    assert BAD + 2 - BACK_TO == found.num_discarded
    every = ask(store, "steps", "step >= 130", "loss < 2.02", limit=2, newest_first=True,
                branch="lineage")  # fmt: skip
    assert (20, [176, 175], 32) == (every.num_total, list(every.data[0]), every.num_discarded)
    assert ("step", "attempt", "time_unix_ns", "loss", "grad_norm") == every.columns[:5]
    assert 1.0 == every.data[4][0]
    between = ask(store, "steps", from_step=10, to_step=12, columns=("step",))
    assert [(10,), (11,), (12,)] == rows(between)
    nothing = ask(store, "steps", "skipped = 1")
    assert (0, ()) == (nothing.num_total, nothing.data[0])
    assert 0 == ask(store, "steps", to_step=BACK_TO - 1, branch="lineage").num_discarded


def test_what_was_rolled_back_is_found_and_told_from_what_was_trained_again(store: Store):
    troubled_run(store, num_after=60)
    own = ("step", "attempt", "loss")
    bad = ask(store, "steps", "loss = nan", columns=own)
    assert ([(BAD, 1, "nan")], 0) == (rows(bad), bad.num_discarded)
    assert rows(bad) == rows(ask(store, "steps", "loss = nan", columns=own, branch="discarded"))
    hidden = ask(store, "steps", "loss = nan", columns=own, branch="lineage")
    assert ([], BAD + 2 - BACK_TO) == (rows(hidden), hidden.num_discarded)

    whole = ask(store, "steps", columns=own[:2], limit=1_000)
    first, second = range(BAD + 2), range(BACK_TO, BACK_TO + 60)
    every = sorted([(step, 1) for step in first] + [(step, 2) for step in second])
    assert every == rows(whole)
    assert 222 == whole.num_total
    newest = ask(store, "steps", columns=own[:2], limit=30, newest_first=True)
    assert every[:-31:-1] == rows(newest)
    left = ask(store, "steps", columns=own[:2], branch="discarded", limit=1_000)
    assert [(step, 1) for step in range(BACK_TO, BAD + 2)] == rows(left)
    of_one = ask(store, "steps", f"step >= {BAD}", "attempt = 1", columns=own[:1])
    assert [(BAD,), (BAD + 1,)] == rows(of_one)

    own = ("step", "attempt", "rank", "rank_loss")
    at_bad = ask(store, "ranks", from_step=BAD, to_step=BAD, columns=own)
    assert [(BAD, 1, 0, 2.0), (BAD, 1, 1, "nan"), (BAD, 2, 0, 2.0), (BAD, 2, 1, 2.0)] == (
        rows(at_bad)
    )
    backwards = ask(
        store, "ranks", from_step=BAD, to_step=BAD, columns=own, newest_first=True, limit=3
    )
    assert [(2, 0), (2, 1), (1, 0)] == [row[1:3] for row in rows(backwards)]
    assert 2 * 42 == ask(store, "ranks", branch="lineage", limit=1).num_discarded


def test_rows_that_became_levels_are_missing_of_a_rolled_back_branch_alone(store: Store):
    store.numbers = numbers = RolledMemory()
    writers = [Writer(f"rank:{rank}", world_size=3) for rank in range(3)]
    ingest(store, writers[0].events(AttemptStarted(id=1, parent=None, fork_step=0, reason="start")))
    again = AttemptStarted(id=2, parent=1, fork_step=24, reason="rollback")
    ingest(store, writers[0].events(again, step=24, attempt=2))
    for rank, writer in enumerate(writers):
        ingest(store, writer.steps(range(40), step_duration_seconds=1.0 + rank))
        ingest(store, writer.steps(range(24, 64), attempt=2, step_duration_seconds=1.0 + rank))
    levelled = numbers.roll_up(RUN, StepWindow(1, 0, CHUNK_STEPS), num_worst=1)
    assert (40, ("rank:2",)) == (levelled.num_rows, levelled.kept)
    own = ("step", "attempt")
    rolled_back = [(step, 1) for step in range(24, 40)]
    assert rolled_back == rows(ask(store, "steps", branch="discarded", columns=own))
    assert 80 == ask(store, "steps").num_total
    assert rolled_back == rows(ask(store, "ranks", "rank = 2", branch="discarded", columns=own))
    left = {one: ask(store, "ranks", "rank = 1", branch=one).num_total for one in BRANCHES}
    assert {"all": 40, "lineage": 40, "discarded": 0} == left


def test_ranks_have_a_row_for_each_step_and_rank(store: Store):
    troubled_run(store, num_after=20)
    own = ("step", "rank", "rank_loss")
    found = ask(store, "ranks", from_step=138, columns=own, limit=3, branch="lineage")
    assert (4, [(138, 0, 2.03), (138, 1, 2.03), (139, 0, 2.04)]) == (found.num_total, rows(found))
    last = ask(store, "ranks", "rank = 1", "rank_loss >= 2.03", columns=own, limit=2,
               newest_first=True, branch="lineage")  # fmt: skip
    assert [(139, 1, 2.04), (138, 1, 2.03)] == rows(last)
    for none in (("rank = 1", "rank = 0"), ("rank = 7",), ("rank = 0.5",), ("rank = nan",)):
        assert 0 == ask(store, "ranks", *none).num_total
    assert 140 == ask(store, "ranks", "rank != 0", branch="lineage").num_total
    assert "loss" not in ask(store, "ranks", limit=1).columns


def test_rows_of_many_small_batches_keep_their_numbers_and_the_order_asked_for(store: Store):
    writers = [Writer(f"rank:{rank}") for rank in range(2)]
    for first in range(0, 120, 3):
        for rank, writer in enumerate(writers):
            losses = [1_000.0 * rank + step for step in range(first, first + 3)]
            ingest(store, writer.steps(range(first, first + 3), loss=1.0, rank_loss=losses))
    own = ("step", "rank", "rank_loss")
    expected = [(s, r, 1_000.0 * r + s) for s in range(120) for r in range(2)]
    assert expected == rows(ask(store, "ranks", columns=own, limit=1_000))
    some = [one for one in expected[::-1] if one[1] == 1 and one[2] >= 1_050]
    found = ask(store, "ranks", "rank = 1", "rank_loss >= 1050", columns=own, newest_first=True)
    assert some == rows(found)
    store.numbers.merge()
    assert found == ask(
        store, "ranks", "rank = 1", "rank_loss >= 1050", columns=own, newest_first=True
    )


def test_a_table_is_the_same_however_little_of_it_is_read_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    troubled_run(store, num_after=60)
    asked = [
        (table, where, branch, limit)
        for table in ("steps", "ranks")
        for where, limit in (((), 1_000), (("rank_loss > 2.02",), 7))
        for branch in BRANCHES
    ]

    def answers() -> list[TableReply]:
        return [ask(store, t, *where, branch=b, limit=n) for t, where, b, n in asked]

    whole = repr(answers())
    monkeypatch.setattr(step_tables, "_MOST_READ", 8)
    monkeypatch.setattr(step_tables, "_APART", 2)
    assert whole == repr(answers())


def test_numbers_that_json_has_not_are_words(store: Store):
    loss = [1.0, math.nan, math.inf, -math.inf, None]
    ingest(store, Writer().steps(range(5), loss=loss))
    assert [1.0, "nan", "inf", "-inf", None] == list(ask(store, "steps", columns=("loss",)).data[0])
    for condition, steps in {
        "loss = nan": [1],
        "loss != nan": [0, 2, 3],
        "loss > 1e300": [2],
        "loss < nan": [],
        "loss = none": [4],
        "loss != none": [0, 1, 2, 3],
        "loss <= 1": [0, 3],
        "step = 99999999999999999999999": [],
        "step < 99999999999999999999999": [0, 1, 2, 3, 4],
    }.items():
        assert steps == list(ask(store, "steps", condition, columns=("step",)).data[0]), condition


def test_what_is_listed_can_be_asked_of_one_run_and_of_all(store: Store):
    troubled_run(store)
    other = Writer(run=OTHER_RUN)
    ingest(store, other.events(RunStarted(info=RunInfo(name="Tiny GPT", tags=("a", "b")))))
    ingest(store, other.events(Note(code="c", text="50 % done, or not")))
    assert 2 == ask(store, "runs", run="").num_total
    tiny = ask(store, "runs", "name ~ gpt", run="", columns=("name", "tags", "loss"))
    assert [("Tiny GPT", "a, b", None)] == rows(tiny)
    back = ask(store, "decisions", "acted = yes", "action = rollback", "cost_steps < 1")
    assert (1, "the storm did not end") == (
        back.num_total, back.data[back.columns.index("reason")][0],
    )  # fmt: skip
    assert 1 == ask(store, "findings", "level = advisory", run="").num_total
    assert 2 == ask(store, "findings", from_step=BAD).num_total
    assert 0 == ask(store, "alerts").num_total
    newest = ask(store, "events", "kind = 'Note'", run="", columns=("text",), newest_first=True)
    assert [("Xid 48 on GPU-1 [gpu_xid]",), ("50 % done, or not [c]",)] == rows(newest)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"table": "steps", "where": ("los > 3",)}, "no column 'los'(?s:.*)did you mean loss"),
        ({"table": "steps", "where": ("loss => 3",)}, "'=>' in 'loss => 3' is not an operator"),
        ({"table": "steps", "where": ("loss",)}, "is not COLUMN OP VALUE"),
        ({"table": "steps", "where": ("loss > high",)}, "loss is a number; 'high' is not one"),
        ({"table": "steps", "where": ("loss ~ 3",)}, "loss is a number; ~ is not for it"),
        ({"table": "decisions", "where": ("acted = perhaps",)}, "yes or no, not 'perhaps'"),
        ({"table": "decisions", "where": ("acted < true",)}, "< is not for it"),
        ({"table": "runs", "where": ("name =",)}, "has no value"),
        ({"table": "runs", "where": ("x" * 501,)}, "has 501 characters"),
        ({"table": "runs", "where": ("name = a",) * 33}, "33 conditions"),
        ({"table": "runs", "columns": ("nam",)}, "no column 'nam'(?s:.*)did you mean name"),
        ({"table": "runs", "from_step": 1}, "runs have none"),
        ({"table": "findings", "branch": "lineage"}, "findings are always of all attempts"),
        ({"table": "steps", "run_id": ""}, "steps need one run"),
        ({"table": "steps", "run_id": "nobody"}, "there is no run nobody"),
        ({"table": "steps", "limit": 0}, "limit is 0"),
        ({"table": "steps", "limit": 1_000_001}, "limit is 1000001"),
        ({"table": "steps", "to_step": 2**63}, "to_step is 9223372036854775808"),
    ],
)
def test_a_question_that_cannot_be_answered_says_what_could(how: dict, said: str):
    from vitals_collector.storage.store import open_store

    store = open_store("sqlite://")
    ingest(store, Writer().steps([0], loss=1.0))
    with pytest.raises(UsageError, match=said):
        query(store).ask(TableQuestion(**({"run_id": RUN} | how)))
    store.close()


_WORDS = st.sampled_from(["step", "name", "acted", *OPERATORS, "3", "1e999", "'", '"', " ", "nan"])


@settings(max_examples=examples(300), deadline=None)
@given(st.one_of(st.text(), st.lists(_WORDS, max_size=6).map("".join)))
def test_any_text_is_a_condition_or_an_error_that_says_so(text: str):
    try:
        (found,) = parse([text], COLUMNS)
    except UsageError as error:
        assert error.text
        return
    assert found.column in COLUMNS
    assert found.op in OPERATORS


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from(["step", "loss", "rank_loss", "attempt"]),
    st.sampled_from(OPERATORS[:-1]),
    st.one_of(st.integers(), st.floats()),
)
def test_any_number_can_be_asked_for(column: str, op: str, value: float):
    from vitals_collector.queries.query import Query
    from vitals_collector.storage.store import open_store

    store = open_store("sqlite://")
    ingest(store, Writer().steps([1, 2], loss=[1.0, math.nan]))
    asked = TableQuestion(table="steps", run_id=RUN, where=(f"{column} {op} {value!r}",))
    found = Query(store, clock=_Clock()).ask(asked)
    store.close()
    assert found.num_total <= 2
    assert msgspec.json.decode(msgspec.json.encode(found), type=TableReply) == found


class _Clock:
    def time_ns(self) -> int:
        return 0

    def monotonic_ns(self) -> int:
        return 0


def test_a_table_comes_over_http_as_it_is_in_the_store(served: Served):
    troubled_run(served.store, num_after=5)
    asked = TableQuestion(table="steps", run_id=RUN, where=("loss > 2",), columns=("step", "loss"))
    with served.client() as client:
        assert query(served.store).ask(asked) == client.ask(asked)
        with pytest.raises(UsageError, match="did you mean loss"):
            client.ask(msgspec.structs.replace(asked, where=("losss > 2",)))
    assert (
        401
        == served.request(
            "POST",
            "/v1/tables",
            "none",
            content=b"{}",
            headers={"Content-Type": "application/json"},
        ).status_code
    )
