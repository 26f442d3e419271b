"""Logs that grow out of small files."""

import gzip
from pathlib import Path

import pytest

from tests.fuzz.target import refused
from tests.plugins.fuzz_targets import TARGETS, wandb_file
from vitals_plugins.bridges.importers import files


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("log.csv.gz", b"step,loss\n1,"),
        ("trainer_state.json", b'{"log_history": ['),
        ("run-x.wandb", wandb_file()),
    ],
)
def test_what_grows_out_of_a_small_file_is_bounded(
    name: str, begin: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(files, "MAX_BYTES", 8 << 20)
    (target,) = (target for target in TARGETS if target.name == name)
    bomb = gzip.compress(begin + bytes(80 << 20), 1)
    assert refused(target, bomb, tmp_path / "now")
