"""Completions of a step in private files of the run directory: bounded, read only if trusted."""

import os
import stat
from pathlib import Path

import pytest

from trainvitals.errors import InsecurePathError
from trainvitals.io.completions import (
    FOLDER,
    MAX_FILES,
    MAX_TEXT,
    Completion,
    StoredCompletions,
    completions_of,
    cut_completion,
    store_completions,
)


def stored(step: int = 54, **fields: object) -> StoredCompletions:
    values = {
        "step": step,
        "attempt": 7,
        "finding": "policy_collapse",
        "onset_step": step,
        "reported_step": step + 20,
        "samples": (Completion(prompt="2 + 2 =", completion="4 4 4", reward=0.1),),
    }
    return StoredCompletions(**(values | fields))  # type: ignore[arg-type]


def test_a_step_is_found_by_itself_by_its_onset_and_by_its_report(tmp_path: Path):
    one = stored(54, onset_step=50)
    store_completions(tmp_path, one)
    for step, found in ((54, [one]), (50, [one]), (74, [one]), (55, [])):
        assert found == list(completions_of([tmp_path], step))


def test_only_the_owner_can_reach_the_texts(tmp_path: Path):
    store_completions(tmp_path, stored())
    (path,) = (tmp_path / FOLDER).iterdir()
    assert (0o700, 0o600) == tuple(
        stat.S_IMODE(where.stat().st_mode) for where in (path.parent, path)
    )
    assert "step-00000054-7-policy_collapse.json" == path.name


def test_a_directory_that_others_can_reach_gets_no_texts(tmp_path: Path):
    (tmp_path / FOLDER).mkdir(mode=0o755)
    with pytest.raises(InsecurePathError):
        store_completions(tmp_path, stored())
    assert [] == list((tmp_path / FOLDER).iterdir())


def test_the_oldest_files_make_room(tmp_path: Path):
    for step in range(MAX_FILES + 3):
        store_completions(tmp_path, stored(step))
        os.utime(tmp_path / stored(step).name, (step, step))
    left = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert MAX_FILES == len(left)
    assert "step-00000003-7-policy_collapse.json" == left[0]


@pytest.mark.parametrize("raw", [b"", b"{", b'{"step":54}', b"\xff" * 9, b"[" * 300_000])
def test_a_damaged_file_is_skipped(tmp_path: Path, raw: bytes):
    one = stored()
    store_completions(tmp_path, one)
    damaged = tmp_path / FOLDER / "step-00000001-7.json"
    damaged.write_bytes(raw)
    damaged.chmod(0o600)
    assert [one] == list(completions_of([tmp_path], 54))


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    store_completions(elsewhere, stored())
    run_dir = tmp_path / "run"
    (run_dir / FOLDER).mkdir(parents=True, mode=0o700)
    (run_dir / FOLDER / "step-00000054-7.json").symlink_to(elsewhere / stored().name)
    assert [] == list(completions_of([run_dir], 54))


def test_a_long_text_is_cut_and_any_object_is_text():
    cut = cut_completion([{"role": "user"}], "x" * (MAX_TEXT + 5) + "\ud83d", 1.0)
    assert ("[{'role': 'user'}]", MAX_TEXT, 6) == (cut.prompt, len(cut.completion), cut.num_cut)


def test_half_of_a_character_is_replaced(tmp_path: Path):
    one = stored(samples=(cut_completion("p", "\ud83d", float("nan")),))
    store_completions(tmp_path, one)
    ((sample,),) = (found.samples for found in completions_of([tmp_path], 54))
    assert ("?", None) == (sample.completion, sample.reward)


def test_two_problems_of_a_step_have_their_own_files(tmp_path: Path):
    both = [stored(finding="policy_collapse"), stored(finding="truncation", reported_step=90)]
    for one in both:
        store_completions(tmp_path, one)
    assert both == list(completions_of([tmp_path], 54))
    assert [both[1]] == list(completions_of([tmp_path], 90))


def test_a_directory_that_is_a_link_gets_no_texts(tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / FOLDER).symlink_to(elsewhere)
    with pytest.raises(InsecurePathError):
        store_completions(tmp_path, stored())
    assert [] == list(elsewhere.iterdir())
    assert [] == list(completions_of([tmp_path / "missing"], 54))


def test_the_largest_texts_can_be_read_again(tmp_path: Path):
    large = cut_completion("\0" * 10 * MAX_TEXT, "\U0001f600" * 10 * MAX_TEXT, 1.0)
    one = stored(samples=(large,) * 3)
    store_completions(tmp_path, one)
    assert [one] == list(completions_of([tmp_path], 54))
