"""A damaged, forged or foreign checkpoint is refused before a byte of it is trusted."""

import enum
import errno
import pickle
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from tests.trainer_hooks.saving import (
    Run,
    another_process,
    flip,
    halve,
    ids,
    load_newest,
    reseal,
    spoil,
)
from trainer_hooks.recovery.checkpoints import payload
from trainer_hooks.recovery.checkpoints.folder import CheckpointFolder
from trainvitals.errors import (
    CheckpointCorruptError,
    CheckpointError,
    InsecurePathError,
    NewerVersionError,
    UsageError,
)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "checkpoints")


# ---------------------------------------------------------------------------------- damage


def plant_file(path):
    (path.parent / "__9_9.distcp").write_bytes(b"more")


def link_elsewhere(path):
    copy = path.parent.parent / "elsewhere"
    shutil.move(path, copy)
    path.symlink_to(copy)


DAMAGE = {
    "a flipped bit in the data": ("__0_0.distcp", flip),
    "a flipped bit in the metadata": (".metadata", flip),
    "a flipped bit in the manifest": ("manifest.json", flip),
    "truncated data": ("__0_0.distcp", halve),
    "a truncated manifest": ("manifest.json", halve),
    "an empty manifest": ("manifest.json", lambda path: path.write_bytes(b"")),
    "missing data": ("__0_0.distcp", Path.unlink),
    "missing metadata": (".metadata", Path.unlink),
    "a missing manifest": ("manifest.json", Path.unlink),
    "a file more": ("manifest.json", plant_file),
    "data that is a link": ("__0_0.distcp", link_elsewhere),
    "a manifest that is a link": ("manifest.json", link_elsewhere),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_loading_falls_back_past_a_damaged_checkpoint_and_sets_it_aside(run, what):
    sound, damaged = run.save(), run.save()
    folder = run.store.folder.path
    file, damage = DAMAGE[what]
    damage(folder / damaged / file)
    new = another_process(run)
    assert sound == load_newest(new.store).id
    assert [sound] == ids(new.store)
    assert (folder / f"bad-{damaged}").is_dir()
    change = new.store.take_changes()[0]
    assert (damaged, "bad") == (change.checkpoint_id, change.state)
    assert change.detail


def test_a_folder_that_is_a_link_is_refused(run, tmp_path):
    sound, moved = run.save(), run.save()
    folder = run.store.folder.path
    (folder / moved).rename(tmp_path / moved)
    (folder / moved).symlink_to(tmp_path / moved)
    assert sound == load_newest(another_process(run).store).id
    assert (tmp_path / moved / "manifest.json").is_file()


def test_when_all_are_damaged_training_does_not_silently_begin_anew(run):
    for name in (run.save(), run.save()):
        flip(run.store.folder.path / name / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* \(tried 2\)"):
        load_newest(another_process(run).store)


def test_a_damaged_checkpoint_changes_nothing_of_the_live_state(run):
    name = run.save()
    flip(run.store.folder.path / name / "__0_0.distcp")
    before = run.training.bits()
    with pytest.raises(CheckpointCorruptError, match="checksum"):
        run.store.load(name)
    assert before == run.training.bits()


def test_a_manifest_of_a_newer_vitals_is_neither_loaded_nor_set_aside(run):
    name = run.save()
    path = run.store.folder.path / name / "manifest.json"
    content = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(content | {"format_version": 99}))
    with pytest.raises(NewerVersionError, match="format 99"):
        another_process(run).store.load(name)
    assert path.is_file()


def test_a_newer_vitals_checkpoint_is_never_passed_over_in_silence(run):
    run.save()
    name = run.save()
    path = run.store.folder.path / name / "manifest.json"
    content = msgspec.json.decode(path.read_bytes())
    newer = {"format_version": 99, "step": {"of": "another shape"}, "files": []}
    path.write_bytes(msgspec.json.encode(content | newer))
    new = another_process(run)
    with pytest.raises(NewerVersionError, match="pip install -U trainvitals"):
        load_newest(new.store)
    assert path.is_file()


def test_weights_that_are_not_finite_are_not_loaded_though_every_checksum_holds(run):
    sound, spoiled = run.save(), run.save()
    spoil(run.store.folder.path / spoiled)
    new = another_process(run)
    assert sound == load_newest(new.store).id
    assert "is not finite" in new.store.take_changes()[0].detail


def test_a_checkpoint_that_others_may_change_is_refused_and_left_where_it_is(run):
    name = run.save()
    folder = run.store.folder.path / name
    folder.chmod(0o770)
    with pytest.raises(InsecurePathError, match="other users can write") as caught:
        load_newest(another_process(run).store)
    assert f"chmod -R go-w {folder}" in caught.value.hint
    folder.chmod(0o700)
    assert name == load_newest(another_process(run).store).id


class Evil:
    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return (Path.touch, (self.witness,))


@pytest.mark.parametrize("forged_manifest", [False, True])
def test_code_planted_in_the_metadata_does_not_run(run, tmp_path, forged_manifest):
    name = run.save()
    folder, witness = run.store.folder.path / name, tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(witness)))
    if forged_manifest:
        reseal(folder)
    with pytest.raises(CheckpointCorruptError):
        run.store.load(name)
    assert not witness.exists()


