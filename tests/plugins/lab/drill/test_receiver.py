"""Alerts of a drill, without a training."""

import httpx

from tests.support.receivers import alert as stored_alert
from trainvitals.views import AlertView
from vitals_plugins.lab.drill.receiver import local_receiver


def test_the_receiver_stores_alerts_of_a_run_that_fire():
    firing, resolved = stored_alert(), stored_alert("f2", "resolved")
    with local_receiver() as receiver, httpx.Client() as client:
        body = {"version": 1, "alerts": [as_body(firing), as_body(resolved)]}
        assert 200 == client.post(receiver.url, json=body).status_code
        assert 400 == client.post(receiver.url, content=b"{").status_code
        (received,) = receiver.firing(firing.run_id)
        assert (firing.name, "page") == (received.name, received.severity)
        assert received.received_unix_ns > 0
        assert [] == receiver.firing("another run")


def as_body(alert: AlertView) -> dict[str, object]:
    return {name: getattr(alert, name) for name in alert.__struct_fields__}
