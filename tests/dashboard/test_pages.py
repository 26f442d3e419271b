from collections.abc import Callable

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard import samples
from tests.dashboard.conftest import texts
from tests.dashboard.stub import Stub, StubServer

Open = Callable[..., AppTest]
PAGES = ("overview", "run", "alerts")


def shown(app: AppTest) -> str:
    """Return what a page says; it never shows a traceback."""
    assert [] == list(app.exception)
    return texts(app)


# ----------------------------------------------------------------------- states of the other side


@pytest.mark.parametrize("page", PAGES)
def test_a_collector_that_is_down_is_said_in_words(page: str, stub: Stub, open_page: Open) -> None:
    gone = Stub()
    StubServer(gone).close()
    said = shown(open_page(page, url=gone.url))
    assert "The collector does not answer" in said
    assert "tries again by itself" in said


@pytest.mark.parametrize("page", PAGES)
def test_a_wrong_token_is_said_in_words(page: str, stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    said = shown(open_page(page, read="some-other-token"))
    assert "refused this dashboard's token" in said
    assert "--token-file" in said
    assert "bytes-gpt" not in said


@pytest.mark.parametrize("page", PAGES)
def test_a_missing_token_file_is_said_in_words(page: str, open_page: Open, tmp_path) -> None:
    app = open_page(page)
    (tmp_path / "tokens.json").unlink()
    assert "token file" in shown(app.run())


@pytest.mark.parametrize("page", ["overview", "run"])
def test_no_runs_yet_says_how_the_first_comes_here(page: str, stub: Stub, open_page: Open) -> None:
    said = shown(open_page(page))
    assert "No runs yet" in said
    assert "vitals demo" in said


def test_no_alerts_says_that_nothing_fires(stub: Stub, open_page: Open) -> None:
    assert "Nothing fires." in shown(open_page("alerts"))


def test_a_page_recovers_when_the_collector_is_back(stub: Stub, open_page: Open) -> None:
    app = open_page()
    stub.add(samples.sample_run())
    assert "1 of 1 run" in shown(app.run())


# ------------------------------------------------------------------------------------- overview


def test_the_overview_shows_each_run_with_its_state(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    stub.runs.append(samples.summary(2, state="halted", health="critical"))
    app = open_page()
    assert "2 of 2 runs" in shown(app)
    table = app.dataframe[0].value
    assert ["bytes-gpt-1", "bytes-gpt-2"] == list(table["Run"])
    assert ["running", "halted"] == [state.split()[-1] for state in table["State"]]
    assert 60 < len(table["Loss curve"][0]), "the curve came from the collector"


def test_two_hundred_runs_are_listed_and_searched(stub: Stub, open_page: Open) -> None:
    stub.runs += [samples.summary(n, name=f"sweep-{n:03d}") for n in range(200)]
    assert 200 == len(open_page().dataframe[0].value)
    stub.runs[7] = msgspec.structs.replace(stub.runs[7], tags=("ablation",))


def test_the_search_and_the_state_come_from_the_address(stub: Stub, open_page: Open) -> None:
    stub.runs += [samples.summary(n, name=f"sweep-{n:03d}") for n in range(40)]
    stub.runs[12] = msgspec.structs.replace(stub.runs[12], state="lost")
    app = open_page(q="sweep-01", state="lost")
    assert ["sweep-012"] == list(app.dataframe[0].value["Run"])
    assert "1 of 40 runs" in shown(app)


# ------------------------------------------------------------------------------------------ run


def test_the_run_page_shows_numbers_ledger_checkpoints_and_attempts(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    app = open_page("run")
    said = shown(app)
    assert "bytes-gpt-1" in said and samples.run_id(1) in said
    values = {metric.label: metric.value for metric in app.metric}
    assert "2.41" == values["Loss"]
    assert "420" == values["Step"]
    decisions, checkpoints, attempts = (table.value for table in app.dataframe)
    assert [262, 181, 180, 120] == list(decisions["Step"])
    assert "gradients of rank 1 are NaN" == decisions["Reason"][3]
    assert {"healthy", "candidate"} == set(checkpoints["State"])
    assert [2, 1] == list(attempts["Attempt"])


def test_a_rising_loss_is_marked_as_the_bad_direction(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    app = open_page("run")
    loss = next(metric for metric in app.metric if metric.label == "Loss")
    assert loss.delta.startswith("+")
    assert loss.proto.color == loss.proto.MetricColor.RED


def test_a_run_without_gpu_shows_the_host_and_says_so(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    app = open_page("run")
    assert "No GPU reports for this run; the host is shown." in shown(app)
    assert "n/a" == {metric.label: metric.value for metric in app.metric}["MFU"]


def test_a_run_with_a_gpu_shows_it(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run(with_gpu=True))
    app = open_page("run")
    assert "No GPU" not in shown(app)
    assert {metric.label: metric.value for metric in app.metric}["MFU"].endswith(" %")


def test_a_run_that_has_only_started_is_a_normal_case(stub: Stub, open_page: Open) -> None:
    sample = samples.sample_run()
    line = msgspec.structs.replace(
        sample.summary, last_step=-1, loss=None, grad_norm=None, num_attempts=0, num_firing_alerts=0
    )
    sample.summary = line
    sample.detail = msgspec.structs.replace(
        sample.detail, summary=line, metrics=(), sources=(), attempts=()
    )
    sample.series, sample.decisions, sample.checkpoints = {}, [], []
    stub.add(sample)
    said = shown(open_page("run"))
    assert "No step has been recorded yet" in said
    assert "No decision was needed so far." in said


def test_the_address_chooses_the_run_and_its_controls(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    stub.runs.append(samples.summary(0, name="newer"))
    app = open_page("run", run=samples.run_id(1), window="last 200", log="true", live="false")
    assert "bytes-gpt-1" in shown(app)
    assert {"live": False, "log": True} == {
        toggle.key: toggle.value for toggle in app.toggle if toggle.key in ("live", "log")
    }
    assert "last 200" == app.session_state["window"]


def test_an_address_with_an_unknown_run_says_so(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    assert "This run is not here" in shown(open_page("run", run="01K0000000000000000000NONE"))


def test_choosing_another_run_changes_the_address(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    other = samples.sample_run(name="second")
    other.summary = msgspec.structs.replace(other.summary, run_id=samples.run_id(2))
    other.detail = msgspec.structs.replace(other.detail, summary=other.summary)
    stub.add(other)
    app = open_page("run", run=samples.run_id(1))
    app.selectbox(key="picked_run").set_value(samples.run_id(2)).run()
    assert "second" in shown(app)
    assert samples.run_id(2) == app.query_params["run"]


# ------------------------------------------------------------------------------ hostile text


@pytest.mark.parametrize("name", [samples.HOSTILE, "x" * 300, "a\u202eb\x00\n[click](http://e.x)"])
def test_a_hostile_name_is_shown_as_plain_text(name: str, stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run(name=name))
    stub.alerts.append(samples.alert(summary=name, name=name, acknowledged_by=name))
    for page in PAGES:
        app = open_page(page)
        shown(app)
        as_markup = [str(e.value) for e in (*app.markdown, *app.caption)]
        as_markup += [str(e.proto.body) for e in app.get("html")]
        for piece in ("owned", "onerror", "xxxxxxxxx", "e.x"):
            assert not any(piece in text for text in as_markup), page


# ---------------------------------------------------------------------------------------- alerts


def test_firing_alerts_are_cards_and_the_past_is_a_table(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    stub.alerts += [
        samples.alert(1),
        samples.alert(2, state="resolved", ended_unix_ns=samples.NOW_NS),
    ]
    app = open_page("alerts", show="all")
    assert "Rolled back from step 262" in shown(app)
    assert 1 == len(app.dataframe[0].value)


def test_without_a_control_token_it_says_why_nothing_can_be_done(
    stub: Stub, open_page: Open
) -> None:
    stub.alerts.append(samples.alert())
    app = open_page("alerts")
    assert "without a control token" in shown(app)
    assert 0 == len(app.button)


def test_with_a_control_token_an_alert_is_acknowledged_with_a_reason(
    stub: Stub, open_page: Open
) -> None:
    stub.alerts.append(samples.alert())
    key = stub.alerts[0].fingerprint
    app = open_page("alerts", control=True)
    app.text_input(key=f"by_{key}").set_value("ada")
    app.text_input(key=f"reason_{key}").set_value("known bad shard")
    app.selectbox(key=f"silence_{key}").set_value("1 h")
    next(button for button in app.button if button.label == "Acknowledge").click().run()
    shown(app)
    ((fingerprint, request),) = stub.acks
    assert key == fingerprint
    assert ("ada", "known bad shard", 3600.0) == (
        request.by, request.reason, request.silence_seconds,
    )  # fmt: skip


def test_hundreds_of_firing_alerts_are_bounded_and_counted(stub: Stub, open_page: Open) -> None:
    stub.alerts += [samples.alert(n) for n in range(300)]
    assert "40 of 300 firing alerts are shown" in shown(open_page("alerts"))
