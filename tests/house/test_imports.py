"""Who may import whom, and what a rank pays for the library."""

import json
import subprocess
import sys
import tomllib
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

import grimp
import pytest

import trainer_hooks
import trainvitals
from tests.support.story import story, through_a_folder
from trainvitals.cli.programs import PACKAGES

ROOT = Path(__file__).parents[2]

NEVER_IN_A_RANK = {
    "pynvml",
    "sqlalchemy",
    "streamlit",
    "psutil",
    "fastapi",
    "prometheus_client",
    "rich",
    "typer",
    "httpx",
    "cryptography",
}


SLOW_CLASSES = {"FollowedRun"}
"""Classes of a command on a directory that are dataclasses: one takes 1 ms, a Struct 0.02 ms."""
OPTIONAL_PARTS = {"sqlalchemy.orm", "sqlalchemy.dialects.postgresql", "torch"}
"""Large modules that no directory needs, besides the packages of each program."""
NO_DIRECTORY = {
    *("numpy.ma", "trainvitals.testing", "vitals_collector.api", "vitals_collector.cluster"),
    *("vitals_collector.alerts.worker", "vitals_collector.numbers.lake_engine"),
    *("vitals_collector.report.replay", "vitals_collector.report.svg_plot"),
}
"""Slow modules that a command on a directory does not need."""
FINDINGS = {
    *("trainvitals.detect.fleet", "trainvitals.hindsight", "trainvitals.policy"),
    *("vitals_collector.alerts", "vitals_collector.live.live_monitor", "vitals_collector.report"),
    *("vitals_collector.live.step_join", "vitals_collector.queries.incidents"),
    *("trainvitals.detect.level", "trainvitals.detect.posttraining"),
}
"""Modules about findings, decisions and incidents: the list of runs needs none of them."""
RUN_COMMAND = """
import contextlib, io
from trainvitals.cli.main import main
output = io.StringIO()
with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
    main({arguments!r})
assert "tiny" in output.getvalue(), output.getvalue()
"""


def modules_after(*imports: str) -> set[str]:
    """Return the names of all modules that a fresh interpreter holds after these imports."""
    return modules_after_each(*(f"import {name}" for name in imports))[-1]


def modules_after_each(*statements: str) -> list[set[str]]:
    """Return the names of the modules that a fresh interpreter holds after each statement."""
    code = "import sys, json\n" + "".join(
        f"{statement}\nprint(json.dumps(list(sys.modules)))\n" for statement in statements
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def dataclasses_in(modules: set[str]) -> set[str]:
    """Return the names of the dataclasses that these modules of the project define."""
    packages = ("trainvitals", "vitals_collector")
    return {
        value.__name__
        for name in modules
        if name.partition(".")[0] in packages
        for value in vars(import_module(name)).values()
        if isinstance(value, type) and is_dataclass(value) and value.__module__ == name
    }


def test_a_command_line_holds_no_other_library_s():
    modules = modules_after(
        "trainvitals.cli.main", "vitals_collector.cli.collector", "trainvitals.io.unix_transport"
    )
    assert "httpx" in modules
    assert {"rich", "pygments"} & modules == set()


@pytest.mark.parametrize(
    ("command", "unneeded"),
    [("runs {}", NO_DIRECTORY | FINDINGS), ("show {}", NO_DIRECTORY), ("why {} 40", NO_DIRECTORY)],
)
def test_a_command_on_a_directory_imports_no_package_of_servers_and_clients(
    command: str, unneeded: set[str], tmp_path: Path
):
    with through_a_folder(story(), tmp_path):
        arguments = command.format(tmp_path / "runs").split()
    modules = modules_after_each(RUN_COMMAND.format(arguments=arguments))[-1]
    large = OPTIONAL_PARTS.union(*PACKAGES.values())
    assert {"msgspec", "numpy", "sqlalchemy", "typer"} == modules & large
    assert set() == modules & unneeded
    assert dataclasses_in(modules) <= SLOW_CLASSES


def test_the_hooks_add_only_themselves_to_torch_and_msgspec():
    theirs = "import torch, torch.distributed.checkpoint, msgspec, numpy"
    before, after = modules_after_each(theirs, "import trainer_hooks")
    added = after - before
    tops = {name.partition(".")[0] for name in added}
    allowed = {"trainvitals", "trainer_hooks", "msgspec", "numpy", "torch"}
    assert tops - set(sys.stdlib_module_names) <= allowed
    assert set() == tops & NEVER_IN_A_RANK
    assert len({name for name in added if name.startswith(("trainvitals", "trainer_hooks"))}) <= 60


def test_the_core_imports_without_torch():
    assert "torch" not in modules_after("trainvitals.cli.main", "trainvitals.wire")


def test_the_one_name_loads_nothing_until_it_is_used():
    before = modules_after("typing")
    assert {"trainvitals"} == modules_after("trainvitals") - before


def test_the_one_name_has_what_the_training_library_has():
    assert sorted(trainer_hooks.__all__) == sorted(trainvitals.__all__)
    assert set(trainvitals.__all__) <= set(dir(trainvitals))
    for name in trainvitals.__all__:
        assert getattr(trainvitals, name) is getattr(trainer_hooks, name)
    with pytest.raises(AttributeError, match="module 'trainvitals' has no attribute 'wach'"):
        trainvitals.wach  # type: ignore[attr-defined]  # noqa: B018


def test_without_torch_the_one_name_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; from trainvitals import watch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: trainvitals.watch needs torch, which is not")
    assert last.endswith("pip install 'trainvitals[torch]'")


def test_the_contract_of_the_hooks_excepts_no_import():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (c for c in settings["contracts"] if c.get("containers") == ["trainer_hooks"])
    assert ["trainvitals -> trainer_hooks"] == contract["ignore_imports"]


def test_no_directories_of_the_hooks_import_each_other():
    graph = grimp.build_graph("trainer_hooks", cache_dir=None)  # a cache may be out of date
    edges = {
        (importer.split(".")[1], imported.split(".")[1])
        for importer in graph.modules - {"trainer_hooks"}
        for imported in graph.find_modules_directly_imported_by(importer) - {"trainer_hooks"}
    }
    assert [] == [edge for edge in edges if edge[0] != edge[1] and edge[::-1] in edges]
