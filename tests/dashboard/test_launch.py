import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.dashboard.conftest import write_tokens
from tests.dashboard.folder import write_run
from tests.dashboard.stub import CONTROL
from tests.support.dashboards import by_localhost, dashboard
from trainvitals.cli.main import main
from trainvitals.errors import UsageError
from vitals_dashboard import launch
from vitals_dashboard.cli import ended_by_signals
from vitals_dashboard.settings import (
    SETTINGS_VARIABLE,
    DashboardSettings,
    load_settings,
    write_settings,
)


def test_what_is_shipped_is_closed_by_default():
    flags = launch.streamlit_command(8501)
    for flag in (
        "--server.address=127.0.0.1",
        "--server.enableXsrfProtection=true",
        "--server.enableCORS=true",
        "--server.headless=true",
        "--server.enableAgentApi=false",
        "--browser.gatherUsageStats=false",
        "--client.showErrorDetails=none",
        "--client.toolbarMode=viewer",
    ):
        assert flag in flags


def test_no_secret_is_an_argument():
    text = " ".join(launch.streamlit_command(1) + launch.collector_command(Path("a"), Path("b")))
    assert "token" not in text


def test_files_beside_the_entry_shadow_no_module():
    entry = Path(launch.__file__).parent / "entry"
    assert all(path.stem.startswith("vitals_") for path in entry.iterdir() if path.suffix == ".py")


def test_the_settings_file_is_private_and_comes_back_whole(tmp_path: Path):
    settings = DashboardSettings(door_token="t" * 32, collector_url="https://a:1", token_file="f")
    path = tmp_path / "settings.json"
    write_settings(settings, path)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert settings == load_settings({SETTINGS_VARIABLE: str(path)})
    with pytest.raises(FileExistsError):
        write_settings(settings, path)


def test_the_pages_started_by_hand_say_how_to_start_them():
    with pytest.raises(UsageError, match=SETTINGS_VARIABLE) as caught:
        load_settings({})
    assert "vitals dashboard" in caught.value.hint


def test_a_collector_that_moved_to_another_port_is_found_again(tmp_path: Path):
    settings = DashboardSettings(
        door_token="t", collector_url="https://a:1", token_file="", collector_data=str(tmp_path)
    )
    assert "https://a:1" == settings.collector().url
    place = tmp_path / "collector.json"
    place.write_bytes(msgspec.json.encode({"url": "https://a:2", "pid": 1}))
    place.chmod(0o600)
    assert "https://a:2" == settings.collector().url


