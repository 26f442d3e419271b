"""A stub collector, and the pages set up to read it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import streamlit as st
from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

import vitals_dashboard
from tests.dashboard.stub import CONTROL, READ, Stub, StubServer
from trainvitals.io.control_key import make_control_key
from vitals_dashboard import access
from vitals_dashboard.settings import SETTINGS_VARIABLE, DashboardSettings, write_settings

PAGES = Path(vitals_dashboard.__file__).parent / "entry" / "vitals_pages.py"
WAIT_MS = 60_000
KNOWN: dict[str, Any] = {}
DOOR_TOKEN = "door-token-0123456789abcdef"

# Each page that a test opens would look through all installed packages for components again.
manifest_scanner.scan_component_manifests = cache(manifest_scanner.scan_component_manifests)


@pytest.fixture
def stub() -> Iterator[Stub]:
    served = Stub()
    server = StubServer(served)
    yield served
    st.cache_data.clear()
    st.cache_resource.clear()  # closes the clients, and with them the server's threads
    server.close()


def write_tokens(path: Path, *, read: str = READ, control: str = "") -> Path:
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode({"read": read, "control": control}))
    make_control_key(path.parent)
    return path


@pytest.fixture
def open_page(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., AppTest]:
    """Open a page and run it: ``open_page("run", control=True, run=...)``."""

    def opened(
        page: str = "overview",
        *,
        url: str = "",
        read: str = READ,
        control: bool = False,
        of_folder: bool = False,
        **query: str,
    ) -> AppTest:
        tokens = write_tokens(
            tmp_path / "tokens.json", read=read, control=CONTROL if control else ""
        )
        settings = DashboardSettings(
            door_token=DOOR_TOKEN,
            collector_url=url or stub.url,
            token_file=str(tokens),
            of_folder=of_folder,
            control=control,
        )
        (tmp_path / "settings.json").unlink(missing_ok=True)
        write_settings(settings, tmp_path / "settings.json")
        monkeypatch.setenv(SETTINGS_VARIABLE, str(tmp_path / "settings.json"))
        # Pages that are run without a browser have no cookie: test_access.py is about those.
        monkeypatch.setattr(access, "role", lambda: "control" if control else "look")
        app = AppTest.from_file(str(PAGES), default_timeout=60)
        if page != "overview":
            # A page can be switched to only from a page, whose controls would then still be there:
            # it is another tab that knows the pages.
            if not KNOWN:
                KNOWN.update(
                    AppTest.from_file(str(PAGES), default_timeout=60).run()._registered_pages
                )
            app._registered_pages = KNOWN
            app.switch_page(f"vitals_page_{page}.py")
        app.query_params.update(query)
        return app.run()

    return opened


def texts(app: AppTest) -> str:
    """Everything a page says, in one string."""
    kinds = (app.text, app.markdown, app.caption, app.metric)
    return "\n".join(str(e.value) for kind in kinds for e in kind)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--host-resolver-rules=MAP vitals.example 127.0.0.1",
            ],
        )
        yield chromium
        chromium.close()


@contextmanager
def new_page(browser: Any) -> Iterator[Any]:
    """Open a page that shares neither cookies nor a cache; an error in it fails the test."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(WAIT_MS)
    errors: list[str] = []
    context.on("weberror", lambda raised: errors.append(str(raised.error)))
    yield context.new_page()
    context.close()
    assert not errors, "JavaScript errors that nothing caught"


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of the test's own."""
    with new_page(browser) as opened:
        yield opened


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Any]:
    """A page that those tests of a module share which leave nothing behind: it loads sooner."""
    with new_page(browser) as opened:
        yield opened
