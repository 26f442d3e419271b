"""The checkpoints' bench runs, its rows are there, and a peer that is missing is said. No times."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vitals_bench import checkpoint
from vitals_bench.checkpoint import kept, snapshot, writing
from vitals_bench.cli import build_app

pytestmark = pytest.mark.nightly

TAKEN_BESIDE = {
    "copy_ of each tensor, preallocated": "ratio <= 1.25",
    "torch.save": "ratio <= 0.125",
    "dcp.async_save, its blocking call": "ratio <= 0.5",
    "the same, staging buffers kept": "ratio <= 0.5",
    "safetensors' save_file": "",
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    gpt, interleave = kept.gpt, snapshot.interleave
    monkeypatch.setattr(kept, "gpt", lambda millions: gpt(1))
    monkeypatch.setattr(
        snapshot, "interleave", lambda arms, rounds, **k: interleave(arms, rounds=1, **k)
    )


def test_a_snapshot_is_measured_beside_a_copy_and_each_peer_and_a_missing_one_is_said(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "safetensors" else find_spec(n)
    )
    small, *rows = checkpoint.PARTS["take"](quick=True)
    assert ("copy_ of each tensor, preallocated", "ratio <= 1.5") == (
        small.peer,
        small.plain()["goal"],
    )
    assert TAKEN_BESIDE == {r.peer: r.plain()["goal"] for r in rows}
    *there, absent = rows
    assert all(r.ours > 0 and r.theirs > 0 and "torch 2." in r.note for r in there)
    assert (None, "safetensors: not installed") == (absent.theirs, absent.note)


def test_a_restore_is_measured_beside_a_load():
    rows = list(checkpoint.PARTS["restore"](quick=True))
    assert ["ratio <= 0.333", ""] == [r.plain()["goal"] for r in rows]
    assert all(r.ours > 0 and r.theirs > 0 for r in rows)


@pytest.mark.slow
def test_steps_are_measured_while_a_checkpoint_is_written_and_while_none_is():
    rows = list(writing.measure_writing(quick=True))
    assert 4 == len({(r.name, r.peer) for r in rows})
    assert all(r.ours > 0 and r.theirs > 0 for r in rows)


def test_the_command_prints_the_rows_and_writes_its_part_of_the_page(monkeypatch, tmp_path):
    monkeypatch.setattr("vitals_bench.checkpoint.PARTS", {"restore": checkpoint.PARTS["restore"]})
    page = tmp_path / "page.md"
    page.write_text("# Benchmarks\n\n## guard\n\nfast\n")
    arguments = ["checkpoint", "--quick", "--format", "json", "--page", str(page)]
    done = CliRunner().invoke(build_app(), arguments)
    assert 0 == done.exit_code, done.output
    assert 2 == len(json.loads(done.stdout))
    headings = [line for line in Path(page).read_text().splitlines() if line.startswith("## ")]
    assert ["## guard", "## checkpoint"] == headings


@pytest.mark.slow
@pytest.mark.dist
def test_the_ranks_of_the_recovery_leave_their_rows():
    rows = list(checkpoint.PARTS["recovery"](quick=True))
    assert ["memory" in rows[0].name, "disk" in rows[1].name] == [True, True]
    assert all(r.ours > 0 and r.theirs > 0 for r in rows)
