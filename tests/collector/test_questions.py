"""One question is one struct and one function that answers: nothing else names it."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from tests.collector.rows import RUN, Writer
from tests.support.control import spool_of
from tests.support.scopes import SCOPES
from tests.support.served import Served, served_in
from trainvitals.errors import UnauthorizedError, UsageError
from trainvitals.io.client import CollectorClient
from trainvitals.io.rundir import RunDir
from trainvitals.question import ROUTES, Question, route
from trainvitals.views import Int64
from vitals_collector.api.questions import question_router
from vitals_collector.queries.folder_query import FolderQuery
from vitals_collector.queries.open import Reader, open_folder
from vitals_collector.queries.query import ANSWERS, Query, answer_to


class Toy(msgspec.Struct, frozen=True):
    """An answer."""

    run_id: str
    words: tuple[str, ...]
    loss: float


@pytest.fixture
def toy() -> Iterator[type[Question[Toy]]]:
    """A question as one would add it: a struct and what answers it."""

    @route("GET", "/v1/runs/{run_id}/toys/{size}", scopes=("read", "ingest"))
    class ToyQuestion(Question[Toy], frozen=True, kw_only=True):
        """A toy of that size."""

        run_id: str
        size: Annotated[int, msgspec.Meta(ge=1, le=9)]
        colour: str = msgspec.field(default="red", name="color")
        from_step: Int64 | None = None

    @answer_to(ToyQuestion)
    def _toy(query: Query, asked: ToyQuestion) -> Toy:
        with query.read(asked.run_id):
            words = (f"{asked.size} {asked.colour}", f"from {asked.from_step}")
            return Toy(run_id=asked.run_id, words=words, loss=float("nan"))

    yield ToyQuestion
    del ROUTES[ToyQuestion], ANSWERS[ToyQuestion]


@pytest.fixture
def posted_toy() -> Iterator[type[Question[tuple[Toy, ...]]]]:
    """A question with more than fits into an address."""

    @route("POST", "/v1/runs/{run_id}/toys")
    class ToysQuestion(Question[tuple[Toy, ...]], frozen=True, kw_only=True):
        """Several toys."""

        run_id: str
        sizes: tuple[int, ...]
        colour: str = msgspec.field(default="red", name="color")
        others: list[int] = msgspec.field(default_factory=list)

    @answer_to(ToysQuestion)
    def _toys(query: Query, asked: ToysQuestion) -> tuple[Toy, ...]:
        sizes = (*asked.sizes, *asked.others)
        words = [(f"{size} {asked.colour}",) for size in sizes]
        return tuple(Toy(run_id=asked.run_id, words=each, loss=1.0) for each in words)

    yield ToysQuestion
    del ROUTES[ToysQuestion], ANSWERS[ToysQuestion]


@pytest.fixture
def served(toy, posted_toy, tmp_path: Path) -> Iterator[Served]:
    question_router.cache_clear()  # no program gets a new question once its API is made
    with served_in(tmp_path / "data") as place:
        with place.client("ingest") as client:
            client.ingest(Writer().steps([0], loss=1.0))
        yield place
    question_router.cache_clear()


@pytest.fixture
def folder(toy, posted_toy, tmp_path: Path) -> Path:
    run = RunDir.create(tmp_path / "runs", RUN)
    spool_of(run, [Writer().steps([0], loss=1.0)])
    return run.path.parent


def test_a_new_question_is_answered_over_http_and_from_a_folder(toy, posted_toy, served, folder):
    questions = [
        toy(run_id=RUN, size=3),
        toy(run_id=RUN, size=9, colour="blue & green/ü", from_step=-5),
        toy(run_id=RUN, size=1, colour="", from_step=0),
        posted_toy(run_id=RUN, sizes=(1, 2), colour="blue", others=[3]),
        posted_toy(run_id=RUN, sizes=()),
    ]
    with served.client("read") as client, open_folder(folder) as opened:
        readers: tuple[Reader, ...] = (client, opened.reader)
        http, local = ([reader.ask(question) for question in questions] for reader in readers)
    assert repr(local) == repr(http)  # NaN is not itself
    assert ("3 red", "from None") == http[0].words
    assert ("9 blue & green/ü", "from -5") == http[1].words
    assert ("1 ", "from 0") == http[2].words
    assert [("1 blue",), ("2 blue",), ("3 blue",)] == [each.words for each in http[3]]
    assert () == http[4]


def test_a_new_question_is_refused_alike_for_a_run_that_is_not_there(toy, served, folder):
    asked = toy(run_id="01JD0000000000000000000009", size=3)
    with served.client("read") as client, open_folder(folder) as opened:
        for reader in (client, opened.reader):
            with pytest.raises(
                UsageError, match="there is no run 01JD0000000000000000000009"
            ) as of:
                reader.ask(asked)
            assert "V101" == of.value.code


def test_a_new_question_is_checked_at_the_door_and_asks_for_its_token(toy, posted_toy, served):
    path = f"/v1/runs/{RUN}/toys"
    for url, words in (
        (f"{path}/0", "size: Input should be greater than or equal to 1"),
        (f"{path}/3?from_step={2**63}", "from_step: Input should be less than or equal to"),
        (f"{path}/big", "size: Input should be a valid integer"),
    ):
        reply = served.request("GET", url)
        assert (400, "V100") == (reply.status_code, reply.json()["code"])
        assert words in reply.json()["text"]
    for body in (b"{}", b'{"sizes":["a"]}', b'{"sizes":[],"run_id":"x"}', b"["):
        headers = {"Content-Type": "application/json"}
        reply = served.request("POST", path, content=body, headers=headers)
        assert (400, "V100") == (reply.status_code, reply.json()["code"])
        assert reply.json()["text"].startswith("the body is not a valid ToysQuestion: ")
    with served.client("ingest") as client:
        assert client.ask(toy(run_id=RUN, size=1)).words
        with pytest.raises(UnauthorizedError, match="lacks the scope read"):
            client.ask(posted_toy(run_id=RUN, sizes=()))


def test_a_new_question_is_in_the_openapi_document(served):
    paths = served.request("GET", "/openapi.json").json()["paths"]
    entry = paths["/v1/runs/{run_id}/toys/{size}"]["get"]
    assert ("A toy of that size.", ["query"]) == (entry["description"], entry["tags"])
    run_id, size, color, from_step = entry["parameters"]
    assert ("path", "path") == (run_id["in"], size["in"])
    assert (1, 9) == (size["schema"]["minimum"], size["schema"]["maximum"])
    assert ("color", "query", "red") == (color["name"], color["in"], color["schema"]["default"])
    assert 2**63 - 1 == from_step["schema"]["anyOf"][0]["maximum"]
    body = paths["/v1/runs/{run_id}/toys"]["post"]["requestBody"]["content"]["application/json"]
    assert {"$ref": "#/components/schemas/ToysQuestion"} == body["schema"]


# -------------------------------------------------------------------- nothing stands beside them

ORDERS = {
    ("POST", "/v1/ingest"),
    ("POST", "/v1/metrics"),
    ("POST", "/v1/runs/{run_id}/annotations"),
    ("POST", "/v1/runs/{run_id}/commands"),
    ("POST", "/v1/runs/{run_id}/commands/{number}/delivered"),
    ("POST", "/v1/alerts/{fingerprint}/ack"),
    ("POST", "/v1/silences"),
    ("POST", "/v1/silences/{silence_id}/end"),
    ("POST", "/ack/{token}"),
}
"""What changes something, and so is no question."""
OF_THE_SERVER = {
    *(("GET", "/healthz"), ("GET", "/metrics"), ("GET", "/openapi.json")),
    ("GET", "/ack/{token}"),
    ("GET", "/v1/sd/agents"),
}


def test_each_question_has_one_answer_and_no_route_is_made_by_hand():
    assert ROUTES.keys() == ANSWERS.keys()
    asked = {(route.method, route.path) for route in ROUTES.values()}
    assert len(asked) == len(ROUTES)
    assert set(SCOPES) == asked | ORDERS | OF_THE_SERVER


def test_the_readers_have_one_way_to_be_asked():
    def methods(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind, inspect.isroutine) if name[0] != "_"}

    assert {"ask"} == methods(Reader)
    of_both = {"ask", "read", "raise_alerts", "update_findings", "liveness", "run_dir"}
    assert of_both == methods(Query)
    assert of_both | {"close"} == methods(FolderQuery)
    orders = {"ack_alert", "annotate", "ingest", "ingest_all", "mark_delivered", "send_command"}
    orders |= {"silence", "end_silence"}
    assert {"ask", "answers", "close"} | orders == methods(CollectorClient)
