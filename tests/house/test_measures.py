"""What it costs to live in this house only falls: the bounds are lowered with each gain."""

import pytest

from tests.house import measures

pytestmark = pytest.mark.nightly  # it parses all sources and traces requests

FILES = {"step": 29, "ingest": 10, "alert": 23, "series": 10}
"""Files that an event may go through at most."""
FILES_PER_QUESTION = 3
"""The struct with its view, what answers it, and one file to spare."""


@pytest.fixture(scope="module")
def events():
    return measures.events()


@pytest.mark.parametrize("event", FILES)
def test_an_event_goes_through_no_more_files_than_before(events, event):
    hops = events[event]
    # A step asks each of its features, which have a file each.
    files = [file for file in hops.files if "trainer_hooks/features/" not in str(file)]
    assert 1 < len(files) <= FILES[event], sorted(files)
    assert hops.num_moves > hops.num_files - 2


def test_locals_say_what_they_hold():
    assert measures.sizes()["vague locals in 1,000 lines"] <= 0.4


def test_kinds_of_findings_are_listed_in_few_files():
    policy = {f"trainvitals/policy/{name}.py" for name in ("actions", "decide")}
    others = {"trainvitals/detect/registry.py", "plugins/vitals_plugins/bridges/audit/audit.py"}
    others |= {"collector/vitals_collector/queries/advice.py"}  # what to do about each
    assert policy | others == measures.tables_of_kinds()


def test_a_forwarder_is_known_by_its_body():
    tree = measures.ast.parse(
        "def a(x, *y): return b.c(x, *y)\n"
        "def d(x):\n    'Return it.'\n    return b(x)\n"
        "def e(x): return b(x + 1)\n"
        "def f(x):\n    x += 1\n    return b(x)\n"
    )
    assert ["a", "d"] == [f.name for f in tree.body if measures.is_forwarder(f)]


def test_a_question_is_declared_and_answered_in_few_files():
    by_question = measures.files_per_question()
    assert 18 <= len(by_question)
    too_many = {name: f for name, f in by_question.items() if not 2 <= len(f) <= FILES_PER_QUESTION}
    assert {} == too_many


TOY = """
@route("GET", "/v1/runs/{run_id}/toys")
class ToysQuestion(Question[tuple[Toy, ...]], frozen=True):
    run_id: str
    size: int = 3
"""


@pytest.mark.parametrize(
    "source",
    [
        TOY,
        "@answer_to(ToysQuestion)\ndef f(query, asked): ...",
        "if isinstance(question, ToysQuestion): ...",
        "SCOPES = {ToysQuestion: 'read'}",
        "class Reader:\n    def toys(self, run_id, size=3) -> tuple[Toy, ...]: ...",
        "@router.get('/{run_id}/toys')\ndef show_toys(run_id: str, size: int) -> Response: ...",
        "client.get(f'/v1/runs/{run_id}/toys')",
    ],
)
def test_who_says_anew_what_can_be_asked_is_counted(source):
    (toys,) = measures.declared_questions(measures.ast.parse(TOY))
    assert measures.restates(measures.restatable(measures.ast.parse(source)), toys)


@pytest.mark.parametrize(
    "source",
    [
        "from trainvitals.views import ToysQuestion\nreader.ask(ToysQuestion(run_id='a', size=4))",
        "def draw(question: ToysQuestion) -> str: ...",
        "class Run:\n    def toys(self, size=3) -> tuple[Toy, ...]: ...",
        "@router.post('/runs/{run_id}/toys')\ndef make_toy(run_id: str) -> Response: ...",
        "def shown(connection, run_id, size, toys) -> tuple[Toy, ...]: ...",
    ],
)
def test_who_asks_or_passes_a_question_on_is_not(source):
    (toys,) = measures.declared_questions(measures.ast.parse(TOY))
    assert not measures.restates(measures.restatable(measures.ast.parse(source)), toys)
