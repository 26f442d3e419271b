"""The benchmark of the drill: its promises, what it notices, and one drilled loop."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vitals_bench.drill.loop import ALL_FAULTS, FOLDER, LOOPS, RESTART
from vitals_bench.drill.measure import (
    DrillOutcome,
    FaultRow,
    Options,
    figures,
    is_as_promised,
    measure_drills,
)
from vitals_bench.drill.place import user_place
from vitals_bench.rows import Grid, Row

pytestmark = pytest.mark.nightly

GUARD, HEAL = LOOPS[:2]
BROKEN = LOOPS[-1]


def by_name(entries):
    return {entry.name: entry.ours for entry in entries if isinstance(entry, Row)}


def test_every_loop_is_a_program_and_three_are_broken():
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert scripts == {loop.script for loop in LOOPS}
    assert len(LOOPS) == len({loop.title for loop in LOOPS})
    assert [RESTART] * 3 == [tuple(loop.broken) for loop in LOOPS if loop.broken]
    assert {"guard", "heal"} == {loop.mode for loop in LOOPS}


def test_a_result_for_another_reason_is_not_as_promised():
    hint = 'trainvitals.watch(..., mode="heal", checkpoints=True)'
    flip = FaultRow(fault="bit_flip", outcome="not protected", hint=hint)
    assert is_as_promised(GUARD, flip)
    assert not is_as_promised(HEAL, flip)
    assert not is_as_promised(GUARD, FaultRow(fault="bit_flip", outcome="not protected"))
    assert not is_as_promised(GUARD, FaultRow(fault="bit_flip", outcome="kept"))
    found = FaultRow(fault="killed_rank", outcome="broken", reason="step 201 got other batches")
    assert is_as_promised(BROKEN, found)
    assert not is_as_promised(HEAL, found)


def test_a_false_alarm_and_a_missed_one_count():
    kept = tuple(FaultRow(fault=name, outcome="kept") for name in ALL_FAULTS if name != "spike")
    restart = FaultRow(fault="killed_rank", outcome="kept")
    wrong = FaultRow(fault="spike", outcome="broken", is_named_right=False, reason="rank 0")
    false = DrillOutcome(title="", exit_code=1, seconds=200, rows=(*kept, wrong), changed=("a",))
    missed = DrillOutcome(title="", exit_code=0, seconds=60, rows=(restart,), leftovers=("b",))
    failed = DrillOutcome(title="", exit_code=2, seconds=5, error="no command")
    entries = list(figures([(HEAL, false), (BROKEN, missed), (HEAL, failed)]))
    rows = by_name(entries)
    assert len(kept) / (len(kept) + 2) == rows["rows as promised"]
    assert 0 == rows["ranks named right"] == rows["broken promises found"]
    assert 0 == rows["exit codes as promised"]
    assert [1, 1, 1] == [
        rows["drills without a result"],
        rows["changed files of the user"],
        rows["processes and files left"],
    ]
    assert 200 == rows["a drill with all faults, longest"]
    (table,) = [entry for entry in entries if isinstance(entry, Grid)]
    assert "broken (!)" in table.rows[0]
    assert "kept (!)" in table.rows[1]


def test_a_changed_file_and_a_process_that_stays_are_noticed():
    with user_place("imagenet") as place:
        before = place.fingerprint()
        assert before == place.fingerprint()
        assert [] == place.leftovers()
        settings = place.root / "home" / ".config" / "wandb" / "settings"
        status = settings.stat()
        settings.write_text("[changed]")
        os.utime(settings, ns=(status.st_atime_ns, status.st_mtime_ns))
        after = place.fingerprint()
        assert ["home/.config/wandb/settings"] == [n for n in before if before[n] != after[n]]
        (place.root / "tmp" / "vd-1").mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            env=dict(place.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            process.stdout.readline()
            leftovers = place.leftovers()
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert ["tmp/vd-1", f"process {process.pid}"] == [
            each.partition(":")[0] for each in leftovers
        ]
    assert not place.root.exists()


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_a_drilled_loop_is_as_promised_and_is_not_drilled_again(tmp_path):
    options = Options(results=Path(tmp_path, "results.jsonl"))
    entries = list(measure_drills(quick=True, options=options))
    rows = by_name(entries)
    assert 1 == rows["rows as promised"] == rows["exit codes as promised"], entries
    assert 0 == rows["changed files of the user"] == rows["processes and files left"], entries
    size = options.results.stat().st_size
    again = list(measure_drills(quick=True, options=options))
    assert [entry.plain() for entry in entries] == [entry.plain() for entry in again]
    assert size == options.results.stat().st_size