class PicklerOfPython3112(pickle.Pickler):
    """Pickles the members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_metadata_that_an_early_python_3_11_wrote_is_read(run):
    name = run.save()
    path = run.store.folder.path / name / ".metadata"
    metadata = payload.read_metadata(path.parent)
    with path.open("wb") as file:
        PicklerOfPython3112(file).dump(metadata)
    assert b"getattr" in path.read_bytes()
    assert metadata == payload.read_metadata(path.parent)


@pytest.mark.parametrize(
    "read",
    [
        b"ctorch.distributed.checkpoint.metadata\nMetadata\nV__init__\n",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nV__class__\n",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nI0\n",
        b"ctorch\nfloat32\nVto_complex\n",
    ],
)
def test_metadata_reads_no_attribute_but_the_name_of_a_memory_format(run, read):
    folder = run.store.folder.path / run.save()
    (folder / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(" + read + b"tR.")
    with pytest.raises(CheckpointCorruptError, match="reads an attribute, which is not allowed"):
        payload.read_metadata(folder)


@pytest.mark.parametrize("state", [b"(N}Vforged\nI1\nst", b"}Vforged\nI1\ns"])
@pytest.mark.parametrize(
    "target",
    [
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n(I0\ntR",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(}tR",
        b"ctorch.serialization\n_get_layout\n",
    ],
)
def test_metadata_sets_nothing_on_a_class_nor_what_its_instances_have_not(run, target, state):
    name = run.save()
    folder = run.store.folder.path / name
    (folder / ".metadata").write_bytes(target + state + b"b.")
    reseal(folder)
    with pytest.raises(CheckpointCorruptError, match="sets the state of"):
        run.store.load(name)
    made = (
        Metadata,
        _MEM_FORMAT_ENCODING,
        _MEM_FORMAT_ENCODING(0),
        torch.serialization._get_layout,
    )
    assert not any(hasattr(each, "forged") for each in made)


def test_code_planted_among_the_tensors_does_not_run(run, tmp_path):
    name = run.save()
    folder, witness = run.store.folder.path / name, tmp_path / "ran"
    torch.save(Evil(witness), folder / "__0_0.distcp")
    reseal(folder)
    with pytest.raises((CheckpointCorruptError, CheckpointError)):
        run.store.load(name)
    assert not witness.exists()


def test_metadata_that_points_out_of_the_folder_is_refused(run, tmp_path):
    name = run.save()
    folder = run.store.folder.path / name
    metadata = payload.read_metadata(folder)
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder.parent / "secret").write_bytes(b"key")
    reseal(folder)
    with pytest.raises(CheckpointCorruptError, match="secret"):
        run.store.load(name)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc", "step-1", "", "step-00000001-7/x"])
def test_an_id_is_a_name_never_a_path(run, name):
    with pytest.raises(UsageError, match="it must be an id"):
        run.store.load(name)


def test_an_id_that_is_not_there_is_refused_with_those_that_are(run):
    name = run.save()
    with pytest.raises(UsageError, match=f"there are: {name}"):
        run.store.load("step-00009999-7")


def test_another_model_is_told_and_the_checkpoint_stays(run):
    name = run.save()
    new = another_process(run)
    new.training.model[1].register_buffer("more", torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"buffer\.1\.more is not in the checkpoint"):
        load_newest(new.store)
    assert [name] == ids(new.store)


def test_a_folder_of_another_user_in_a_sticky_folder_is_skipped(run, monkeypatch, caplog):
    home = run.store.folder.path / ".alone-run"
    home.mkdir()
    monkeypatch.setattr(CheckpointFolder, "is_planted", lambda self, name: name == home.name)

    def refuse(path, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "rename", refuse)
    run.store.prepare()
    assert f"{home} is another user's; it is skipped: Operation not permitted" in caplog.text
    assert home.is_dir()
