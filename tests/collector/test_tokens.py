"""Tokens of owners, for projects and runs: what each refusal says, over real HTTP."""

import re
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select
from typer.testing import CliRunner

from tests.collector.alerting import decision
from tests.collector.rows import OTHER_RUN, RUN, Writer, num_stored
from tests.support.examples import examples
from tests.support.served import Served
from tests.support.tokens import token
from trainvitals.cli.main import build_app
from trainvitals.errors import (
    ForeignBatchError,
    UnauthorizedError,
    UsageError,
)
from trainvitals.io.client import CollectorClient, read_tokens
from trainvitals.question import ROUTES
from trainvitals.records import RunEnded, RunInfo, RunStarted
from trainvitals.views import (
    AckRequest,
    AlertsQuestion,
    AnnotationRequest,
    CommandRequest,
    CommandsQuestion,
    DifferenceQuestion,
    EndSilenceRequest,
    RunQuestion,
    RunsQuestion,
    SilenceRequest,
    SilencesQuestion,
    TableQuestion,
)
from vitals_collector.api.app import CollectorSettings
from vitals_collector.ingest.ingest import store_bodies
from vitals_collector.queries.query import _OF_ALL_RUNS
from vitals_collector.storage import tokens
from vitals_collector.storage.schema import audit, runs, sources
from vitals_collector.storage.store import open_store
from vitals_collector.storage.tokens import Principal

DAY = 86_400


def client(served: Served, secret: str) -> CollectorClient:
    return served.client_with(secret)


def send(served: Served, secret: str, *raws: bytes, writer_key: str = "") -> list[str]:
    """Return the code that each batch is answered with; "" where it was taken."""
    with client(served, secret) as sender:
        try:
            return [reply.code for reply in sender.ingest_all(raws, writer_key=writer_key)]
        except ForeignBatchError as error:
            return [error.code] * len(raws)


def id_of(served: Served, owner: str) -> str:
    with served.store.read_transaction() as connection:
        (found,) = [row for row in tokens.list_tokens(connection) if row.owner == owner]
    return found.token_id


def started(writer: Writer, project: str = "") -> bytes:
    return writer.events(RunStarted(info=RunInfo(name="tiny", project=project)))


# ------------------------------------------------------------------------------------- who writes


def test_a_batch_of_another_run_is_refused_alone_and_the_rest_of_the_body_is_stored(served: Served):
    secret = token(served, "ada", run_id=RUN)
    mine, other = Writer(), Writer(run=OTHER_RUN)
    assert ["", "V240", ""] == send(
        served, secret, mine.steps([0]), other.steps([0]), mine.steps([1])
    )
    assert ["V240"] == send(served, secret, other.events(RunEnded(state="halted")))
    with served.store.read_transaction() as connection:
        assert [RUN] == list(connection.execute(select(runs.c.run_id)).scalars())
    assert {"V240": 2} == served.store.counters.rejected


def test_a_run_belongs_to_the_owner_who_began_it(served: Served):
    ada, eve = token(served, "ada"), token(served, "eve")
    assert [""] == send(served, ada, Writer().steps([0]))
    for batch in (
        Writer("rank:1").steps([0]),
        Writer("node:b").node_rows([0]),
        Writer().events(RunEnded(state="halted")),
    ):
        assert ["V240"] == send(served, eve, batch)
    with served.store.read_transaction() as connection:
        assert 1 == len(connection.execute(select(sources)).all()), "nothing of it is known"
    second = token(served, "ada")
    assert [""] == send(served, second, Writer("rank:1").steps([0])), "another node's agent"


def test_rows_and_events_of_a_start_are_of_the_token_that_began_it(served: Served):
    ada, again = token(served, "ada"), token(served, "ada")
    writer = Writer()
    assert [""] == send(served, ada, writer.steps([0]))
    for batch in (writer.steps([1]), writer.events(RunEnded(state="halted"))):
        assert ["V240"] == send(served, again, batch)
    writer.next_seq = {"steps": 1}
    assert [""] == send(served, ada, writer.steps([1]))


def test_a_rotated_token_stays_the_one_that_began_it(served: Served):
    writer = Writer()
    before = token(served, "ada")
    send(served, before, writer.steps([0]))
    with served.store.write() as connection:
        _, after = tokens.rotate(
            connection,
            id_of(served, "ada"),
            overlap_seconds=3600.0,
            by="test",
            now_unix_ns=time.time_ns(),
        )
    served.app.state.known_tokens.reload()
    assert [""] == send(served, after, writer.steps([1]))
    assert [""] == send(served, before, writer.steps([2])), "for as long as the overlap"


