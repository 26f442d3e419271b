"""The folder of checkpoints: states and marks, what rotation keeps, the index, whose files."""

import hashlib
import json
import os
import random
import shutil

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_hooks.faulty_disk import relaunch, save, states
from trainer_hooks.recovery.checkpoints import manifest as manifests
from trainer_hooks.recovery.checkpoints.folder import CheckpointFolder
from trainer_hooks.recovery.checkpoints.index import MAX_GONE, removable
from trainer_hooks.recovery.checkpoints.manifest import checkpoint_id
from trainvitals.errors import (
    CheckpointCorruptError,
    InsecurePathError,
    NewerVersionError,
    UsageError,
)
from trainvitals.io.private import FileOwner
from trainvitals.policy.state import CheckpointRef
from trainvitals.testing import ManualClock


def identify(step, attempt=7):
    return checkpoint_id(step, attempt)


def ref(step, state="verified", attempt=7):
    return CheckpointRef(
        id=identify(step, attempt), step=step, attempt=attempt, state=state, where="disk"
    )


@pytest.fixture
def folder(tmp_path):
    return relaunch(tmp_path / "checkpoints")


# ------------------------------------------------------------------------------------- rotation


def kept(refs, **policy):
    gone = removable(refs, **policy)
    return [ref.step for ref in refs if ref.id not in gone]


def test_the_newest_stay():
    assert [30, 40] == kept([ref(step) for step in (10, 20, 30, 40)], keep=2)


def test_healthy_ones_stay_however_many_unproven_ones_are_newer():
    refs = [ref(10, "healthy"), ref(20, "healthy"), ref(30), ref(40), ref(50)]
    assert [10, 20, 50] == kept(refs, keep=2)
    assert [20, 40, 50] == kept(refs[1:], keep=3)
    assert [20, 30] == kept([ref(10), ref(20, "healthy"), ref(30, "healthy")], keep=2)


def test_the_best_stays():
    refs = [ref(10), ref(20, "healthy"), ref(30)]
    assert [10, 20, 30] == kept(refs, keep=1, best=[identify(10)])


def test_one_of_each_period_stays_a_healthy_one_where_there_is_one():
    refs = [ref(5), ref(10, "healthy"), ref(90, "healthy"), ref(110), ref(120), ref(210), ref(220)]
    assert [10, 90, 110, 210, 220] == kept(refs, keep=1, keep_every=100)


def test_the_one_of_a_period_is_the_same_however_often_it_is_rotated():
    refs = []
    for step in range(10, 1000, 10):
        refs.append(ref(step, "healthy"))
        gone = removable(refs, keep=2, keep_every=100)
        refs = [one for one in refs if one.id not in gone]
    assert [10, *range(100, 1000, 100), 980, 990] == [one.step for one in refs]


def test_a_branch_after_a_rollback_is_newer_than_the_higher_steps_before_it():
    refs = [ref(100, "healthy"), ref(200, "healthy"), ref(300), ref(150, attempt=8)]
    refs.sort(key=lambda one: one.step)
    assert [150, 200] == kept(refs, keep=1)


def test_what_was_rolled_back_away_takes_nobodys_place_but_the_newest_healthy_of_all_stays():
    def on_branch(step, attempt):
        return attempt == 8 or step <= 100

    refs = [ref(50, "healthy"), ref(100, "healthy"), ref(150, attempt=8), ref(200), ref(300)]
    assert [100, 150] == kept(refs, keep=1, on_branch=on_branch)
    only_away = [ref(200, "healthy"), ref(300), ref(150, attempt=8)]
    assert {200, 150} == set(kept(only_away, keep=1, on_branch=on_branch))


_refs = st.lists(
    st.builds(
        ref,
        st.integers(0, 500),
        st.sampled_from(["verified", "healthy"]),
        st.integers(1, 4),
    ),
    unique_by=lambda one: one.id,
    max_size=30,
)


@given(
    refs=_refs,
    keep=st.integers(1, 5),
    every=st.sampled_from([0, 7, 100]),
    branches=st.sets(st.integers(1, 4)),
    number=st.integers(0, 29),
)
def test_no_policy_removes_the_newest_healthy_one_or_the_best(refs, keep, every, branches, number):
    refs.sort(key=lambda one: (one.step, one.attempt))
    best = [one.id for one in refs[number : number + 1]]
    gone = removable(
        refs, keep=keep, keep_every=every, best=best, on_branch=lambda step, at: at in branches
    )
    proven = sorted((r for r in refs if r.state == "healthy"), key=lambda r: (r.attempt, r.step))
    present = [one for one in proven if one.attempt in branches]
    must_stay = {one.id for one in proven[-1:] + present[-1:]} | set(best)
    assert set() == must_stay & set(gone)
    assert set(gone) <= {one.id for one in refs}