def test_two_dashboards_of_one_folder_do_not_share_a_store(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with launch.cache_slot(Path("/runs")) as first, launch.cache_slot(Path("/runs")) as second:
        assert first.path != second.path
    with launch.cache_slot(Path("/runs")) as again:
        assert first.path == again.path, "the next one goes on with what was read"
    assert 0o700 == stat.S_IMODE(first.path.stat().st_mode)


def test_a_store_is_held_while_the_program_that_reads_it_lives(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ExitStack() as stack:
        with launch.cache_slot(Path("/runs")) as first:
            command = [sys.executable, "-c", "input()"]
            reads, writes = os.pipe()
            stack.callback(os.close, writes)
            process = subprocess.Popen(command, stdin=reads, pass_fds=(first.lock,))
            stack.callback(process.wait)
            stack.callback(process.kill)
            os.close(reads)
        with launch.cache_slot(Path("/runs")) as second:
            assert first.path != second.path


def test_a_folder_has_one_store_by_whatever_path_it_is_named(tmp_path: Path, monkeypatch):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    names = ("runs", "link", "runs/x/..", str(tmp_path / "runs"))
    assert {(tmp_path / "runs").resolve()} == {launch.check_folder(Path(name)) for name in names}


def test_a_free_port_is_taken_where_none_is_named():
    assert 0 < launch.free_port(0)


def test_a_browser_that_tries_ipv6_first_finds_nobody_else_there():
    """The name leads to both loopbacks; whoever held the other would be given the token."""
    port = launch.free_port(0)

    def listens() -> bool:
        with socket.socket(socket.AF_INET6) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                other.bind(("::1", port))
            except OSError:
                return False
            other.listen()
            with pytest.raises(UsageError, match="in use by another program"), ExitStack() as stack:
                launch._hold_ipv6(stack, port)
            return True

    if not listens():
        pytest.skip("this machine has no IPv6 loopback")
    with ExitStack() as stack:
        launch._hold_ipv6(stack, port)
        assert not listens()
    assert listens()


# ---------------------------------------------------------------------- mistakes, without traceback


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command line, which must fail as usage; return what it said."""

    def run(*arguments: str) -> str:
        assert 2 == main(["dashboard", *arguments])
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return run


def test_a_missing_folder_is_a_clear_error(fails, tmp_path: Path):
    assert "does not exist" in fails(str(tmp_path / "nothing"))


def test_a_file_in_place_of_the_folder_is_a_clear_error(fails, tmp_path: Path):
    (tmp_path / "file").touch()
    assert "is not a folder" in fails(str(tmp_path / "file"))


def test_a_taken_port_is_a_clear_error(fails, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = fails(str(tmp_path), "--port", str(port))
    assert f"port {port}" in said and "leave out --port" in said


def test_an_impossible_port_is_a_clear_error(fails, tmp_path: Path):
    assert "0 to 65535" in fails(str(tmp_path), "--port", "99999")


def test_no_collector_anywhere_says_what_to_start(fails):
    assert "vitals dashboard DIR" in fails()


def test_a_collector_without_its_token_is_a_clear_error(fails):
    assert "--token-file" in fails("--collector", "https://127.0.0.1:9")


def test_a_wrong_address_is_a_clear_error(fails, tmp_path: Path):
    assert "https://host:port" in fails("--collector", "nonsense")


def test_a_folder_and_a_collector_together_are_a_clear_error(fails, tmp_path: Path):
    assert "leave out one" in fails(str(tmp_path), "--collector", "https://127.0.0.1:9")


def test_control_that_could_send_no_command_is_refused_at_the_start(capsys, tmp_path: Path):
    file = write_tokens(tmp_path / "tokens.json")
    options = ("--collector", "https://127.0.0.1:9", "--token-file", str(file), "--control")
    assert 1 == main(["dashboard", *options])
    said = capsys.readouterr().err
    assert "--control needs a control token" in said and "--scope control" in said
    write_tokens(file, control=CONTROL)
    (tmp_path / "control.key").unlink()
    assert 1 == main(["dashboard", *options])
    said = capsys.readouterr().err
    assert "control.key: No such file" in said and "copy it next to your token file" in said


# ------------------------------------------------------------------------------- the whole command


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


def test_the_command_serves_a_folder_behind_its_token_and_ends_with_its_parts(
    runs: Path, tmp_path: Path
):
    write_run(runs, name="kept")
    with dashboard(runs, tmp_path) as (process, address):
        assert re.fullmatch(r"http://[0-9a-f]{32}\.localhost:\d+/\?token=[\w-]{20,}", address)
        name, _, token = address.removeprefix("http://").partition(".localhost")
        token = token.partition("=")[2]
        address = by_localhost(address)
        base = address.partition("/?token=")[0]
        children = children_of(process.pid)
        assert 2 == len(children), "a collector and the pages"
        arguments = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in children)
        environments = "".join(
            Path(f"/proc/{pid}/environ").read_text(errors="replace") for pid in children
        )
        for secret in (name, token):
            assert secret not in arguments and secret not in environments
        with httpx.Client(trust_env=False) as client:
            assert 401 == client.get(base).status_code
            assert 401 == client.get(f"{base}/run?token=guess").status_code
            assert 400 == client.get(base, headers={"Host": "evil.example"}).status_code
            inside = client.get(address, follow_redirects=True)
            assert (200, f"{base}/") == (inside.status_code, str(inside.url))
            assert "token" not in str(inside.url)
        process.send_signal(signal.SIGINT)
        assert 130 == process.wait(60)
        assert all(gone(pid) for pid in children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_and_a_closed_terminal_end_it_as_ctrl_c_does(number: signal.Signals):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        signal.raise_signal(number)
    assert before == signal.getsignal(number)


@pytest.mark.nightly
def test_where_the_command_is_killed_its_parts_end_by_themselves(runs: Path, tmp_path: Path):
    write_run(runs, name="kept")
    with dashboard(runs, tmp_path) as (process, address):
        children = children_of(process.pid)
        assert 2 == len(children)
        assert httpx.get(by_localhost(address), follow_redirects=True, trust_env=False).is_success
        ends = [os.pidfd_open(pid) for pid in children]
        process.kill()
        assert -signal.SIGKILL == process.wait(60)
        for end in ends:  # readable once the process has ended, whoever is its parent now
            assert [end] == select.select([end], [], [], 60)[0]
            os.close(end)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["collector", "pages"])
def test_where_one_part_dies_the_command_says_so_and_ends_the_other(
    victim: str, runs: Path, tmp_path: Path
):
    with dashboard(runs, tmp_path) as (process, _):
        children = children_of(process.pid)
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
        dying = [p for p, line in lines.items() if ("collector" in line) == (victim == "collector")]
        assert dying, lines
        os.kill(dying[0], signal.SIGKILL)
        assert 1 == process.wait(60)
        assert all(gone(pid) for pid in children)