def test_the_token_files_own_token_writes_to_what_it_began_and_to_nothing_of_others(served: Served):
    own, eve = served.tokens.ingest, token(served, "eve")
    writer, theirs = Writer(), Writer(run=OTHER_RUN)
    assert ["", ""] == send(served, own, writer.steps([0]), started(writer))
    assert ["V240"] == send(served, eve, writer.steps([1]))
    assert ["V240"] == send(served, eve, Writer("rank:1").steps([0]))
    assert [""] == send(served, eve, theirs.steps([0]))
    assert ["V240"] == send(served, own, theirs.steps([1], lose=1_000_000))
    assert ["V240"] == send(served, own, Writer("rank:1", run=OTHER_RUN).steps([0]))
    assert [""] == send(served, own, Writer("rank:1").steps([0])), "another start of its own run"


def test_only_the_key_of_a_writers_first_batch_opens_its_streams(served: Served):
    own, rank = served.tokens.ingest, Writer("rank:0")
    assert [""] == send(served, own, rank.steps([0]), writer_key="a" * 64)
    forged = rank.steps([1], lose=1_000_000)
    for key in ("", "b" * 64):
        assert ["V241"] == send(served, own, forged, writer_key=key)
        assert ["V241"] == send(served, own, started(rank), writer_key=key)  # a new stream of it
        rank.next_seq.update(steps=1, events=0)
    assert [""] == send(served, own, rank.steps([1]), writer_key="a" * 64)
    assert [""] == send(served, own, started(rank), writer_key="a" * 64)
    # Each node of a job has its own key, and so has a replaced one.
    assert [""] == send(served, own, Writer("rank:1").steps([0]), writer_key="b" * 64)
    assert [""] == send(served, own, Writer("rank:0").steps([2]), writer_key="c" * 64)
    assert {"V241": 4} == served.store.counters.rejected


def test_a_start_without_a_key_needs_none(served: Served):
    own, rank = served.tokens.ingest, Writer("rank:0")
    assert [""] == send(served, own, rank.steps([0]))
    assert [""] == send(served, own, rank.steps([1]), writer_key="a" * 64)  # upgraded agent
    assert [""] == send(served, own, rank.steps([2]))


def test_a_project_is_shared_by_its_tokens_and_nobody_else(served: Served):
    ada = token(served, "ada", project="llm")
    bob = token(served, "bob", project="llm")
    eve = token(served, "eve", project="vision")
    writer = Writer()
    assert ["", ""] == send(served, ada, writer.steps([0]), started(writer))
    assert [""] == send(served, bob, Writer("rank:1").steps([0]))
    assert ["V240"] == send(served, eve, Writer("rank:1").steps([0]))
    with served.client() as reader:
        assert ["llm"] == [run.project for run in reader.ask(RunsQuestion())]


def test_a_run_that_names_another_project_than_its_token_is_refused(served: Served):
    ada = token(served, "ada", project="llm")
    writer = Writer()
    with (
        pytest.raises(ForeignBatchError, match="project 'vision'") as caught,
        client(served, ada) as sender,
    ):
        sender.ingest(started(writer, "vision"))
    assert "VITALS_PROJECT" in caught.value.hint
    assert [""] == send(served, ada, started(Writer(), "llm"))


def test_a_project_token_joins_a_run_once_that_is_known_to_be_of_its_project(served: Served):
    writer = Writer()
    joining = token(served, "bob", project="llm")
    send(served, served.tokens.ingest, writer.steps([0]))
    assert ["V240"] == send(served, joining, Writer("rank:1").steps([0]))
    send(served, served.tokens.ingest, started(writer, "llm"))
    assert [""] == send(served, joining, Writer("rank:1").steps([0]))


# ------------------------------------------------------------------------------- which are no more


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda c, id, now: tokens.revoke(c, id, by="t", now_unix_ns=now), "revoked"),
        (
            lambda c, id, now: tokens.rotate(c, id, overlap_seconds=0.0, by="t", now_unix_ns=now),
            "rotated",
        ),
        (
            lambda c, id, now: tokens.rotate(
                c, id, overlap_seconds=9.0, expires_unix_ns=now + 1, by="t", now_unix_ns=now
            ),
            "expired",
        ),
    ],
    ids=["revoked", "rotated", "expired"],
)
def test_a_token_that_has_ended_is_refused_by_the_next_look_and_counted(
    served: Served, change, word: str
):
    secret = token(served, "ada")
    assert [""] == send(served, secret, Writer().steps([0]))
    with served.store.write() as connection:
        change(connection, id_of(served, "ada"), time.time_ns())
    served.app.state.known_tokens.reload()
    with pytest.raises(UnauthorizedError, match=f"of ada is {word}"):
        send(served, secret, Writer().steps([0]))
    assert {"V414": 1} == served.store.counters.refused