def test_with_two_kept_and_fifty_bad_saves_the_healthy_one_still_exists(tmp_path):
    folder = relaunch(tmp_path, keep=2)
    proven = save(folder, 1, state="healthy")
    for step in range(2, 52):
        name = save(folder, step)
        if step % 3 == 0:  # what is damaged on the disk counts for nothing
            os.truncate(tmp_path / name / "__0_0.distcp", 3)
            folder.mark_healthy(name)
        elif step % 3 == 1:
            folder.quarantine_damaged(name, "not finite")
        folder.rotate()
    assert [proven] == [name for name in folder.names() if sound_and_healthy(folder, name)]


def sound_and_healthy(folder, name):
    try:
        return name == folder.check(name).id and "healthy" == states(folder)[name]
    except CheckpointCorruptError:
        return False


def test_rotation_leaves_other_runs_alone(tmp_path):
    mine, theirs = (relaunch(tmp_path, run_id=run, keep=1) for run in ("one", "two"))
    save(theirs, 1, run_id="two")
    for step in (2, 3, 4):
        save(mine, step, run_id="one")
        mine.rotate()
    assert [identify(1), identify(4)] == mine.names()
    theirs.make_room(identify(9), 10)
    relaunch(tmp_path, run_id="one")  # what the other is writing now is not a leftover
    assert theirs.partial(identify(9)).is_dir()


# ---------------------------------------------------------------------------------------- marks


def test_the_best_is_one_and_says_by_which_metric(folder):
    first, second = save(folder, 10), save(folder, 20)
    assert folder.best() is None
    folder.mark_best(first, "validation_loss", 2.5)
    folder.mark_best(second, "validation_loss", 2.0)
    name, mark = relaunch(folder.path).best()
    assert (second, "validation_loss", 2.0) == (name, mark.metric, mark.value)
    assert not (folder.path / first / "best").exists()
    assert second == folder.check(second).id


def test_only_a_finite_value_of_a_checkpoint_that_is_there_can_be_the_best(folder):
    name = save(folder, 10)
    with pytest.raises(UsageError, match="is nan"):
        folder.mark_best(name, "validation_loss", float("nan"))
    with pytest.raises(UsageError, match="there is no checkpoint"):
        folder.mark_best(identify(99), "validation_loss", 1.0)
    assert folder.best() is None


def test_a_mark_that_cannot_be_read_still_keeps_its_checkpoint(tmp_path):
    folder = relaunch(tmp_path, keep=1)
    folder.mark_best(save(folder, 10), "validation_loss", 1.0)
    (tmp_path / identify(10) / "best").write_text("{")
    save(folder, 20)
    folder.rotate()
    assert folder.best() is None
    assert [identify(10), identify(20)] == folder.names()


def test_the_same_id_can_be_set_aside_twice(folder):
    for _ in range(3):
        folder.quarantine_damaged(save(folder, 10), "damaged")
    aside = sorted(path.name for path in folder.path.glob("bad-*"))
    name = identify(10)
    assert [f"bad-{name}", f"bad-{name}.2", f"bad-{name}.3"] == aside
    assert [("bad", name)] == [(e.state, e.id) for e in folder.index().entries]


# ------------------------------------------------------------------------------------- loadable


def test_what_lies_on_a_branch_that_was_rolled_back_away_is_not_loadable(folder):
    save(folder, 100, state="healthy")
    save(folder, 300)
    save(folder, 150, attempt=8)
    assert [identify(100), identify(150, 8), identify(300)] == [
        r.id for r in folder.loadable_refs()
    ]
    found = folder.loadable_refs(lambda step, attempt: attempt == 8 or step <= 100)
    expected = [(identify(100), "healthy"), (identify(150, 8), "verified")]
    assert expected == [(one.id, one.state) for one in found]


def test_a_damaged_manifest_is_loadable_as_verified_so_that_the_load_tells_it(folder):
    name = save(folder, 10, state="healthy")
    manifest = folder.path / name / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    assert [("verified", name)] == [(one.state, one.id) for one in folder.loadable_refs()]
    assert () == folder.refs()


