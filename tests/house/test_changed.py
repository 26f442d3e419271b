"""The tests that a change selects."""

import subprocess

import pytest

from tests.support.changed import OF_ALL_SOURCES, ROOT, Sources, changed_files


@pytest.fixture(scope="module")
def sources():
    return Sources()


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("trainvitals/units.py", "tests/trainvitals/test_units.py"),
        ("trainvitals/policy/actions.py", "tests/trainvitals/test_policy.py"),
        ("tests/support/orders.py", "tests/collector/test_commands.py"),
        ("tests/collector/numbers/conftest.py", "tests/collector/numbers/test_lake.py"),
        # Started under torchrun, by its file's name.
        ("tests/trainer_hooks/ranks_ema.py", "tests/trainer_hooks/test_ranks_ema.py"),
        # Through a command of `vitals`.
        ("plugins/vitals_plugins/lab/plan/cli.py", "tests/plugins/lab/test_training_plan.py"),
        # Through a name that `trainvitals` looks up.
        ("trainer_hooks/monitor.py", "tests/e2e/test_user_alerts.py"),
        ("docs/guides/alerts.md", "tests/trainvitals/test_user_alerts.py"),
        ("docs/guides/install.md", "tests/house/test_guides.py"),
        (
            "dashboard/vitals_dashboard/charts/browser/uPlot.LICENSE",
            "tests/house/test_supply.py",
        ),
    ],
)
def test_a_test_that_a_change_can_reach_is_selected(sources, changed, test):
    assert test in sources.select([changed])


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("trainer_hooks/features/profiling.py", "tests/trainvitals/test_units.py"),
        ("agent/vitals_agent/gpu.py", "tests/dashboard/test_sparkline.py"),
        ("tests/trainer_hooks/ranks_ema.py", "tests/trainer_hooks/test_ddp.py"),
        ("docs/guides/alerts.md", "tests/trainvitals/test_units.py"),
    ],
)
def test_a_test_that_it_cannot_reach_is_not(sources, changed, test):
    assert (ROOT / test).exists()
    assert test not in sources.select([changed])


def test_the_nearest_tests_come_first_and_have_their_reason(sources):
    reasons = sources.select(["trainvitals/units.py"])
    direct = [f for f, why in reasons.items() if why.count(" <- ") == 1]
    assert direct == list(reasons)[: len(direct)]
    module = "tests.trainvitals.test_units"
    assert f"trainvitals/units.py <- {module}" == reasons["tests/trainvitals/test_units.py"]


@pytest.mark.parametrize("file", ["Makefile", "pyproject.toml", "tests/conftest.py"])
def test_what_every_test_depends_on_selects_everything(sources, file):
    assert {"tests": file} == sources.select(["trainvitals/units.py", file])


def test_a_source_selects_the_tests_that_read_all_sources(sources):
    assert set() == set(OF_ALL_SOURCES) - sources.select(["docs/build_docs.py"]).keys()
    assert all((ROOT / file).exists() for file in OF_ALL_SOURCES)


def test_nothing_changed_selects_nothing(sources):
    assert {} == sources.select([])


def test_changed_are_commits_of_the_branch_edits_and_new_files(tmp_path):
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)

    git("init", "--initial-branch", "main")
    for name in ("same", "edited", "committed"):
        write(name, "before")
    write(".gitignore", "ignored")
    git("add", ".")
    git("commit", "--message", "start")
    git("switch", "--create", "branch")
    write("committed", "after")
    git("commit", "--all", "--message", "change")
    write("edited", "after")
    write("new", "")
    write("ignored", "")
    assert ["committed", "edited", "new"] == changed_files("main", tmp_path)
    with pytest.raises(SystemExit, match="name another BASE"):
        changed_files("missing", tmp_path)
