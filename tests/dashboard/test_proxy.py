"""The dashboard behind a proxy with TLS, and the page that opens a browser."""

import asyncio
import os
import re
import shutil
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.folder import write_run
from tests.house.pages import ROOT, block
from tests.support.dashboards import TABLE, Started, dashboard, get_control
from tests.support.examples import one_in
from vitals_dashboard import launch

pytestmark = [pytest.mark.browser, pytest.mark.nightly]
GUIDE = ROOT / "docs" / "guides" / "dashboard-access.md"


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
        try:
            with suppress(ConnectionError):
                while data := await reader.read(65536):
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

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
        context = browser.new_context(ignore_https_errors=True)
        stack.callback(context.close)
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