def test_a_revocation_holds_by_itself(served: Served):
    secret = token(served, "ada", "read")
    with served.store.write() as connection:
        tokens.revoke(connection, id_of(served, "ada"), by="t", now_unix_ns=time.time_ns())
    give_up = time.monotonic() + 60.0
    while time.monotonic() < give_up:
        with client(served, secret) as reader:
            try:
                reader.ask(RunsQuestion())
            except UnauthorizedError:
                return
        time.sleep(0.1)
    pytest.fail("it is still good after 60 s")


@pytest.mark.servers
def test_all_collectors_on_a_database_know_a_token_and_its_end(tmp_path: Path, postgres: str):
    lake = str(tmp_path / "lake")
    of = [
        CollectorSettings(data=tmp_path / name, database=postgres, lake=lake, commit_seconds=0.0)
        for name in "ab"
    ]
    with Served(of[0]) as first, Served(of[1]) as second:
        secret = token(first, "ada", "read")
        second.app.state.known_tokens.reload()
        with client(second, secret) as reader:
            assert () == reader.ask(RunsQuestion())
            with first.store.write() as connection:
                tokens.revoke(connection, id_of(first, "ada"), by="t", now_unix_ns=time.time_ns())
            second.app.state.known_tokens.reload()
            with pytest.raises(UnauthorizedError, match="revoked"):
                reader.ask(RunsQuestion())


# ------------------------------------------------------------------------------------- who reads


@pytest.fixture
def two_runs(served: Served) -> Served:
    """A collector with a run of project llm and one of project vision, each with an alert."""
    for run, project in ((RUN, "llm"), (OTHER_RUN, "vision")):
        writer = Writer(run=run)
        halted = decision(action="halt", step=1)
        send(
            served,
            served.tokens.ingest,
            started(writer, project),
            writer.steps([0, 1], loss=1.0),
            writer.events(halted, step=1),
            writer.events(RunEnded(state="halted"), step=1),
        )
    served.app.state.acting.engine.poll()
    return served


def test_a_limited_reader_sees_its_runs_alone(two_runs: Served):
    served = two_runs
    with served.client() as every:
        assert {RUN, OTHER_RUN} == {alert.run_id for alert in every.ask(AlertsQuestion())}
    for secret in (
        token(served, "ada", "read", project="llm"),
        token(served, "bob", "read", run_id=RUN),
    ):
        with client(served, secret) as reader:
            assert [RUN] == [run.run_id for run in reader.ask(RunsQuestion())]
            assert {RUN} == {alert.run_id for alert in reader.ask(AlertsQuestion())}
            for table in ("runs", "decisions", "alerts", "events"):
                asked = TableQuestion(table=table, columns=("run_id",))
                assert {RUN} == set(reader.ask(asked).data[0]), table
            assert RUN == reader.ask(RunQuestion(run_id=RUN)).summary.run_id
            for beyond in (
                RunQuestion(run_id=OTHER_RUN),
                AlertsQuestion(run_id=OTHER_RUN),
                TableQuestion(table="steps", run_id=OTHER_RUN),
                CommandsQuestion(run_id=OTHER_RUN),
                DifferenceQuestion(run_id=RUN, other=OTHER_RUN, metric="steps.loss"),
            ):
                with pytest.raises(UsageError, match=f"there is no run {OTHER_RUN}"):
                    reader.ask(beyond)
    assert {"V413": 10} == served.store.counters.refused


@pytest.mark.parametrize("path", ["/metrics", "/v1/sd/agents"])
def test_what_is_about_all_runs_is_refused_to_a_limited_reader(served: Served, path: str):
    def status(secret: str) -> int:
        said = {"Authorization": f"Bearer {secret}"}
        return served.request("GET", path, "", headers=said).status_code

    assert 403 == status(token(served, "ada", "read", project="llm"))
    assert 200 == status(token(served, "bob", "read"))
    assert {"V413": 1} == served.store.counters.refused


def test_each_question_that_names_no_run_says_that_it_leaves_some_out():
    without = {kind for kind, route in ROUTES.items() if "{run_id}" not in route.path}
    assert set(_OF_ALL_RUNS) == without


