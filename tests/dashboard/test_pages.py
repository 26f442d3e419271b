import math
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec import structs
from streamlit.testing.v1 import AppTest

from tests.dashboard import samples
from tests.dashboard.conftest import texts, write_tokens
from tests.dashboard.look_back import with_look_back
from tests.dashboard.stub import Stub, StubServer
from trainvitals.views import FailingNode, TableReply
from vitals_dashboard import layout
from vitals_dashboard import page as served
from vitals_dashboard.layout import RUN_PAGES

Open = Callable[..., AppTest]
OF_A_RUN = tuple(file.removeprefix("vitals_page_").removesuffix(".py") for file in RUN_PAGES)
PAGES = ("overview", "alerts", "query", "compare", *OF_A_RUN)


def shown(app: AppTest) -> str:
    """Return what a page says; it never shows a traceback."""
    assert [] == list(app.exception)
    return texts(app)


# ----------------------------------------------------------------------- states of the other side


def each_page(open_page: Open, pages: tuple[str, ...] = PAGES, **how: str) -> dict[str, str]:
    """Return what each page says, opened one after the other as by a person."""
    app, said = open_page(**how), {}
    for page in pages:
        said[page] = shown(app.switch_page(f"vitals_page_{page}.py").run())
    return said


def test_what_cannot_be_drawn_is_tried_again_though_its_run_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: dict[str, float | None] = {}

    def fragment(draw: Callable[..., object], *, run_every: float | None, key: str) -> object:
        started[key] = run_every
        return draw

    monkeypatch.setattr(layout.st, "fragment", fragment)
    monkeypatch.setattr(layout, "guarded", lambda draw: False)
    layout.draw_periodically(lambda _: None, live=False, key="body")
    layout.page_with_live_part(lambda _: None)
    every = layout.REFRESH_SECONDS
    assert {"body": None, "body_again": every, "page_again": every} == started


def test_every_page_says_that_the_collector_is_down(stub: Stub, open_page: Open) -> None:
    gone = Stub()
    StubServer(gone).close()
    for page, said in each_page(open_page, url=gone.url).items():
        assert "The collector does not answer" in said, page
        assert ("retries by itself" in said) == (page != "query"), page


