"""What holds around every test: a clean environment before, and nothing left behind after."""

import gc
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.examples import register_profiles
from tests.support.forked import FIRST
from tests.support.unsynced import skip_syncs
from trainvitals.identity import Identity, new_incarnation, new_run_id

POOL_THREADS = ("asyncio_", "AnyIO worker", "ThreadPoolExecutor", "pytest_timeout", "tqdm")
"""Threads of pools that belong to a library and end with the process."""

INDUCTOR_THREAD = "(_read_thread)"
"""What torch.compile reads its workers with, under torch's older name."""


SELDOM = re.compile(r"^pytestmark = .*\b(slow|nightly)\b", re.M)
"""How a file says that all of its tests are left out of `make test`."""

register_profiles()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file all of whose tests are left out: each worker would."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    mark = SELDOM.search(collection_path.read_text()) if is_test else None
    return True if mark and f"not {mark[1]}" in config.option.markexpr else None


def pytest_configure() -> None:
    """Turn off the garbage collector for the collection, and hear Ctrl-C.

    Nothing that is collected can be freed. SIGINT is ignored where a shell started us in the
    background, and then in every program that a test starts; some are ended by it.
    """
    gc.disable()
    skip_syncs()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keep what was collected out of each later garbage collection, and of `gc.get_objects`.

    Thousands of tests and the modules of theirs stay to the end. To walk through them again and
    again was most of what a training of a few steps cost.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose mark names what this machine lacks, and say what."""
    for mark in item.iter_markers(name="servers"):
        missing = [name for name in mark.args if shutil.which(str(name)) is None]
        if missing:
            pytest.skip(f"not installed: {', '.join(missing)}")
    if item.get_closest_marker("browser") and shutil.which("chromium") is None:
        pytest.skip("not installed: chromium")
    if item.get_closest_marker("gpu"):
        if not Path("/dev/nvidiactl").exists():
            pytest.skip("no NVIDIA GPU")
        if "trainer_hooks" in item.path.parts and not _torch_has_gpu():
            pytest.skip("torch was built without CUDA, or cannot use the GPU")


def _torch_has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the developer's own settings; fail a test which leaves a changed environment."""
    # Not the fixture `monkeypatch`: a test's own changes must be undone before we look.
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("VITALS_")]:
            patch.delenv(name)
        home = tmp_path_factory.getbasetemp() / "home"
        patch.setenv("XDG_DATA_HOME", str(home / "data"))
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        before = dict(os.environ)
        yield
        after = dict(os.environ)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    changed -= {"PYTEST_CURRENT_TEST"}
    # Importing a library may set its own defaults; ours and the launcher's may not stay behind.
    ours = {name for name in changed if name.startswith(("VITALS_", "MASTER_", "RANK", "WORLD_"))}
    assert set() == ours, f"the test left these variables changed: {sorted(ours)}"


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fail a test which leaves a thread, a child process or a process group behind."""
    threads = set(threading.enumerate())
    children = _children()
    yield
    left = [thread for thread in threading.enumerate() if thread not in threads]
    left = [thread for thread in left if not thread.name.startswith(POOL_THREADS)]
    left = [thread for thread in left if not thread.name.endswith(INDUCTOR_THREAD)]
    deadline = time.monotonic() + 30.0
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = [thread.name for thread in left if thread.is_alive()]
    assert [] == alive, "the test left threads running"
    assert set() == _children() - children, "the test left child processes"
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available():
        assert not distributed.is_initialized(), "the test left a process group"


def _children() -> set[str]:
    found: set[str] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(path.read_text().split())
        except OSError:
            found.update()  # a thread that ended while we looked has no children
    return {child for child in found if not _ends_with_ours(child)}


def _ends_with_ours(pid: str) -> bool:
    """Whether torch.compile, or multiprocessing at its first start, has this process for good.

    Ranks and programs are forks of a process that has imported what they need:
    ``tests/trainer_hooks/spawned.py``, ``tests/support/forked.py``.
    """
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return False  # it has ended by now
    kept = b"torch/_inductor/compile_worker", b"multiprocessing.resource_tracker"
    kept += (b"multiprocessing.forkserver",)
    return name == FIRST or any(ours in line for ours in kept)


@pytest.fixture
def run_id() -> str:
    """Return a new run id."""
    return new_run_id(time.time_ns())


@pytest.fixture
def identity(run_id: str) -> Identity:
    """Return the identity of rank 0 of a run of two ranks."""
    return Identity(
        run_id=run_id,
        incarnation=new_incarnation(),
        source="rank:0",
        node="node-a",
        pid=os.getpid(),
        rank=0,
        local_rank=0,
        world_size=2,
        started_unix_ns=time.time_ns(),
        started_monotonic_ns=time.monotonic_ns(),
    )


@pytest.fixture(autouse=True)
def own_main() -> Iterator[None]:
    """Keep this process's main module: Streamlit's AppTest leaves its page there.

    Processes that are spawned by a later test would begin with it.
    """
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main
