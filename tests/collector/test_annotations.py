"""Lines that people write at a step, and what the training announces."""

import pytest
from sqlalchemy import select

from tests.collector.lookback import troubled_run
from tests.collector.rows import RUN, Writer
from tests.support.queries import query
from tests.support.served import Served
from trainvitals.errors import UnauthorizedError, UsageError
from trainvitals.views import AnnotationRequest, AnnotationsQuestion
from vitals_collector.alerts import annotations as acting
from vitals_collector.alerts.annotations import annotate
from vitals_collector.ingest.ingest import ingest
from vitals_collector.storage.schema import audit
from vitals_collector.storage.store import Store

SECRET = "4f1Kq9ZtT7xWbV2mR8sYcD3e"


def write(store: Store, text: str = "a line", step: int = 5, by: str = "ann", run: str = RUN):
    request = AnnotationRequest(step=step, text=text, by=by)
    return annotate(store, run, request, caller="api from here", now_unix_ns=7)


def test_lines_of_people_stand_beside_what_the_training_announced(store: Store):
    troubled_run(store)
    write(store, " new data \0mix ", 150)
    write(store, "no name", 2, by="")
    found = query(store).ask(AnnotationsQuestion(run_id=RUN))
    assert [(2, "no name", "api from here"), (130, None, ""), (150, "new data mix", "ann")] == [
        (one.step, one.text if one.by else None, one.by) for one in found
    ]
    assert "longer context (a change expected for 100 steps)" == found[1].text
    with store.read_transaction() as connection:
        rows = connection.execute(select(audit).order_by(audit.c.id)).all()
    assert [
        ("ann (api from here)", "annotate", f"run/{RUN}/150", "new data mix"),
        ("api from here", "annotate", f"run/{RUN}/2", "no name"),
    ] == [(row.actor, row.action, row.subject, row.detail) for row in rows]


def test_a_secret_in_a_line_is_kept_nowhere(store: Store):
    ingest(store, Writer().steps([0], loss=1.0))
    kept = "restarted with api_key=***"
    assert kept == write(store, f"restarted with api_key={SECRET}").text
    (found,) = query(store).ask(AnnotationsQuestion(run_id=RUN))
    with store.read_transaction() as connection:
        assert [kept] * 2 == [found.text, connection.execute(select(audit.c.detail)).scalar_one()]


def test_what_cannot_be_kept_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch):
    ingest(store, Writer().steps([0], loss=1.0))
    refused = [
        ({"text": "x" * 301}, "text has 301 characters"),
        ({"text": " \0 "}, "text is empty"),
        ({"by": "x" * 81}, "by has 81"),
        ({"step": -1}, "step is -1"),
        ({"step": 2**63}, "step is 9223372036854775808"),
        ({"run": "01JD0000000000000000000009"}, "there is no run"),
    ]
    for how, said in refused:
        with pytest.raises(UsageError, match=said):
            write(store, **how)
    monkeypatch.setattr(acting, "MAX_OF_RUN", 1)
    assert "half a sign: ?" == write(store, "half a sign: \ud800").text
    with pytest.raises(UsageError, match="no more are taken"):
        write(store)


def test_writing_one_takes_a_token_that_may(served: Served):
    with served.client("ingest") as client:
        client.ingest(Writer().steps(range(3), loss=1.0))
    with served.client("read") as client, pytest.raises(UnauthorizedError):
        client.annotate(RUN, AnnotationRequest(step=1, text="no"))
    with served.client("control") as client:
        written = client.annotate(RUN, AnnotationRequest(step=1, text="<b>yes</b>"))
    assert "control token" == written.by
    with served.client("read") as client:
        assert (written,) == client.ask(AnnotationsQuestion(run_id=RUN))
    path = f"/v1/runs/{RUN}/annotations"
    for body in ('{"step": 1, "text": "x", "who": "me"}', '{"step": 1e400, "text": "x"}', "[]"):
        headers = {"Content-Type": "application/json"}
        answer = served.request("POST", path, "control", content=body, headers=headers)
        assert 400 == answer.status_code