def test_an_ingest_token_sees_and_settles_only_its_own_runs_commands(two_runs: Served):
    served = two_runs
    eve = token(served, "eve")
    with client(served, eve) as agent:
        with pytest.raises(UsageError, match="there is no run"):
            agent.ask(CommandsQuestion(run_id=RUN, status="pending"))
        with pytest.raises(UnauthorizedError, match="scope"):
            agent.ask(RunsQuestion())
    said = {"Authorization": f"Bearer {eve}"}
    path = f"{served.plain}/v1/runs/{RUN}/commands/1/delivered"
    answer = httpx.post(path, headers=said, json={"incarnation": "0" * 16}, trust_env=False)
    assert (404, "V101") == (answer.status_code, answer.json()["code"])
    assert "no run" in answer.json()["text"]


# ----------------------------------------------------------------------------------- who controls


def test_a_limited_control_token_acts_on_its_runs_alone(two_runs: Served):
    served = two_runs
    with served.client() as reader:
        of_run = {alert.run_id: alert.fingerprint for alert in reader.ask(AlertsQuestion())}
    with client(served, token(served, "ada", "control", project="llm")) as ada:
        ack = AckRequest(by="ada")
        assert "ada" == ada.ack_alert(of_run[RUN], ack).acknowledged_by
        with pytest.raises(UsageError, match="there is no alert"):
            ada.ack_alert(of_run[OTHER_RUN], ack)
        ada.annotate(RUN, AnnotationRequest(step=1, text="seen"))
        with pytest.raises(UsageError, match="there is no run"):
            ada.annotate(OTHER_RUN, AnnotationRequest(step=1, text="seen"))
        halt, keys = CommandRequest(action="halt", reason="enough"), served.settings.data
        assert "pending" == ada.send_command(RUN, halt, issued_by="ada", keys=keys).status
        with pytest.raises(UsageError, match="there is no run"):
            ada.send_command(OTHER_RUN, halt, issued_by="ada", keys=keys)
        mine = SilenceRequest(matchers=(f"run={RUN}",), by="ada", reason="known", seconds=60.0)
        silence = ada.silence(mine)
        for matchers in (("severity=page",), (f"run={OTHER_RUN}",), ("run=~.*",)):
            with pytest.raises(UnauthorizedError, match="limited to project llm"):
                ada.silence(msgspec.structs.replace(mine, matchers=matchers))
        with served.client("control") as operator:
            others = operator.silence(
                SilenceRequest(matchers=("severity=log",), by="op", reason="all", seconds=60.0)
            )
        assert [silence.id] == [view.id for view in ada.ask(SilencesQuestion())]
        with pytest.raises(UsageError, match="there is no silence"):
            ada.end_silence(others.id, EndSilenceRequest(by="ada"))
        assert silence.id == ada.end_silence(silence.id, EndSilenceRequest(by="ada")).id


def test_the_audit_names_the_tokens_owner_whatever_name_is_given(two_runs: Served):
    served = two_runs
    with client(served, token(served, "ada", "control")) as ada:
        fingerprint = ada.ask(AlertsQuestion())[0].fingerprint
        ada.ack_alert(fingerprint, AckRequest(by="somebody else"))
        ada.annotate(RUN, AnnotationRequest(step=1, text="seen", by="somebody else"))
    name = f"somebody else (ada's {id_of(served, 'ada')} token)"
    with served.store.read_transaction() as connection:
        who = connection.execute(select(audit.c.action, audit.c.actor)).all()
    assert {("acknowledge", name), ("annotate", name)} <= set(map(tuple, who))


# -------------------------------------------------------------------------- over all of it at once

