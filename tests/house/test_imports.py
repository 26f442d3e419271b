"""Who may import whom, and what a rank pays for the library."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import trainer_hooks
import trainvitals

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


def modules_after(*imports: str) -> set[str]:
    """Return the names of all modules that a fresh interpreter holds after these imports."""
    code = f"import sys, json, {', '.join(imports)}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_every_contract_between_the_rooms_is_kept():
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr


def test_a_rank_that_imports_the_hooks_gets_no_server_and_no_command_line():
    assert (
        set()
        == {name.partition(".")[0] for name in modules_after("trainer_hooks")} & NEVER_IN_A_RANK
    )


def test_a_command_line_holds_no_other_library_s():
    modules = modules_after("trainvitals.cli.main", "vitals_collector.cli.collector")
    assert "httpx" in modules
    assert {"rich", "pygments"} & modules == set()


def test_the_hooks_add_only_themselves_to_torch_and_msgspec():
    before = modules_after("torch", "torch.distributed.checkpoint", "msgspec", "numpy")
    added = modules_after("torch", "torch.distributed.checkpoint", "trainer_hooks") - before
    foreign = {name.partition(".")[0] for name in added} - set(sys.stdlib_module_names)
    assert foreign <= {"trainvitals", "trainer_hooks", "msgspec", "numpy", "torch"}
    ours = {name for name in added if name.partition(".")[0] in ("trainvitals", "trainer_hooks")}
    assert len(ours) <= 60


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
