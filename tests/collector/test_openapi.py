"""Requests made up from the collector's own OpenAPI document: no fault, and answers as it says."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.collector.conftest import Served
from tests.collector.rows import RUN, Writer
from trainvitals.records import Note

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = 4
"""Of each route and token: they are the same at every run."""


def with_a_run(served: Served) -> None:
    writer = Writer()
    with served.client("ingest") as client:
        client.ingest(writer.steps(range(5), loss=1.0))
        client.ingest(writer.events(Note(code="N1", text="hello")))


@pytest.mark.parametrize("scope", ["read", "ingest", "control"])
def test_no_request_that_the_document_allows_is_a_fault(served: Served, scope: str):
    from schemathesis.checks import (
        content_type_conformance,
        not_a_server_error,
        response_schema_conformance,
    )

    with_a_run(served)
    document = served.request("GET", "/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    token = {"Authorization": f"Bearer {getattr(served.tokens, scope)}"}
    asked: set[str] = set()

    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case) -> None:
            if "run_id" in case.path_parameters:
                case.path_parameters["run_id"] = RUN
            answer = case.call(base_url=served.plain, headers=token, timeout=30)
            case.validate_response(answer, checks=checks)
            asked.add(case.operation.label)

        ask()
    assert len(document["paths"]) <= len(asked)
