"""Who may look, who may control; with a second program on this machine that tries for both."""

import asyncio
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard import samples
from tests.dashboard.conftest import texts, write_tokens
from tests.dashboard.folder import write_run
from tests.dashboard.look_back import proposed, with_look_back
from tests.dashboard.stub import CONTROL, READ, Stub
from tests.dashboard.test_launch import by_localhost, dashboard
from tests.house.pages import ROOT, block
from tests.support.examples import one_in
from trainvitals.errors import InsecurePathError, UsageError
from vitals_dashboard import access, launch
from vitals_dashboard.cli import _entrance
from vitals_dashboard.settings import DashboardSettings, SignOn, check_public_url, read_sign_on

Open = Callable[..., AppTest]
GUIDE = ROOT / "docs" / "guides" / "dashboard-access.md"
TABLE = "[data-testid=stDataFrame] canvas"


# ------------------------------------------------------------------- pages, drawn without a browser


def press(app: AppTest, label: str) -> AppTest:
    return next(button for button in app.button if button.label == label).click().run()


def test_a_click_that_comes_after_the_control_has_ended_sends_nothing(
    stub: Stub, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a request that was made by hand: the server draws the form, or there is none."""
    stub.add(proposed(with_look_back(samples.sample_run())))
    app = open_page("decisions", control=True)
    app.text_input(key="reason_do_4").set_value("bad shard")
    monkeypatch.setattr(access, "role", lambda: "look")
    press(app, "Send: rollback")
    assert ([], []) == (list(app.exception), stub.commands)


def test_a_session_that_has_ended_is_shown_nothing(
    stub: Stub, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.add(samples.sample_run())
    app = open_page("decisions")
    assert "decisions" in texts(app)
    monkeypatch.setattr(access, "role", lambda: "")
    app.run()
    assert "Signed out" in texts(app) and "decisions" not in texts(app)


def test_a_look_only_dashboard_does_not_even_hold_the_control_token(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens.json", control=CONTROL)
    settings = DashboardSettings(door_token="t" * 32, collector_url="", token_file=str(file))
    assert (READ, "") == (settings.collector().tokens.read, settings.collector().tokens.control)
    write_tokens(file, read="", control=CONTROL)
    assert (CONTROL, "") == (
        settings.collector().tokens.read,
        settings.collector().tokens.control,
    ), "it must read"


# --------------------------------------------------------------------------- what the launcher does


def test_another_program_at_the_port_is_not_told_the_token() -> None:
    with stranger() as (port, seen), pytest.raises(UsageError, match="another program answers"):
        launch._proves_itself(port, "door-token-0123456789abcdef")
    assert not any("door-token" in text for text in seen)


@pytest.mark.parametrize(
    "url",
    [
        "vitals.example",
        "http://vitals.example",
        "http://localhost:1",
        "https://localhost",
        "https://ada:secret@vitals.example",
        "https://vitals.example/?x=1",
        "https://[",
        "https://vitals.example:99999",
    ],
)
def test_a_public_address_is_one_with_tls_and_a_name_of_its_own(url: str) -> None:
    with pytest.raises(UsageError, match="--public-url is"):
        check_public_url(url)
    check_public_url("https://vitals.example/path")


def test_a_provider_needs_the_address_to_send_people_back_to(tmp_path: Path) -> None:
    for url in ("", "https://hub.example/path"):
        with pytest.raises(UsageError, match="--oidc needs --public-url"):
            _entrance(False, url, tmp_path / "oidc.toml")


# ------------------------------------------------------------------------------ roles by a provider

PROVIDER = """
server_metadata_url = "https://id.example/.well-known/openid-configuration"
client_id = "vitals"
client_secret = "s"
look = ["@example.org"]
control = ["ada@example.org"]
"""


def test_the_file_of_a_provider_is_as_the_guide_shows_it(tmp_path: Path) -> None:
    shown = block(GUIDE, "test: oidc").body
    sign_on = read_sign_on(provider_file(tmp_path, shown))
    assert ("email", 12.0) == (sign_on.claim, sign_on.hours)
    every = shown.replace("# claim", "claim").replace("# hours", "hours")
    assert "groups" == read_sign_on(provider_file(tmp_path, every)).claim


def provider_file(tmp_path: Path, text: str = PROVIDER, mode: int = 0o600) -> Path:
    path = tmp_path / "oidc.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def person(**claims: object) -> dict[str, object]:
    return {"iat": 1000, "email": "ada@example.org", "email_verified": True} | claims


@pytest.mark.parametrize(
    ("claims", "role"),
    [
        (person(), "control"),
        (person(email="Bob@Example.org"), "look"),
        (person(email="eve@example.org.evil.example"), ""),
        (person(email="ada@example.org@evil.example"), ""),
        (person(email_verified=False), ""),
        (person(email_verified="true"), ""),
        ({"iat": 1000, "email": "ada@example.org"}, ""),
        (person(iat=1000 - 12 * 3600 - 1), ""),
        (person(iat=None), ""),
        ({}, ""),
    ],
)
def test_a_role_is_given_by_verified_address_for_some_hours(
    tmp_path: Path, claims: dict[str, object], role: str
) -> None:
    sign_on = read_sign_on(provider_file(tmp_path))
    assert role == sign_on.role(claims, unix_seconds=1000.0)


def test_a_role_is_given_by_another_claim_word_for_word() -> None:
    sign_on = SignOn(
        server_metadata_url="", client_id="", client_secret="",
        claim="groups", look=("ml",), control=("ml-leads",),
    )  # fmt: skip

    def role(groups: object) -> str:
        return sign_on.role({"iat": 0, "groups": groups}, unix_seconds=1.0)

    assert ["look", "control", "", "", ""] == [
        role(groups) for groups in (["x", "ml"], ["ml", "ml-leads"], ["ML"], "m", [1, None])
    ]
    assert "look" == role("ml")


def test_the_file_of_a_provider_is_private_and_whole(tmp_path: Path) -> None:
    with pytest.raises(InsecurePathError, match="other users can access it"):
        read_sign_on(provider_file(tmp_path, mode=0o644))
    with pytest.raises(UsageError, match="unknown field `lok`"):
        read_sign_on(provider_file(tmp_path, PROVIDER.replace("look", "lok")))
    with pytest.raises(UsageError, match="cannot be read"):
        read_sign_on(tmp_path / "none")


# -------------------------------------------------------------------------------- in a real browser


class stranger:  # noqa: N801 - used as a function
    """Another program on this machine: a server on a port of its own, which notes what it is sent.

    Its page is the JavaScript of ``script``, whose answers it collects.
    """

    def __init__(self, script: str = "") -> None:
        self.seen: list[str] = []
        seen = self.seen

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.append(f"{self.path}\n{self.headers}")
                body = f"<!doctype html><title>stranger</title><script>{script}</script>".encode()
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> tuple[int, list[str]]:
        self._thread.start()
        return self._server.server_address[1], self.seen

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Started:
    """A dashboard with control over a folder with one run."""

    def __init__(self, address: str, terminal: Path) -> None:
        self.address, self._terminal = address, terminal
        self.base, _, self.token = address.partition("/?token=")
        self.host = urlsplit(address).hostname or ""

    def codes(self) -> list[str]:
        """Return the codes that the terminal has shown."""
        return re.findall(r"Control code: (\S+)", self._terminal.read_text())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder, tmp = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("tmp")
    write_run(folder, name="kept")
    with (
        (tmp / "terminal").open("w") as terminal,
        dashboard(folder, tmp, "--control", errors=terminal.fileno()) as (_, address),
    ):
        yield Started(address, tmp / "terminal")


def get_control(page: Any, started: Started, *, wrong: int = 0) -> None:
    """Ask for a code, give some wrong ones, and then the right one."""
    shown_before = len(started.codes())
    page.get_by_role("button", name="Get control").click()
    page.get_by_role("button", name="Show a code").click()
    page.get_by_label("Code shown").wait_for()
    for number in range(wrong):
        page.get_by_label("Code shown").fill(f"WRONG{number}")
        page.get_by_role("button", name="Enter").click()
        page.get_by_text("Wrong code").wait_for()
    while len(started.codes()) == shown_before:  # the launcher passes it on within half a second
        page.wait_for_timeout(100)
    page.get_by_label("Code shown").fill(started.codes()[-1])
    page.get_by_role("button", name="Enter").click()


@pytest.mark.browser
def test_a_code_of_the_terminal_gives_this_browser_control_until_it_signs_out(
    page: Any, started: Started
) -> None:
    page.goto(started.address)
    page.wait_for_selector(TABLE)
    assert 0 == page.get_by_label("Code shown").count(), "who looks is asked for nothing"
    get_control(page, started, wrong=1)
    page.get_by_text("You may send commands for 60 more minutes").wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_text("Signed out").wait_for()
    page.goto(started.base)
    assert "needs its token" in page.locator("body").inner_text()


@pytest.mark.browser
def test_where_every_program_shares_the_name_one_can_only_look(page: Any, started: Started) -> None:
    page.goto(by_localhost(started.address))
    page.wait_for_selector(TABLE)
    page.get_by_text("This address is look-only").wait_for()
    assert 0 == page.get_by_role("button", name="Get control").count()


# What a page of another port tries, given even the name that it cannot know.
ATTACK = """
const own = "NAME:PORT", results = {};
async function attempt(name, action) {
  try { results[name] = String(await action()) } catch (error) { results[name] = "refused" }
}
function socket(host) {
  return () => new Promise((resolve, reject) => {
    const tried = new WebSocket(`ws://${host}/_stcore/stream`, ["streamlit"]);
    tried.onopen = () => resolve("open");
    tried.onerror = () => reject();
  });
}
(async () => {
  for (const host of [own, "localhost:PORT", "127.0.0.1:PORT"]) {
    const all = {credentials: "include", headers: {"x-own": "1"}};
    await attempt("socket " + host, socket(host));
    await attempt("read " + host, async () => (await fetch(`http://${host}/`, all)).status);
    for (const method of ["PUT", "POST", "DELETE"])
      await attempt(method + " " + host, async () =>
        (await fetch(`http://${host}/_stcore/upload_file/a/b`, {...all, method})).status);
  }
  const frame = document.createElement("iframe");
  frame.src = `http://${own}/`;
  frame.onload = async () => {
    await attempt("frame", () => frame.contentDocument ? "blank" : "shown");
    document.title = JSON.stringify(results);
  };
  document.body.append(frame);
})();
"""


@pytest.mark.browser
def test_a_link_to_another_port_hands_over_neither_cookie_nor_name_nor_control(
    page: Any, started: Started
) -> None:
    """The way in which a run was once rolled back by another user of the node."""
    port = str(urlsplit(started.address).port)
    script = ATTACK.replace("NAME", started.host).replace("PORT", port)
    page.goto(started.address)
    page.wait_for_selector(TABLE)
    with stranger(script) as (theirs, seen):
        for host in ("localhost", "127.0.0.1"):
            there = f"http://{host}:{theirs}/"
            page.goto(started.base)
            page.wait_for_selector(TABLE)
            page.evaluate(  # a link in a run's name or note, clicked
                "there => { const a = document.createElement('a'); a.href = there;"
                " document.body.append(a); a.click(); }",
                there,
            )
            page.wait_for_url(there)
            page.wait_for_function("document.title.startsWith('{')")
            results: dict[str, str] = page.evaluate("JSON.parse(document.title)")
            assert 16 == len(results)
            assert {"refused"} == {v for k, v in results.items() if k != "frame"}, results
        sent = "".join(seen)
        assert 2 == len([text for text in seen if text.startswith("/\n")]), "it was visited"
        for secret in ("vitals-", started.host, started.token):
            assert secret not in sent
        assert all("Referer" not in text for text in seen if text.startswith("/\n"))


@pytest.mark.browser
def test_the_cookie_of_localhost_that_a_link_does_hand_over_can_only_look(
    page: Any, started: Started
) -> None:
    """Why that name is look-only: browsers send its cookies to every port."""
    page.goto(by_localhost(started.address))
    page.wait_for_selector(TABLE)
    with stranger() as (theirs, seen):
        page.goto(f"http://localhost:{theirs}/")
    cookie = re.findall(r"^Cookie: (.*)$", seen[0], re.M)[0]
    assert "vitals-" in cookie
    port = urlsplit(started.address).port
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as thief:
        assert 200 == thief.get("/", headers={"Host": "localhost", "Cookie": cookie}).status_code
        own = {"Host": started.host, "Cookie": cookie}
        assert 401 == thief.get("/", headers=own).status_code


@pytest.mark.browser
def test_a_websocket_of_another_origin_is_refused(page: Any, started: Started) -> None:
    client = pytest.importorskip("websockets.sync.client")
    page.goto(started.address)
    page.wait_for_selector(TABLE)
    (cookie,) = [c for c in page.context.cookies() if c["name"].startswith("vitals-")]
    assert (True, "Strict", started.host) == (
        cookie["httpOnly"], cookie["sameSite"], cookie["domain"],
    )  # fmt: skip
    port = urlsplit(started.address).port

    def status(origin: str | None, host: str = f"{started.host}:{port}") -> int:
        try:
            with client.connect(
                f"ws://{host}/_stcore/stream",
                sock=socket.create_connection(("127.0.0.1", port)),
                origin=origin,
                subprotocols=["streamlit"],
                additional_headers={"Cookie": f"{cookie['name']}={cookie['value']}"},
                proxy=None,
            ):
                return 101
        except Exception as error:
            return int(error.response.status_code)  # type: ignore[attr-defined]

    assert 101 == status(started.base)
    for origin in (None, "null", "http://evil.example", f"http://{started.host}:1"):
        assert 403 == status(origin), origin
    assert 403 == status("http://evil.example", "evil.example"), "a name that was rebound"


@pytest.mark.browser
def test_the_browser_is_opened_by_a_page_of_ones_own_that_is_then_deleted(
    page: Any, tmp_path: Path
) -> None:
    """Every user of a node reads the arguments of every program."""
    write_run(tmp_path / "runs", name="kept")
    opener = tmp_path / "bin" / "xdg-open"
    opener.parent.mkdir()
    opener.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments.new\n'
                      f"mv {tmp_path}/arguments.new {tmp_path}/arguments\n")  # fmt: skip
    opener.chmod(0o755)
    command = [sys.executable, "-m", "trainvitals", "dashboard", str(tmp_path / "runs"), "--open"]
    environ = os.environ | {
        "PATH": f"{opener.parent}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
    }
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        while not (tmp_path / "arguments").exists():
            page.wait_for_timeout(100)
        opened = (tmp_path / "arguments").read_text().strip()
        file = Path(opened)  # and nothing else
        assert address in file.read_text()
        assert (0o600, 0o700) == tuple(
            stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)
        )
        page.goto(file.as_uri())
        page.wait_for_selector(TABLE)
        assert address.partition("?")[0] == page.url
        assert not file.exists()
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@contextmanager
def nginx(upstream: int, port: int, folder: Path) -> Iterator[None]:
    """Run nginx with the guide's configuration."""
    server = block(GUIDE, "test: nginx").body.replace("/etc/ssl", str(folder))
    server = server.replace("listen 443", f"listen 127.0.0.1:{port}")
    server = server.replace("8501", str(upstream))
    own = f"pid {folder}/nginx.pid; error_log {folder}/error.log; daemon off;"
    (folder / "nginx.conf").write_text(f"{own} events {{}} http {{ access_log off; {server} }}")
    process = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def tls_alone(upstream: int, port: int, folder: Path) -> Iterator[None]:
    """Take TLS off what comes to a port, and pass it on as it is."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "vitals.pem", folder / "vitals.key")
    loop = asyncio.new_event_loop()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", upstream)
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", port, ssl=context) as server:
            with suppress(asyncio.CancelledError):
                await server.serve_forever()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in left:
            connection.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    task = loop.create_task(run())
    thread = threading.Thread(target=loop.run_until_complete, args=(task,))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


NEEDS_NGINX = pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx is installed")


@pytest.mark.browser
@pytest.mark.parametrize("proxy", one_in(2, [tls_alone, pytest.param(nginx, marks=NEEDS_NGINX)]))
def test_behind_a_proxy_with_tls_pages_are_live_and_control_works(
    proxy: Callable[[int, int, Path], Any], browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    write_run(tmp_path / "runs", name="kept")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=vitals.example"
    make += f" -keyout {tmp_path}/vitals.key -out {tmp_path}/vitals.pem"
    subprocess.run(make.split(), check=True, capture_output=True)
    port, public = launch.free_port(0), launch.free_port(0)
    url = f"https://vitals.example:{public}"
    options = ("--control", "--port", str(port), "--public-url", url)
    with ExitStack() as stack:
        terminal = stack.enter_context((tmp_path / "terminal").open("w"))
        shown = dashboard(tmp_path / "runs", tmp_path, *options, errors=terminal.fileno())
        _, address = stack.enter_context(shown)
        stack.enter_context(proxy(port, public, tmp_path))
        chromium = browser.browser_type.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--host-resolver-rules=MAP vitals.example 127.0.0.1"],
        )
        stack.callback(chromium.close)
        context = chromium.new_context(ignore_https_errors=True)
        context.set_default_timeout(60_000)
        page = context.new_page()
        through = re.findall("Through the proxy: (.*)", (tmp_path / "terminal").read_text())[0]
        page.goto(through)
        page.wait_for_selector(TABLE)
        assert f"{url}/" == page.url
        cookies = {c["name"]: c["secure"] for c in context.cookies()}
        assert any(name.startswith("__Host-vitals-") for name in cookies)
        assert all(cookies.values()), cookies
        get_control(page, Started(address, tmp_path / "terminal"))
        page.get_by_text("You may send commands").wait_for()