_PRINCIPALS = [
    Principal(),
    tokens.OWN,
    Principal(token_id="a1", owner="ada"),
    Principal(token_id="a2", owner="ada"),
    Principal(token_id="e1", owner="eve"),
    Principal(token_id="p1", owner="eve", project="llm"),
    Principal(token_id="p2", owner="bob", project="llm"),
    Principal(token_id="r1", owner="eve", run_id=RUN),
    Principal(token_id="a1", owner="ada", writer_key_hash="k1"),
    Principal(token_id="a1", owner="ada", writer_key_hash="k2"),
]


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(_PRINCIPALS), st.sampled_from([RUN, OTHER_RUN]), st.integers(0, 2)
        ),
        max_size=12,
    )
)
def test_rows_are_stored_exactly_where_the_rules_say_so(sent):
    store = open_store("sqlite://")
    writers = {(run, i): Writer(f"rank:{i}", run=run) for run in (RUN, OTHER_RUN) for i in range(3)}
    run_of: dict[str, tuple[str, str]] = {}
    begun_by: dict[tuple[str, int], tuple[str, str]] = {}
    expected = []
    bodies = []
    for principal, run, i in sent:
        bodies.append([writers[run, i].steps([0])])
        own = principal.writes_all
        owner, project = run_of.get(run, (principal.owner, principal.project))
        by = begun_by.get((run, i), (principal.token_id, principal.writer_key_hash))
        joins = (
            run == principal.run_id
            if principal.run_id
            else (project == principal.project if principal.project else owner == principal.owner)
        )
        is_its = by[0] == principal.token_id
        has_key = by[1] in ("", principal.writer_key_hash)
        taken = own or (joins and is_its and has_key)
        if taken:
            run_of.setdefault(run, (owner, project))
            begun_by.setdefault((run, i), by)
        else:
            writers[run, i].next_seq["steps"] -= 1  # its number is free again
        expected.append("" if taken else "V241" if joins and is_its else "V240")
    got = store_bodies(store, bodies, 1, principals=[principal for principal, _, _ in sent])
    assert expected == [stored[0].reply.code for stored in got]
    assert expected.count("") == num_stored(store)
    with store.read_transaction() as connection:
        assert len(begun_by) == len(connection.execute(select(sources)).all())
    store.close()


# --------------------------------------------------------------------------------- the commands


def vitals(data: Path, *words: object):
    return CliRunner().invoke(build_app()[0], ["token", *map(str, words), "--data", str(data)])


def test_the_file_of_a_new_token_is_private_and_opens_what_it_says(served: Served, tmp_path: Path):
    data, file = served.settings.data, tmp_path / "ada.json"
    done = vitals(data, "create", "ada", "--scope", "control", "--project", "llm", "--output", file)
    assert 0 == done.exit_code, done.output
    assert 0o600 == file.stat().st_mode & 0o777
    given = read_tokens(file)
    assert given.control == given.read != given.ingest == ""
    assert given.control not in done.output
    assert given.tls == served.tokens.tls
    served.app.state.known_tokens.reload()
    with client(served, given.control) as ada:
        assert () == ada.ask(RunsQuestion())
    raw = b"".join(path.read_bytes() for path in data.glob("vitals.db*"))
    assert given.control.encode() not in raw
    assert "already exists" in str(vitals(data, "create", "b", "--output", file).exception)
    token_id = id_of(served, "ada")
    assert 0 == vitals(data, "rotate", token_id, "--output", file).exit_code
    assert given.control != read_tokens(file).control
    assert "llm" in vitals(data, "list").output
    assert 0 == vitals(data, "revoke", token_id).exit_code
    assert "revoked" in vitals(data, "list", "--format", "csv").output
    assert "does not come back" in str(vitals(data, "rotate", token_id).exception)


def test_without_a_file_the_secret_is_shown_once(served: Served):
    data = served.settings.data
    done = CliRunner().invoke(build_app()[0], ["token", "create", "job-7", "--data", str(data)])
    secret = done.stdout.strip()
    assert secret.startswith("vitals_")
    assert len(secret) >= 43
    served.app.state.known_tokens.reload()
    assert [""] == send(served, secret, Writer().steps([0]))
    assert secret not in vitals(data, "list", "--format", "json").output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["create", ""], "the owner is ''"),
        (["create", "a\nb"], "printable"),
        (["create", "ada", "--project", "llm", "--run", RUN], "not to both"),
        (["create", "ada", "--run", "no such"], "matches 0 runs"),
        (["rotate", "nothing"], "there is no token 'nothing'"),
        (["revoke", "nothing"], "there is no token 'nothing'"),
    ],
)
def test_what_cannot_be_done_says_why(served: Served, words: list[str], says: str):
    done = vitals(served.settings.data, *words)
    assert 0 != done.exit_code
    assert says in str(done.exception)


def test_a_run_that_has_not_begun_is_named_by_an_id_that_is_offered(served: Served):
    data = served.settings.data
    refusal = vitals(data, "create", "ada", "--run", "next week").exception
    assert isinstance(refusal, UsageError)
    assert "one that has not begun is known by its id alone" in refusal.text
    words = re.search(r"`vitals token (create ada --run (\w+))`.*VITALS_RUN_ID=(\w+)", refusal.hint)
    assert words is not None and words[2] == words[3]
    assert 0 == vitals(data, *words[1].split()).exit_code
    assert words[2] in vitals(data, "list").output


def test_without_a_store_there_is_nothing_to_create_in(tmp_path: Path):
    assert "there is no store" in str(vitals(tmp_path, "list").exception)
