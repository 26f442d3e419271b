"""Requests made up from the collector's own OpenAPI document: no fault, and answers as it says."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.collector.rows import RUN, Writer
from tests.support.examples import one_in
from tests.support.served import Served
from trainvitals.records import Note
from vitals_collector.api.auth import OPEN_PATHS

EXAMPLES = 2
"""Of each route and token: they are the same at every run."""
OWN = ("authorization", "host", "origin")
"""Headers that are the client's own, and are checked in test_auth.py."""


def with_a_run(served: Served) -> None:
    writer = Writer()
    with served.client("ingest") as client:
        client.ingest(writer.steps(range(5), loss=1.0))
        client.ingest(writer.events(Note(code="N1", text="hello")))


def ask_all(
    served: Served,
    token: str,
    check: Callable[[Any, Any], None],
    *,
    num: int = EXAMPLES,
    mode: str = "POSITIVE",
) -> None:
    """Ask each operation of the document some questions, and have the check look at each answer."""
    # Here, because each worker imports each test file, and this library takes a second.
    requests = pytest.importorskip("requests")
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: --group dev")
    document = served.request("GET", "/openapi.json").json()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    asked: set[str] = set()
    session = requests.Session()

    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=num,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(schemathesis.GenerationMode[mode]))
        def ask(case: Any) -> None:
            if "run_id" in case.path_parameters and mode == "POSITIVE":
                case.path_parameters["run_id"] = RUN
            case.headers = {k: v for k, v in (case.headers or {}).items() if k.lower() not in OWN}
            check(case, case.call(base_url=served.plain, headers=headers, session=session))
            asked.add(case.operation.label)

        try:
            ask()
        except Unsatisfiable:  # nothing that the document forbids can be sent there
            assert mode == "NEGATIVE", operation.label
            asked.add(operation.label)
    session.close()
    num_operations = sum(len(operations) for operations in document["paths"].values())
    assert num_operations == len(asked)


def conforms(case: Any, answer: Any) -> None:
    from schemathesis.checks import (
        content_type_conformance,
        not_a_server_error,
        response_schema_conformance,
    )

    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    case.validate_response(answer, checks=checks)


@pytest.mark.parametrize(
    "scope",
    [
        "control",
        pytest.param("read", marks=pytest.mark.nightly),
        pytest.param("ingest", marks=pytest.mark.nightly),
    ],
)
def test_no_request_that_the_document_allows_is_a_fault(served: Served, scope: str):
    with_a_run(served)
    ask_all(served, getattr(served.tokens, scope), conforms)


@pytest.mark.parametrize(
    "token", one_in(2, [pytest.param("", id="none"), pytest.param("wrong" * 8, id="a wrong one")])
)
def test_no_request_without_a_token_has_success(served: Served, token: str):
    with_a_run(served)

    def is_refused(case: Any, answer: Any) -> None:
        expected = 200 if case.path in OPEN_PATHS and case.method == "GET" else 401
        assert expected == answer.status_code, (case.operation.label, answer.text)

    ask_all(served, token, is_refused, num=2)


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_request_of_many_is_a_fault_whether_the_document_allows_it_or_not(
    served: Served, mode: str
):
    with_a_run(served)
    ask_all(served, served.tokens.control, conforms, num=100, mode=mode)
