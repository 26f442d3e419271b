"""`vitals mcp` and `vitals skill install`: what they need, what they refuse and write."""

import subprocess
import sys

import pytest

from tests.support.cli import vitals
from vitals_plugins.bridges.assistants.cli import SKILL_FILE

BLOCKED = """
import sys
sys.modules["mcp"] = None
from trainvitals.cli.main import main
sys.exit(main(["mcp", sys.argv[1]]))
"""
IMPORTED = """
import sys
from trainvitals.cli.main import build_app
build_app("mcp")
print(sorted({"mcp", "pydantic", "starlette"} & {name.partition(".")[0] for name in sys.modules}))
"""


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_sdk_is_imported_by_the_command_only():
    assert "[]\n" == python(IMPORTED).stdout


def test_without_the_extra_the_command_says_what_to_install(tmp_path):
    done = python(BLOCKED, tmp_path)
    assert 2 == done.returncode
    assert "needs the package mcp" in done.stderr
    assert "pip install 'trainvitals[mcp]'" in done.stderr


def test_a_folder_that_is_not_there_is_an_error_at_the_start(tmp_path, capsys):
    pytest.importorskip("mcp", reason="the MCP SDK is not installed")
    assert 2 == vitals("mcp", tmp_path / "absent")
    assert "there is no folder" in capsys.readouterr().err


def test_sql_is_not_served_over_http(tmp_path, capsys):
    pytest.importorskip("mcp", reason="the MCP SDK is not installed")
    assert 2 == vitals("mcp", tmp_path, "--data", tmp_path, "--http", "0")
    assert "--data cannot be used with --http" in capsys.readouterr().err


def test_the_skill_file_is_written_and_a_changed_one_is_kept(tmp_path, capsys):
    path = tmp_path / "skills" / "vitals" / SKILL_FILE
    assert 0 == vitals("skill", "install", "--to", tmp_path / "skills")
    assert f"{path}\n" == capsys.readouterr().out
    text = path.read_text()
    assert text.startswith("---\nname: vitals\ndescription: ")
    path.write_text("changed")
    assert 2 == vitals("skill", "install", "--to", tmp_path / "skills")
    assert "changed" == path.read_text()
    assert 0 == vitals("skill", "install", "--to", tmp_path / "skills", "--force")
    assert text == path.read_text()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert 1 == vitals("skill", "install", "--to", tmp_path / "file")
    assert "cannot be created" in capsys.readouterr().err
