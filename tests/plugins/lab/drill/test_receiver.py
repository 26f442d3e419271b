"""Alerts of a drill, without a training."""

import httpx
import pytest

from tests.support.receivers import alert as stored_alert
from trainvitals.errors import UsageError
from trainvitals.views import AlertView
from vitals_plugins.lab.drill.forwarding import mark_alert, user_receivers
from vitals_plugins.lab.drill.receiver import local_receiver


def test_the_receiver_stores_alerts_of_a_run_that_fire():
    firing, resolved = stored_alert(), stored_alert("f2", "resolved")
    with local_receiver() as receiver, httpx.Client() as client:
        body = {"version": 1, "alerts": [as_body(firing), as_body(resolved)]}
        assert 200 == client.post(receiver.url, json=body).status_code
        assert 400 == client.post(receiver.url, content=b"{").status_code
        (received,) = receiver.received(firing.run_id)
        assert (firing.name, "page") == (received.name, received.severity)
        assert received.received_unix_ns > 0
        assert () == received.accepted_by
        assert [] == receiver.firing("another run")


def test_alerts_reach_the_receivers_of_the_user_marked_as_a_drill_and_are_resolved(tmp_path):
    file = tmp_path / "receivers.toml"
    page, event = stored_alert(), stored_alert("f3", severity="log", name="SpikeSeen")
    with local_receiver() as user, local_receiver() as refusing:
        urls = {"own": user.url, "other": "http://127.0.0.1:1/", "late": refusing.url}
        lines = [f'[[receivers]]\nname = "{n}"\nkind = "webhook"\nurl = "{urls[n]}"' for n in urls]
        file.write_text("\n".join([*lines, "after_minutes = 5"]))
        file.chmod(0o600)
        with user_receivers(file) as forwards_to, local_receiver(forwards_to) as receiver:
            receiver.add([page, event])
            (first, second) = receiver.received(page.run_id)
            assert (("own",), ()) == (first.accepted_by, second.accepted_by)
            assert ["own", "other"] == [each.name for each in forwards_to]
            assert [False, True] == [bool(each.error) for each in forwards_to]
        marked = mark_alert(page)
        assert [marked] == user.firing(marked.run_id)
        assert {"rank": "1", "drill": "true"} == marked.labels
        assert marked.summary.startswith("DRILL")
        assert ["firing", "resolved"] == [alert.state for alert in user.alerts()]
        assert [] == refusing.alerts()


def test_a_file_without_a_receiver_for_a_drill_is_refused(tmp_path):
    file = tmp_path / "receivers.toml"
    file.write_text("")
    file.chmod(0o600)
    with pytest.raises(UsageError, match="has no receiver"), user_receivers(file):
        pass


def as_body(alert: AlertView) -> dict[str, object]:
    return {name: getattr(alert, name) for name in alert.__struct_fields__}
