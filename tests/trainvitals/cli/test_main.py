import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from trainvitals import __version__
from trainvitals.cli import doctor, main, programs
from trainvitals.errors import CheckpointCorruptError, ConfigError, StorageError

ROOT = Path(__file__).parents[3]


def app_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `vitals agent` raise the error."""

    def register(app: typer.Typer) -> None:
        @app.command()
        def agent() -> None:
            raise error

    point = EntryPoint("agent", "module:register", programs.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: register)
    monkeypatch.setattr(programs, "entry_points", lambda **_: [point])


def test_the_version_goes_to_stdout(capsys):
    with pytest.raises(SystemExit) as exit_:
        main.main(["--version"])
    assert 0 == exit_.value.code
    assert f"vitals {__version__}\n" == capsys.readouterr().out


def test_without_a_command_the_help_is_shown_and_all_is_well(capsys):
    with pytest.raises(SystemExit) as exit_:
        main.main([])
    assert 0 == exit_.value.code
    assert "Commands:" in capsys.readouterr().out


def test_an_unknown_command_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as exit_:
        main.main(["bogus"])
    captured = capsys.readouterr()
    assert 2 == exit_.value.code
    assert "" == captured.out
    assert "No such command 'bogus'" in captured.err


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("spike.window is 3", hint="use 16"), 2), (StorageError("disk full"), 1)],
)
def test_an_error_of_ours_is_text_on_stderr_and_never_a_traceback(monkeypatch, capsys, error, code):
    app_with(monkeypatch, error)
    assert code == main.main(["agent"])
    captured = capsys.readouterr()
    assert "" == captured.out
    assert f"error: {error}\n" == captured.err


def test_an_interrupt_exits_with_130(monkeypatch):
    app_with(monkeypatch, KeyboardInterrupt())
    with pytest.raises(SystemExit) as exit_:
        sys.exit(main.main(["agent"]))
    assert 130 == exit_.value.code


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    app_with(monkeypatch, ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError, match="bug"):
        main.main(["agent"])


def test_a_package_that_is_missing_when_the_command_runs_says_what_to_install(monkeypatch, capsys):
    app_with(monkeypatch, ModuleNotFoundError("No module named 'psutil'", name="psutil"))
    assert 2 == main.main(["agent"])
    error = capsys.readouterr().err
    assert "`vitals agent` needs the package psutil" in error
    assert "pip install trainvitals\n" in error


def test_a_server_package_that_is_missing_names_its_extra(monkeypatch, capsys):
    app_with(monkeypatch, ModuleNotFoundError("No module named 'fastapi'", name="fastapi"))
    monkeypatch.setitem(programs.EXTRAS, "agent", "collector")
    assert 2 == main.main(["agent"])
    assert "pip install 'trainvitals[collector]'" in capsys.readouterr().err


def test_a_program_whose_packages_are_missing_keeps_its_commands(monkeypatch, capsys):
    missing = ModuleNotFoundError("No module named 'sqlalchemy'", name="sqlalchemy.engine")

    def load(self: EntryPoint) -> None:
        raise missing

    point = EntryPoint("collector", "module:register", programs.GROUP)
    monkeypatch.setattr(EntryPoint, "load", load)
    monkeypatch.setattr(programs, "entry_points", lambda **_: [point])
    assert 2 == main.main(["runs", "--format", "json", "anything"])
    assert "pip install trainvitals\n" in capsys.readouterr().err


def test_a_program_that_cannot_be_loaded_does_not_take_the_others_away(monkeypatch, capsys):
    def load(self: EntryPoint) -> None:
        raise SyntaxError("oh no")

    monkeypatch.setattr(EntryPoint, "load", load)
    points = [EntryPoint(n, "module:register", programs.GROUP) for n in ("agent", "deploy")]
    monkeypatch.setattr(programs, "entry_points", lambda **_: points)
    assert 2 == main.main(["deploy"])
    assert "`vitals deploy` cannot be loaded: SyntaxError: oh no" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main.main(["--version"])
    assert 0 == exit_.value.code


def test_a_known_command_loads_only_its_program():
    loaded = []

    class Program(NamedTuple):
        name: str

        def load(self) -> Callable[[typer.Typer], None]:
            loaded.append(self.name)
            return lambda app: app.command(self.name)(lambda: None)

    installed = [Program("agent"), Program("plan"), Program("someones-own")]
    for command in ("plan", "someones-own", "", "--help"):
        programs.register_all(typer.Typer(), command=command, programs=installed)
    every = [program.name for program in installed]
    assert ["plan", *every, *every, *every] == loaded


def test_the_table_of_commands_is_what_the_programs_register():
    _, owners = main.build_app()
    found: dict[str, set[str]] = {}
    for command, program in owners.items():
        found.setdefault(program, set()).add(command)
    assert {program: set(names) for program, names in programs.COMMANDS.items()} == found
    assert set(programs.ORDER) <= owners.keys()


def test_python_dash_m_is_the_same_program():
    done = subprocess.run(
        [sys.executable, "-m", "trainvitals", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"vitals {__version__}\n" == done.stdout


NOT_PROGRAMS = (
    *("all", "torch", "replay"),
    *("tensorboard", "wandb", "mlflow", "trackio", "otlp"),
    *("huggingface", "trl", "accelerate", "lightning", "deepspeed", "torchtitan"),
)
"""Extras that the doctor does not look for: nothing of ours is missing without them."""


INTERRUPTED = """
import sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
from trainvitals.cli.entry import main
sys.exit(main(["runs"]))
"""


def test_ctrl_c_while_the_command_loads_ends_it_without_a_traceback():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False
    )
    assert (130, "", "") == (done.returncode, done.stdout, done.stderr)


def test_a_command_runs_with_garbage_collection():
    code = (
        "import gc, contextlib; from trainvitals.cli.entry import main\n"
        "with contextlib.suppress(SystemExit): main(['--version'])\n"
        "print(gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"vitals {__version__}\nTrue\n" == done.stdout


def test_every_way_to_start_a_command_handles_ctrl_c_while_it_loads():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {"vitals": "trainvitals.cli.entry:main"} == scripts
    assert "trainvitals.cli.entry import main" in (ROOT / "trainvitals/__main__.py").read_text()


def test_a_shell_completes_commands(monkeypatch, capsys):
    monkeypatch.setenv("_VITALS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "vitals post")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit) as exit_:
        main.main([])
    assert (0, "postmortem") == (exit_.value.code, capsys.readouterr().out.strip())


class TestDoctor:
    def test_every_fault_names_its_remedy_and_what_is_none_has_no_second_line(self):
        checks = [
            doctor.check_torch(lambda _: None),
            doctor.check_torch(lambda _: "2.5.1+cu121"),
            *doctor.check_programs(lambda module: module not in ("psutil", "uvloop", "streamlit")),
        ]
        assert {"ok", "info", "note", "fail"} == {check.status for check in checks}
        assert all(bool(check.hint) == (check.status in ("note", "fail")) for check in checks)

    def test_the_base_install_alone_has_no_fault_and_says_how_to_add_each_extra(self):
        base = programs.PACKAGES["base"]
        checks = list(doctor.check_programs(lambda module: module in base))
        assert ["ok", *["info"] * (len(programs.PACKAGES) - 1)] == [c.status for c in checks]
        texts = {check.name: check.text for check in checks}
        assert "not installed: pip install 'trainvitals[dashboard]'" == texts["dashboard"]

    def test_in_a_base_install_the_command_exits_zero_in_one_line_a_check(
        self, monkeypatch, tmp_path, capsys
    ):
        base = programs.PACKAGES["base"]
        monkeypatch.setattr(doctor, "find_spec", lambda name: name if name in base else None)
        monkeypatch.setattr(doctor, "_installed_version", lambda name: None)
        monkeypatch.setattr("trainvitals.io.private.is_memory_backed", lambda _: True)
        monkeypatch.setattr(doctor, "MIN_SHARED_BYTES", 0)
        monkeypatch.setenv("VITALS_SHM", str(tmp_path))
        monkeypatch.setenv("VITALS_DIR", str(tmp_path / "runs"))
        with pytest.raises(SystemExit) as exit_:
            main.main(["doctor"])
        assert 0 == exit_.value.code
        lines = capsys.readouterr().out.splitlines()
        assert {"ok", "info"} == {line.split()[0] for line in lines}
        assert ["pip install 'trainvitals[torch]'"] == [
            line.partition(": ")[2] for line in lines if line.split()[1] == "torch"
        ]

    @pytest.mark.parametrize(
        ("version", "status"), [("2.13.0+cpu", "ok"), ("2.5.9", "fail"), (None, "info")]
    )
    def test_a_torch_that_is_too_old_fails_and_none_is_only_information(self, version, status):
        assert status == doctor.check_torch(lambda _: version).status

    def test_a_program_names_the_packages_it_lacks(self):
        base = next(iter(doctor.check_programs(lambda module: module != "pynvml")))
        assert ("note", "incomplete: pynvml not installed") == (base.status, base.text)
        assert "pip install trainvitals" == base.hint

    def test_the_packages_it_looks_for_are_those_of_the_base_and_the_extras(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        declared = {"base": project["dependencies"], **project["optional-dependencies"]}
        modules = {"nvidia-ml-py": "pynvml"}
        asked: dict[str, set[str]] = {}
        for extra in declared.keys() - set(NOT_PROGRAMS):
            names = {re.split(r"[^A-Za-z0-9-]", line)[0].lower() for line in declared[extra]}
            names.discard("trainvitals")  # an extra that brings another one
            asked[extra] = {modules.get(name, name.replace("-", "_")) for name in names}
        assert {extra: set(names) for extra, names in programs.PACKAGES.items()} == asked

    def test_a_checkpoint_is_saved_and_loaded_as_a_trial(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        ((name, value),) = project["entry-points"][doctor.TRIALS].items()
        (check,) = doctor.check_checkpoint([EntryPoint(name, value, doctor.TRIALS)])
        assert ("checkpoint", "ok") == (check.name, check.status), check.text

    def test_a_checkpoint_that_cannot_be_saved_fails_with_the_reason(self, monkeypatch):
        from trainer_hooks.recovery.checkpoints import payload

        def refuse(folder: Path) -> None:
            raise CheckpointCorruptError("the metadata names builtins.getattr")

        monkeypatch.setattr(payload, "read_metadata", refuse)
        trial = "trainer_hooks.recovery.checkpoints.trial:try_checkpoint"
        (check,) = doctor.check_checkpoint([EntryPoint("checkpoint", trial, doctor.TRIALS)])
        assert "fail" == check.status
        assert "not saved: the metadata names builtins.getattr" in check.text

    def test_a_run_directory_that_cannot_be_made_fails(self, tmp_path):
        (tmp_path / "file").write_text("")
        check = doctor.check_run_directory({"VITALS_DIR": str(tmp_path / "file" / "runs")})
        assert "fail" == check.status
        assert str(tmp_path / "file") in check.text

    def test_run_directories_on_a_full_disk_are_noted(self, monkeypatch, tmp_path):
        assert "ok" == doctor.check_run_directory({"VITALS_DIR": str(tmp_path)}).status
        monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 1 << 62)
        check = doctor.check_run_directory({"VITALS_DIR": str(tmp_path)})
        assert "note" == check.status
        assert "the agent holds in memory what the ranks write" in check.text

    def test_a_base_that_others_may_enter_fails_with_a_way_out(self, monkeypatch, tmp_path, capsys):
        base = tmp_path / f"trainvitals-{os.getuid()}"
        base.mkdir()
        base.chmod(0o777)
        monkeypatch.setenv("VITALS_SHM", str(tmp_path))
        with pytest.raises(SystemExit) as exit_:
            main.main(["doctor"])
        assert 1 == exit_.value.code
        assert f"fail  private base     {base}" in capsys.readouterr().out

    def test_too_little_shared_memory_fails(self, monkeypatch, tmp_path):
        monkeypatch.setattr("trainvitals.io.private.is_memory_backed", lambda _: True)
        monkeypatch.setattr(doctor, "MIN_SHARED_BYTES", 1 << 62)
        checks = doctor.check_memory({"VITALS_SHM": str(tmp_path)})
        assert ["ok", "fail"] == [check.status for check in checks]

    def test_json_is_data_on_stdout(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setenv("VITALS_SHM", str(tmp_path))
        with pytest.raises(SystemExit) as exit_:
            main.main(["doctor", "--format", "json"])
        checks = json.loads(capsys.readouterr().out)
        assert any(c["status"] == "fail" for c in checks) == bool(exit_.value.code)
        assert {"vitals", "torch", "private base", "shared memory"} <= {c["name"] for c in checks}


@pytest.mark.parametrize("group", ["store", "checkpoints", "deploy"])
def test_a_group_alone_shows_its_commands_and_is_wrong_usage(group, capsys):
    with pytest.raises(SystemExit) as exit_:
        main.main([group])
    assert 2 == exit_.value.code
    shown = "".join(capsys.readouterr())
    assert f"Usage: vitals {group} [OPTIONS] COMMAND [ARGS]..." in shown
    assert f"Example: vitals {group} " in shown
