"""Old steps of ranks become numbers over the ranks; the lake and memory alike."""

import math
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.collector.numbers.written import RUN, batch, identity
from tests.support.forked import COMMANDS
from tests.support.levels import (
    FIRST,
    KINDS,
    SIZE,
    fill,
    kept_rows,
    levels,
    rows_of,
)
from tests.support.numbers import new_lake, plain
from tests.support.rolled_memory import RolledMemory
from trainvitals.errors import StorageError
from vitals_collector.numbers import lake_rollup
from vitals_collector.numbers.interface import (
    AttemptRow,
    CurveRequest,
    NumberStore,
    RollUpResult,
    RowSpan,
    StepWindow,
)
from vitals_collector.numbers.lake import Lake
from vitals_collector.numbers.rank_rollup import STATISTICS


def test_a_window_keeps_rank_0_the_worst_ranks_and_numbers_over_all_others(
    numbers: NumberStore,
) -> None:
    fill(numbers)
    due = numbers.next_window(RUN, 1, SIZE)
    assert due is not None
    assert (due.window, due.newest_unix_ns) == (FIRST, 1_700_000_000_000_000_255)
    assert set(due.last_seqs.values()) == {255}
    assert len(due.last_seqs) == 11
    done = numbers.roll_up(RUN, FIRST, 4)
    # With a NaN or an infinity first; then by turns the slowest and the furthest loss.
    assert done == RollUpResult(7 * SIZE, ("rank:7", "rank:9", "rank:3", "rank:5"))
    whole = dict.fromkeys((0, 7, 9, 3, 5), 600)
    assert kept_rows(numbers) == dict.fromkeys(range(12), 600 - SIZE) | whole
    over = levels(numbers)
    assert over["step"] == list(range(SIZE))
    assert set(over["num_ranks"]) == {11}
    ranks = [rows_of(rank, 600) for rank in range(1, 12)]
    for step in (0, 11, 255):
        losses = [row["rank_loss"] for row in (rank[step] for rank in ranks)]
        assert over["rank_loss:min"][step] == min(losses)
        assert over["rank_loss:max"][step] == max(losses)
        assert over["rank_loss:mean"][step] == pytest.approx(sum(losses) / 11)
    assert over["tokens:max"][0] == 2**40 + 11
    assert [over[f"z:{what}"][0] for what in ("num", "nonfinite")] == [9, 2]
    assert [over[f"z:{what}"][1] for what in STATISTICS] == [None] * 5
    assert numbers.sources(RUN, "ranks") == ["ranks"]


def test_windows_come_one_after_the_other_and_each_once(numbers: NumberStore) -> None:
    fill(numbers)
    windows = []
    while (due := numbers.next_window(RUN, 1, SIZE)) is not None:
        windows.append(due[0])
        numbers.roll_up(RUN, due[0], 2)
    assert windows == [StepWindow(1, start, start + SIZE) for start in (0, 256, 512)]
    assert levels(numbers)["step"] == list(range(600))
    assert numbers.next_window(RUN, 2, SIZE) is None


def test_a_window_near_an_incident_loses_nothing_and_has_its_numbers(numbers: NumberStore) -> None:
    fill(numbers)
    assert numbers.roll_up(RUN, FIRST, 2, is_whole=True).num_rows == 0
    assert kept_rows(numbers) == dict.fromkeys(range(12), 600)
    assert len(levels(numbers)["step"]) == SIZE
    due = numbers.next_window(RUN, 1, SIZE)
    assert due is not None
    assert due[0].first_step == SIZE


def test_rows_that_became_numbers_are_not_taken_again(numbers: NumberStore) -> None:
    fill(numbers)
    numbers.roll_up(RUN, FIRST, 2)
    before = kept_rows(numbers)
    fill(numbers)
    assert kept_rows(numbers) == before


def test_values_that_overflow_together_have_a_mean_between_their_ends(numbers: NumberStore) -> None:
    largest = 1.7e308
    numbers.append(
        [batch(identity(rank=rank), [{"z": largest}, {"z": math.nan}]) for rank in (1, 2, 3)]
    )
    numbers.roll_up(RUN, FIRST, 1)
    scanned = numbers.scan(RowSpan(RUN, "ranks"), [f"z:{what}" for what in STATISTICS])
    assert [plain(column) for column in scanned.values()] == [
        [largest, None],
        [largest, None],
        [largest, None],
        [3, 0],
        [0, 3],
    ]


