from collections.abc import Callable

import msgspec
from streamlit.testing.v1 import AppTest

from tests.dashboard import samples
from tests.dashboard.conftest import texts
from tests.dashboard.stub import Stub

Open = Callable[..., AppTest]


def shown(app: AppTest) -> str:
    """Return what the page says; it never shows a traceback."""
    assert [] == list(app.exception)
    return texts(app)


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
