"""Bytes of others are read or refused with an error of ours, in bounded time and memory.

The short run is the same at every run; the long one (`make fuzz`) is another one each time, and
says by which seed a failure comes again.
"""

import random
import shutil
import time
import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz.mutation import mutated
from tests.fuzz.targets import TARGETS, Target
from trainvitals.errors import VitalsError

LONG_SECONDS = 600.0
"""Of the long run, shared by all targets."""
MOST_SECONDS = 3.0
"""Of CPU, for one input of some kilobytes."""
MOST_BYTES = 64 << 20


def example(target: Target, seed: int) -> bytes:
    rng = random.Random(seed)
    raw = mutated(rng.choice(target.samples()), rng)
    return target.reseal(raw) if target.reseal is not None and rng.random() < 0.7 else raw


def refused(target: Target, raw: bytes, folder: Path) -> bool:
    """Have the bytes read; fail where that raises, takes long or takes much memory."""
    folder.mkdir()
    if target.is_traced:
        tracemalloc.start()
    before, began = tracemalloc.get_traced_memory()[0], time.process_time()
    try:
        target.read(folder, raw)
    except VitalsError:
        is_refused = True
    else:
        is_refused = False
    finally:
        num_bytes = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
    assert time.process_time() - began < MOST_SECONDS
    assert num_bytes < MOST_BYTES
    return is_refused


def try_seed(target: Target, seed: int, folder: Path) -> bool:
    raw = example(target, seed)
    try:
        return refused(target, raw, folder)
    except BaseException as error:
        error.add_note(f"{target.name}, seed {seed}: {len(raw)} bytes, {raw[:200]!r}")
        raise


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_valid_sample_is_read(target: Target, tmp_path: Path):
    for i, raw in enumerate(target.samples()):
        assert not refused(target, raw, tmp_path / str(i)) or target.is_partial


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_however_its_bytes_are_changed_it_is_read_or_refused_in_our_words(
    target: Target, tmp_path: Path
):
    for seed in range(target.weight):
        try_seed(target, seed, tmp_path / str(seed))


FOUND = [
    ("receivers", b"public_url = " + b"[" * 30_000),
    ("settings", b"[ladder]\nmargin = " + b"[" * 30_000),
    ("address", b'{"url":"http://[","pid":1,"node":""}'),
    ("agent.json", b'{"pid":1,"url":"\xff"}'),
]
"""What long runs found; each has been mended."""


@pytest.mark.parametrize(("name", "raw"), FOUND, ids=[name for name, _ in FOUND])
def test_what_was_found_once_is_refused_in_our_words(name: str, raw: bytes, tmp_path: Path):
    (target,) = (target for target in TARGETS if target.name == name)
    refused(target, raw, tmp_path / "now")


@pytest.mark.slow
@pytest.mark.timeout(LONG_SECONDS)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_for_a_long_time_nothing_is_found(target: Target, tmp_path: Path):
    first = random.SystemRandom().randrange(2**40)
    end = time.monotonic() + LONG_SECONDS / len(TARGETS)
    seed = first
    while time.monotonic() < end:
        try_seed(target, seed, tmp_path / "now")
        shutil.rmtree(tmp_path / "now")
        seed += 1
    assert seed > first
