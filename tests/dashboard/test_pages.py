from collections.abc import Callable

from streamlit.testing.v1 import AppTest

from tests.dashboard import samples
from tests.dashboard.conftest import texts
from tests.dashboard.stub import Stub

Open = Callable[..., AppTest]


def test_overview_shows(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    app = open_page()
    assert not app.exception, app.exception
    assert len(app.dataframe) == 1
    print(app.dataframe[0].value)


def test_run_shows(stub: Stub, open_page: Open) -> None:
    stub.add(samples.sample_run())
    app = open_page("run")
    assert not app.exception, app.exception
    print(texts(app))