def test_a_damaged_one_that_names_another_run_is_left_to_that_run(folder):
    name = save(folder, 10, run_id="other")
    path = folder.path / name / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"step": 10', b'"step": 11'))
    assert () == folder.loadable_refs()
    assert [name] == [r.id for r in relaunch(folder.path, run_id="other").loadable_refs()]


# ---------------------------------------------------------------------------------------- index


def busy(path):
    """Return a folder in which everything happened, and what its index says."""
    folder = CheckpointFolder(path, run_id="run", keep=2, clock=ManualClock())
    folder.prepare()
    for step in (10, 20, 30, 40):
        save(folder, step, state="healthy" if step == 20 else "verified")
    folder.mark_best(identify(40), "validation_loss", 1.0)
    folder.quarantine_damaged(identify(30), "flipped")
    folder.rotate()
    return folder, written(path)


def written(path):
    entries = json.loads((path / "index.json").read_text())["entries"]
    return {entry["id"]: entry for entry in entries}


def test_the_index_holds_what_is_there_and_what_is_gone(tmp_path):
    _, index = busy(tmp_path)
    expected = {10: "retired", 20: "healthy", 30: "bad", 40: "verified"}
    assert {identify(k): v for k, v in expected.items()} == {
        k: v["state"] for k, v in index.items()
    }
    gone = index[identify(10)]
    assert (1_700_000_000 * 10**9, "made room", 128) == (
        gone["time_unix_ns"], gone["reason"], gone["num_bytes"],
    )  # fmt: skip
    assert "flipped" == index[identify(30)]["reason"]


def test_the_index_remembers_what_a_bad_one_cannot_say_itself(tmp_path):
    folder = relaunch(tmp_path)
    name = save(folder, 10)
    folder.quarantine(name, "bad data")
    (tmp_path / f"bad-{name}" / "manifest.json").write_text("{")
    (tmp_path / f"bad-{name}" / "bad").unlink()
    relaunch(tmp_path)
    entry = written(tmp_path)[name]
    assert ("bad data", "run", 128) == (entry["reason"], entry["run_id"], entry["num_bytes"])


DAMAGED_INDEX = {
    "missing": lambda raw: None,
    "torn": lambda raw: raw[: len(raw) // 2],
    "empty": lambda raw: b"",
    "another thing": lambda raw: b"[1, 2]",
    "not even text": lambda raw: b'{"entries": "\xff"}',
    "nested without end": lambda raw: b"[" * 200_000,
}


@pytest.mark.parametrize("what", DAMAGED_INDEX)
def test_an_index_that_cannot_be_read_is_rebuilt_from_manifests_and_marks(tmp_path, what):
    _, before = busy(tmp_path)
    raw = DAMAGED_INDEX[what]((tmp_path / "index.json").read_bytes())
    (tmp_path / "index.json").unlink()
    if raw is not None:
        (tmp_path / "index.json").write_bytes(raw)
    relaunch(tmp_path)
    del before[identify(10)]  # that one left nothing to rebuild it from
    assert before == written(tmp_path)


def test_an_index_that_lies_is_believed_only_about_what_is_gone(tmp_path):
    folder, truth = busy(tmp_path)
    lies = [
        {**truth[identify(20)], "state": "bad", "reason": "it is not"},
        {**truth[identify(40)], "state": "healthy", "num_bytes": -1},
        {**truth[identify(10)], "id": "../../etc", "state": "retired"},
        {**truth[identify(10)], "id": identify(90), "state": "healthy"},
    ]
    (tmp_path / "index.json").write_text(json.dumps({"entries": lies}))
    assert {identify(20): "healthy", identify(40): "verified"} == states(folder)
    relaunch(tmp_path)
    del truth[identify(10)]
    assert truth == written(tmp_path)


def test_an_index_that_is_a_link_is_not_followed(tmp_path):
    folder, truth = busy(tmp_path / "checkpoints")
    elsewhere = tmp_path / "elsewhere"
    shutil.move(folder.path / "index.json", elsewhere)
    (folder.path / "index.json").symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    relaunch(folder.path)
    assert before == elsewhere.read_bytes()
    assert truth.keys() - {identify(10)} == written(folder.path).keys()


def test_what_is_gone_is_bounded_to_the_newest(tmp_path):
    clock = ManualClock()
    folder = CheckpointFolder(tmp_path, run_id="run", clock=clock)
    folder.prepare()
    for step in range(MAX_GONE + 5):
        clock.advance(1.0)
        folder.note(identify(step), "retired", detail="x" * 9_999)
    folder.discard(identify(0))
    for step in range(MAX_GONE + 5, MAX_GONE + 8):
        clock.advance(1.0)
        folder.note(identify(step), "bad")
    folder.discard(identify(0))
    index = written(tmp_path)
    assert [identify(step) for step in range(8, MAX_GONE + 8)] == list(index)
    assert (tmp_path / "index.json").stat().st_size < 1 << 20


# ------------------------------------------------------------------------------------- manifest


def rewrite(folder, name, **fields):
    """Change the manifest as somebody would who can compute checksums."""
    path = folder.path / name / "manifest.json"
    body = msgspec.json.decode(path.read_bytes()) | fields
    sealed = msgspec.json.encode(body | {"checksum": ""})
    body["checksum"] = hashlib.sha256(sealed).hexdigest()
    path.write_bytes(msgspec.json.encode(body))


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "sub/__0_0.distcp", "..", "", "a.py"])
def test_a_manifest_that_names_a_path_is_refused(folder, file):
    name = save(folder, 10)
    (folder.path / "secret").write_bytes(b"key")
    entry = {"size": 3, "sha256": "0" * 64}
    rewrite(folder, name, files={file: entry})
    with pytest.raises(CheckpointCorruptError, match="not a file of a checkpoint"):
        folder.check(name)