def test_every_page_says_that_the_token_is_wrong(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    for page, said in each_page(open_page, read="some-other-token").items():
        assert "refused this dashboard's token" in said, page
        assert "--token-file" in said, page
        assert "bytes-gpt" not in said, page


def test_a_missing_token_file_is_said_in_words(open_page: Open, tmp_path) -> None:
    app = open_page()
    (tmp_path / "tokens.json").unlink()
    for page in PAGES:
        assert "token file" in shown(app.switch_page(f"vitals_page_{page}.py").run()), page


def test_every_page_of_an_empty_store_says_how_the_first_run_comes_here(
    stub: Stub, open_page: Open
) -> None:
    pages = tuple(page for page in PAGES if page != "alerts")
    for page, said in each_page(open_page, pages).items():
        assert "No runs yet" in said, page
        assert "vitals demo" in said, page


def test_every_page_shows_one_run_without_a_past_and_one_with(stub: Stub, open_page: Open) -> None:
    sample = samples.sample_run(name="only")
    stub.add(sample)
    before = each_page(open_page, OF_A_RUN)
    with_look_back(sample)
    after = each_page(open_page, OF_A_RUN)
    for page in OF_A_RUN:
        assert "only" in before[page] and "only" in after[page], page
    assert "No incidents." in before["incident"]
    assert "No layer metrics in this run yet" in before["layers"]
    assert "no straggler can be named" in before["ranks"]
    assert "Loss spike at step 180" in after["incident"]


def test_every_page_opens_among_hundreds_of_runs(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    stub.runs += [samples.summary(n, name=f"sweep-{n:03d}") for n in range(2, 400)]
    app = open_page(run=samples.run_id(1))
    for page in PAGES:
        shown(app.switch_page(f"vitals_page_{page}.py").run())
        assert samples.run_id(1) == app.query_params.get("run", samples.run_id(1)), page


def test_a_page_of_a_run_keeps_the_run_in_its_address_and_its_links(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    stub.runs.append(samples.summary(0, name="newer"))
    app = open_page("decisions", run=samples.run_id(1))
    links = {link.label: link.query_string for link in (e.proto for e in app.get("page_link"))}
    assert {"Curves", "Incidents", "Layers", "Ranks and nodes", "Checkpoints"} <= set(links)
    assert {f"run={samples.run_id(1)}"} == {links[name] for name in ("Curves", "Layers")}
    app.switch_page("vitals_page_layers.py").run()
    assert samples.run_id(1) in app.query_params["run"], "the run looked at last"


def test_the_fleet_shows_what_stragglers_and_hangs_cost_once_it_is_asked(
    stub: Stub, open_page: Open
) -> None:
    sample = samples.sample_run(name="slow")
    view = samples.goodput(sample.summary)
    sample.goodput = structs.replace(view, nanoseconds={"straggler_wait": 60 * 10**9})
    stub.add(sample)
    assert 2 == len(open_page().dataframe), "the list, for a wide and for a narrow screen"
    app = open_page(open_waiting="true")
    shown(app)
    (row,) = app.dataframe[2].value.to_dict("records")
    assert ("slow", "1 min 0 s", "10.0 %") == (row["Run"], row["Stragglers"], row["Share"])


def test_the_fleet_shows_nodes_that_failed_preflights_once_it_is_asked(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    for number, kind in enumerate(("slow_rank", "clock_skew")):
        stub.failing_nodes.append(
            FailingNode(
                node=f"n{number}", num_failed=2, num_checks=5, kinds=(kind,), last_unix_ns=number
            )
        )
    assert 2 == len(open_page().dataframe)
    app = open_page(open_nodes="true")
    shown(app)
    first, second = app.dataframe[2].value.to_dict("records")
    assert ("n1", "2 of 5", "clock_skew") == (first["Node"], first["Failed"], first["Faults"])
    assert "n0" == second["Node"]


def test_no_alerts_says_that_nothing_fires(stub: Stub, open_page: Open) -> None:
    assert "No firing alerts." in shown(open_page("alerts"))


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
    assert ["running", "halted"] == [state.split()[-1] for (state,) in table["State"]]
    assert ["healthy", "critical"] == [health.split()[-1] for (health,) in table["Health"]]
    assert ["\N{BLACK CIRCLE}", "\N{BLACK SQUARE}"] == [s.split()[0] for (s,) in table["State"]], (
        "a shape beside the colour"
    )
    assert table["Loss curve"][0].startswith("data:image/svg+xml;base64,")
    assert "" == table["Loss curve"][1], "it has no loss"


def test_the_overview_says_where_a_loss_is_not_a_number(stub: Stub, open_page: Open) -> None:
    stub.runs += [
        samples.summary(number, loss=loss)
        for number, loss in ((1, math.nan), (2, math.inf), (3, 2.5), (4, None))
    ]
    app = open_page()
    shown(app)
    assert ["nan", "inf", "2.5", "\N{EN DASH}"] == list(app.dataframe[0].value["Loss"])


def test_hundreds_of_runs_are_paged_and_few_curves_are_asked_for(
    stub: Stub, open_page: Open
) -> None:
    stub.runs += [samples.summary(n, name=f"sweep-{n:03d}") for n in range(300)]
    app = open_page()
    assert 25 == len(app.dataframe[0].value) == stub.num_series
    assert "300 of 300 runs; 1 to 25 here" in shown(app)
    app.run()
    assert 25 == stub.num_series, "a run that has not grown is not asked again"
    assert "sweep-299" == list(open_page(p="12").dataframe[0].value["Run"])[-1]


def test_search_filters_and_order_come_from_the_address(stub: Stub, open_page: Open) -> None:
    stub.runs += [samples.summary(n, name=f"sweep-{n:03d}") for n in range(40)]
    stub.runs[12] = msgspec.structs.replace(stub.runs[12], state="lost", health="critical")
    stub.runs[13] = msgspec.structs.replace(stub.runs[13], health="acting", tags=("ablation",))
    app = open_page(q="sweep-01 state:lost")
    assert ["sweep-012"] == list(app.dataframe[0].value["Run"])
    assert "1 of 40 runs" in shown(app)
    app = open_page(order="worst first")
    assert ["sweep-012", "sweep-013"] == list(app.dataframe[0].value["Run"])[:2]
    assert ["sweep-013"] == list(open_page(q="abl 13").dataframe[0].value["Run"])
    assert "No run matches" in shown(open_page(q="no such run"))


def test_a_search_that_is_not_understood_says_what_can_be_asked(
    stub: Stub, open_page: Open
) -> None:
    stub.add(samples.sample_run())
    said = shown(open_page(q="projct:demo"))
    assert "there is no field 'projct'" in said and "did you mean project?" in said
    said = shown(open_page(group="shoe size"))
    assert "runs cannot be grouped by 'shoe size'" in said


def test_runs_are_grouped_by_what_the_address_says(stub: Stub, open_page: Open) -> None:
    stub.runs += [samples.summary(n, name=f"sweep-{n}", project="ab"[n % 2]) for n in range(5)]
    app = open_page(group="project", order="by name")
    said = shown(app)
    assert "project: a (3 runs)" in said and "project: b (2 runs)" in said
    assert [["sweep-0", "sweep-2", "sweep-4"], ["sweep-1", "sweep-3"]] == [
        list(table.value["Run"]) for table in app.dataframe[::2]
    ]
    stub.configs = {run.run_id: {"lr": 10.0 ** -(n % 2)} for n, run in enumerate(stub.runs)}
    app = open_page(group="config.lr", q="config.lr<1")
    assert "config.lr: 0.1 (2 runs)" in shown(app)
    assert 2 == len(app.dataframe)


def test_a_run_with_an_incident_has_its_verdict_in_the_list(stub: Stub, open_page: Open) -> None:
    stub.add(with_look_back(samples.sample_run()))
    stub.runs.append(samples.summary(2))
    verdicts = list(open_page().dataframe[0].value["Verdict"])
    assert verdicts[0].startswith("Resolved: Rank 3's loss reached 4.9")
    assert "Rolled back to step 230." in verdicts[0]
    assert "" == verdicts[1]


def test_a_phone_shows_each_run_in_two_columns(stub: Stub, open_page: Open) -> None:
    stub.add(with_look_back(samples.sample_run()))
    stub.runs.append(samples.summary(2, loss=math.nan, num_firing_alerts=2))
    first, second = open_page().dataframe[1].value.to_dict("records")
    assert {"Run", "Now"} == {*first}
    assert "healthy. Step 420, loss 2.4" in first["Now"] and "Resolved: Rank 3's" in first["Now"]
    assert "loss nan. 2 firing alerts." in second["Now"]


def test_a_run_that_hangs_is_not_called_running_in_the_list(stub: Stub, open_page: Open) -> None:
    sample = with_look_back(samples.sample_run())
    (incident,) = sample.incidents
    verdict = msgspec.structs.replace(incident.verdict, is_hung=True)
    sample.incidents = [msgspec.structs.replace(incident, is_open=True, verdict=verdict)]
    stub.add(sample)
    stub.runs.append(samples.summary(2))
    states = [state for (state,) in open_page().dataframe[0].value["State"]]
    assert ["hung", "running"] == [state.split()[-1] for state in states]


# ------------------------------------------------------------------------------ hostile text


@pytest.mark.parametrize("name", [
    samples.HOSTILE + "a\u202eb\x00\n[click](http://e.x)",
    pytest.param("x" * 300, marks=pytest.mark.nightly),  # the same pages, whose columns it fills
])  # fmt: skip
def test_a_hostile_name_is_shown_as_plain_text(name: str, stub: Stub, open_page: Open) -> None:
    stub.add(with_look_back(samples.sample_run(name=name)))
    stub.alerts.append(samples.alert(summary=name, name=name, acknowledged_by=name))
    stub.table = TableReply(columns=("name",), data=((name,),), num_total=1)
    app = open_page()
    for page in PAGES:
        app = app.switch_page(f"vitals_page_{page}.py").run()
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


def test_alerts_are_grouped_by_incident_and_pages_come_first(stub: Stub, open_page: Open) -> None:
    sample = with_look_back(samples.sample_run())
    stub.add(sample)
    stub.runs.append(samples.summary(2, name="other"))
    other = samples.run_id(2)
    stub.alerts += [
        samples.alert(1),  # of the incident
        samples.alert(2, run_id=other, severity="log", summary="A skip."),
        samples.alert(3, run_id=other, severity="page", summary="Halted.", updated_unix_ns=1),
    ]
    app = open_page("alerts")
    said = shown(app)
    assert said.index("Halted.") < said.index("A skip.") < said.index("Rolled back from")
    assert f"{sample.incidents[0].title}  |  bytes-gpt-1" in said
    (link,) = [link.proto for link in app.get("page_link") if link.proto.label == "Open incident"]
    assert f"run={samples.run_id(1)}&incident=1790000000000001-178" == link.query_string


def test_an_alert_about_a_receiver_leads_to_no_run(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    refusal = {"run_id": "", "name": "ReceiverFailing", "labels": {"receiver": "team"}}
    stub.alerts += [samples.alert(1), samples.alert(2, summary="Receiver team", **refusal)]
    app = open_page("alerts")
    assert "Receiver team" in shown(app)
    assert 1 == sum(link.proto.label == "Open run" for link in app.get("page_link"))


def test_where_one_can_only_look_it_says_why_nothing_can_be_done(
    stub: Stub, open_page: Open, tmp_path: Path
) -> None:
    stub.alerts.append(samples.alert())
    app = open_page("alerts")
    assert "`vitals dashboard --control` starts one that can" in shown(app)
    assert 0 == len(app.button)
    app = open_page("alerts", control=True)
    assert len(app.button)
    write_tokens(tmp_path / "tokens.json")
    app.run()
    assert "without a control token" in shown(app)
    assert 0 == len(app.button)


def press(app: AppTest, label: str) -> AppTest:
    return next(button for button in app.button if button.label == label).click().run()


def test_with_a_control_token_an_alert_is_acknowledged_or_silenced(
    stub: Stub, open_page: Open
) -> None:
    stub.alerts.append(samples.alert())
    key = stub.alerts[0].fingerprint
    app = open_page("alerts", control=True)
    app.text_input(key=f"by_{key}").set_value("ada")
    press(app, "Acknowledge")
    app.selectbox(key=f"silence_{key}").set_value("8 h")
    assert "A silence needs a reason" in shown(press(app, "Silence"))
    assert "A silence needs a reason" in shown(app.run()), "drawn anew, as it is every two seconds"
    app.text_input(key=f"silence_by_{key}").set_value("ada")
    app.text_input(key=f"silence_reason_{key}").set_value("known bad shard")
    assert "Silenced for 8 h." in shown(press(app, "Silence"))
    assert [(key, "ada", "", 0.0), (key, "ada", "known bad shard", 28_800.0)] == [
        (name, r.by, r.reason, r.silence_seconds) for name, r in stub.acks
    ]


def test_over_a_folder_it_is_said_how_long_a_word_about_an_alert_is_kept(
    stub: Stub, open_page: Open
) -> None:
    stub.alerts.append(samples.alert())
    words = "is kept on this machine only"
    assert words in shown(open_page("alerts", control=True, of_folder=True))
    assert words not in shown(open_page("alerts", control=True))


def test_silenced_alerts_have_a_place_of_their_own(stub: Stub, open_page: Open) -> None:
    end = time.time_ns() + 3_600_000_000_000
    stub.alerts += [
        samples.alert(1, silenced_until_unix_ns=end, silence_reason="known"),
        samples.alert(2, summary="Another one."),
    ]
    app = open_page("alerts")
    assert "1 firing alert silenced" in shown(app)
    assert "Another one." in shown(app) and "Rolled back from" not in shown(app)
    said = shown(open_page("alerts", show="silenced"))
    assert "Rolled back from" in said and "known" in said


def test_hundreds_of_firing_alerts_are_bounded_and_counted(stub: Stub, open_page: Open) -> None:
    stub.alerts += [samples.alert(n) for n in range(300)]
    assert "40 of 300 firing alerts are shown" in shown(open_page("alerts"))
    assert "No firing alerts." in shown(open_page("alerts", alert="no such alert"))


def test_every_page_is_told_where_its_server_is() -> None:
    entry = (Path(served.__file__).parent / "entry" / "vitals_pages.py").read_text()
    paths = set(re.findall(r'url_path="(\w+)"|\("(\w+)", layout\.', entry))
    expected = {"", *("".join(names) for names in paths)}
    assert expected == {*served.paths()}
    text = served.streamlit_index_page()
    assert {route.path for route in served.routes(text)} == {f"/{path}" for path in expected}
    assert text.index("window.__streamlit") < text.index('<script type="module"')
