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