def test_fields_of_a_newer_version_of_the_same_format_are_tolerated(folder):
    name = save(folder, 10)
    rewrite(folder, name, colour={"of": ["the", "weights"]}, more=1.5)
    assert name == folder.check(name).id
    assert [name] == [one.id for one in folder.refs()]


def test_a_newer_format_is_told_whatever_its_fields_are(folder):
    name = save(folder, 10)
    (folder.path / name / "healthy").touch()
    path = folder.path / name / "manifest.json"
    path.write_text(json.dumps({"format_version": 2, "id": 7, "run_id": "run"}))
    with pytest.raises(NewerVersionError, match="format 2; this program reads up to 1"):
        folder.check(name)
    assert [("healthy", name)] == [(one.state, one.id) for one in folder.loadable_refs()]
    folder.rotate()
    assert [name] == folder.names()


def test_no_single_damaged_byte_of_a_manifest_passes_or_crashes(folder):
    name = save(folder, 10)
    path = folder.path / name / "manifest.json"
    raw, chance = path.read_bytes(), random.Random(3)
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] = chance.choice([b for b in (0, 0x20, 0x22, 0x39, 0xFF) if b != raw[at]])
        path.write_bytes(changed)
        try:
            found = manifests.read(folder.path / name)
        except (CheckpointCorruptError, NewerVersionError):
            continue
        path.write_bytes(raw)
        assert manifests.read(folder.path / name) == found, f"byte {at}"


# ----------------------------------------------------------------------------------- whose files


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720])
def test_a_checkpoint_where_others_may_write_is_refused_with_a_way_out(folder, mode):
    name = save(folder, 10)
    (folder.path / name).chmod(mode)
    with pytest.raises(InsecurePathError, match="other users can write") as caught:
        folder.check(name)
    assert f"chmod -R go-w {folder.path / name}" in caught.value.hint
    assert [name] == folder.names(), "refused is not damaged"


@pytest.mark.parametrize("which", ["", "__0_0.distcp", "manifest.json"])
def test_a_file_of_another_user_is_refused_with_a_way_out(folder, which):
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    name = save(folder, 10)
    os.chown(folder.path / name / which, 65534, 65534)
    with pytest.raises(InsecurePathError, match="belongs to user 65534") as caught:
        folder.check(name)
    assert "chown -R 0" in caught.value.hint


def test_where_the_file_system_gives_our_files_to_nobody_they_are_ours_all_the_same(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    probe, checkpoint = tmp_path / "probe", tmp_path / "step-00000001-7"
    for path in (probe, checkpoint):
        path.mkdir()
        path.chmod(0o777)  # a file system that knows no modes, either
        os.chown(path, 65534, 65534)
    owner = FileOwner.from_status(probe.stat())
    manifests.check_owner(checkpoint, owner)
    assert manifests.open_to_others(checkpoint, owner) is None
    with pytest.raises(InsecurePathError):
        manifests.check_owner(checkpoint, FileOwner(0))


def test_a_promoted_checkpoint_counts_as_healthy_from_then_on(folder):
    old, new = save(folder, 10, state="healthy"), save(folder, 20)
    folder.promote(new)
    assert {old: "healthy", new: "healthy"} == states(relaunch(folder.path))
    os.truncate(folder.path / old / ".metadata", 1)
    with pytest.raises(CheckpointCorruptError):
        folder.promote(old)