def test_the_lake_and_memory_make_the_same_levels(tmp_path: Path) -> None:
    lake, memory = new_lake(tmp_path), RolledMemory()
    for numbers in (lake, memory):
        fill(numbers, num_ranks=24)
    assert lake.roll_up(RUN, FIRST, 8) == memory.roll_up(RUN, FIRST, 8)
    mine, expected = levels(lake), levels(memory)
    for name, values in expected.items():
        assert mine[name] == (pytest.approx(values) if name.endswith(":mean") else values)
    assert kept_rows(lake) == kept_rows(memory)
    lake.close()


def test_an_overview_shows_no_row_that_was_taken_away(tmp_path: Path) -> None:
    lake, memory = new_lake(tmp_path), RolledMemory()
    for numbers in (lake, memory):
        fill(numbers, num=1_000)
    lake.merge()  # all is outlined
    for numbers in (lake, memory):
        numbers.roll_up(RUN, FIRST, 2)
    curves = [
        CurveRequest(RowSpan(RUN, "steps", (f"rank:{rank}",)), "rank_loss", 4)
        for rank in (0, 1, 7, 11)
    ]
    for _ in range(2):
        drawn = lake.curves(curves, [AttemptRow(1, None, 0)], "lineage")
        whole = memory.curves(curves, [AttemptRow(1, None, 0)], "lineage")
        for mine, expected in zip(drawn, whole, strict=True):
            assert len(mine.points) < len(expected.points)
            assert mine.num_values == expected.num_values
            assert mine.points.step[0] == expected.points.step[0]
            assert mine.points.value.max() == expected.points.value.max()
        lake.merge()
    lake.close()


def test_rows_that_came_while_a_window_was_read_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = new_lake(tmp_path)
    fill(lake)
    plan = lake_rollup.plan

    def plan_and_get_rows(*args: object, **kwargs: object) -> object:
        planned = plan(*args, **kwargs)  # type: ignore[arg-type]
        lake.append([batch(identity(rank=99), rows_of(99, 10), kinds=KINDS)])
        return planned

    monkeypatch.setattr(lake_rollup, "plan", plan_and_get_rows)
    with pytest.raises(StorageError, match="changed meanwhile"):
        lake.roll_up(RUN, FIRST, 2)
    assert kept_rows(lake) == dict.fromkeys(range(12), 600) | {99: 10}
    assert levels(lake)["step"] == []
    monkeypatch.setattr(lake_rollup, "plan", plan)
    lake.roll_up(RUN, FIRST, 2)
    assert levels(lake)["num_ranks"][0] == 12
    lake.close()


def test_damage_opens_no_holes_where_rows_became_levels(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    fill(lake, num_ranks=4)
    lake.roll_up(RUN, FIRST, 1)
    lake.close()
    (file,) = sorted((tmp_path / "data/main/steps").glob("*.parquet"), key=_size)[-1:]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    lake = Lake(tmp_path)
    assert [found.table for found in lake.drop_damaged_files()] == ["steps"]
    assert lake.missing((RUN, identity(rank=1).incarnation, "steps")) == [(SIZE, 600)]
    assert lake.missing((RUN, identity(rank=0).incarnation, "steps")) == [(0, 600)]
    lake.close()


def _size(file: Path) -> int:
    return file.stat().st_size


THINNER = """
import sys
from pathlib import Path
from tests.collector.numbers.written import RUN
from tests.support.levels import SIZE
from vitals_collector.numbers.lake import Lake

lake = Lake(Path(sys.argv[1]))
print("open", flush=True)
while (due := lake.next_window(RUN, 1, SIZE)) is not None:
    lake.roll_up(RUN, due[0], 2)
    print("level", flush=True)
    lake.merge()
"""


@pytest.mark.parametrize("num_kills", [2, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.nightly
def test_a_kill_at_any_moment_leaves_a_row_or_its_numbers(tmp_path: Path, num_kills: int) -> None:
    lake, rng = new_lake(tmp_path), random.Random(7)
    num = 12 * SIZE
    fill(lake, num_ranks=5, num=num)
    lake.close()
    seen = []
    for _ in range(num_kills):
        with COMMANDS.Popen(
            [sys.executable, "-c", THINNER, str(tmp_path)], stdout=subprocess.PIPE
        ) as thinner:
            assert thinner.stdout is not None
            for _ in range(rng.randint(1, 2)):
                thinner.stdout.readline()
            time.sleep(rng.uniform(0.0, 0.4))  # anywhere in a window or a merge
            thinner.kill()
        lake = Lake(tmp_path)
        done = levels(lake)["step"]
        assert done == list(range(len(done)))
        assert len(done) % SIZE == 0
        # Rank 0 and two of each window have all rows, the two others those that are no level.
        assert sum(kept_rows(lake).values()) == 3 * num + 2 * (num - len(done))
        assert lake.check() == []
        lake.close()
        seen.append(len(done))
    assert seen[-1] > 0
