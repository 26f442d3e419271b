"""Pages that are drawn without a browser."""

from collections.abc import Callable

from streamlit.testing.v1 import AppTest

from tests.dashboard.conftest import texts

Open = Callable[..., AppTest]


def shown(app: AppTest) -> str:
    """Return what a page says; it never shows a traceback."""
    assert [] == list(app.exception)
    return texts(app)
