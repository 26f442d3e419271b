"""A checkpoint is whole tensors: any wrapping and any number of ranks takes it up bit for bit."""

import shutil
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from tests.support.examples import has_nightly
from tests.trainer_hooks.ranks_resharding import (
    MIXED,
    NIGHTLY,
    OF_FOUR,
    OF_TWO,
    STEPS,
    ema,
    four,
    known,
    twin,
    two,
)
from tests.trainer_hooks.saving import flip, halve
from tests.trainer_hooks.spawned import spawned
from tests.trainer_hooks.wrappings.models import FOUR_RANKS, TWO_RANKS
from trainer_hooks.recovery.checkpoints import payload
from trainer_hooks.recovery.checkpoints.planner import BoxReader, TensorBox
from trainer_hooks.tensors.shard_layout import range_boxes, split_box
from trainvitals.errors import CheckpointCorruptError, CheckpointError

pytestmark = pytest.mark.dist

OF_TWO_NAMES = [
    pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ())
    for name in known(OF_TWO, TWO_RANKS)
]


def path_of(folder):
    return next(Path(folder).glob("step-*"))


@cache
def content(folder):
    """Return the whole tensors of the checkpoint in a folder; tests share them, and change none."""
    specs = payload.specs(path_of(folder))
    found = {
        key: torch.empty(spec.shape, dtype=spec.dtype)
        for key, spec in specs.items()
        if not key.startswith("rank.")
    }
    payload.read(path_of(folder), [TensorBox.all_of(key, tensor) for key, tensor in found.items()])
    return found


def assert_taken_up(expected, found):
    """Every tensor is there bit for bit; what FSDP1 adds, for parameters never used, is zero."""
    assert [] == sorted(expected.keys() - found.keys())
    assert [] == [key for key, tensor in expected.items() if not torch.equal(tensor, found[key])]
    more = {key: tensor for key, tensor in found.items() if key not in expected}
    assert [] == [key for key in more if ".unused." not in key]
    assert [] == [k for k, t in more.items() if t.any().item() and not k.endswith(".step")]


def saved_twin(folder, name=""):
    made = twin(TWO_RANKS[name] if name else None)
    made.train(STEPS)
    made.save(folder)
    return made


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("resharding")


@pytest.fixture(scope="module")
def twins(home):
    """Save trainings of one process; return the losses that would have come next."""
    uneven = twin()
    uneven.train(STEPS)
    uneven.optimizer.state[uneven.bare.inp.weight]["step"] += 1
    uneven.save(home / "uneven")
    losses = {"": saved_twin(home / "twin").train(4)}
    if MIXED in known(OF_TWO, TWO_RANKS):
        losses[MIXED] = saved_twin(home / "twin-mixed", MIXED).train(4)
    return losses


@pytest.fixture(scope="module")
def of_two(request, home, twins):
    names = [name for name in OF_TWO if name not in NIGHTLY or has_nightly(request.config)]
    return spawned(partial(two, names=names), home / "two")


@pytest.fixture(scope="module")
def trained(home, of_two):
    """Return the folder with what each wrapping of two ranks saved."""
    return Path(of_two[0]["ddp"]["folder"]).parents[1]


@pytest.fixture(scope="module")
def of_four(home, trained):
    (home / "trained").write_text(str(trained / "trained"))
    return spawned(four, home / "four", ranks=4)


# ------------------------------------------------------------------------------------- boxes


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 4), (1, 1, 3), (4, 1)])
def test_any_range_of_a_flat_parameter_is_some_boxes_in_its_order(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            found = []
            for offsets, sizes in range_boxes(shape, start, stop):
                box = whole
                for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
                    box = box.narrow(dim, at, size)
                found += box.flatten().tolist()
            assert list(range(start, stop)) == found


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("most", [1, 3, 5, 100])
def test_what_is_large_is_cut_into_boxes_that_are_not(shape, most):
    whole = torch.zeros(shape)
    for offsets, sizes in split_box(shape, most):
        box = whole
        for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
            box = box.narrow(dim, at, size)
        assert box.numel() <= most
        box += 1
    assert bool((whole == 1).all())


def test_a_rank_reads_only_what_overlaps_with_its_own_boxes(tmp_path, monkeypatch):
    monkeypatch.setattr(payload, "BOX_BYTES", 24 * 4)
    saved = saved_twin(tmp_path)
    assert saved.load(tmp_path).exact
    own = TensorBox("model.inp.weight", (12, 6), (3, 0), torch.empty(2, 6))
    reader = BoxReader([own])
    metadata = payload.read_metadata(path_of(tmp_path))
    reader.set_up_planner({}, metadata, True)
    assert 3 == len(metadata.state_dict_metadata["model.inp.weight"].chunks)
    assert 2 == len(reader.create_local_plan().items)
    payload.read(path_of(tmp_path), [own])
    assert torch.equal(saved.bare.inp.weight[3:5], own.tensor)


# ------------------------------------------------------------------------------- two ranks


@pytest.mark.parametrize("name", OF_TWO_NAMES)
def test_two_ranks_take_up_one_process_and_go_on_as_it_would(home, twins, of_two, name):
    expected = content(home / ("twin-mixed" if name == MIXED else "twin"))
    losses = twins[name if name == MIXED else ""]
    for rank in of_two:
        assert [STEPS, False] == rank[name]["restored"]
        rounding = 1e-2 if name == MIXED else 1e-5
        assert losses[:3] == pytest.approx(rank[name]["losses"] + rank[name]["next"], rel=rounding)
    assert_taken_up(expected, content(of_two[0][name]["folder"]))


@pytest.mark.parametrize("name", OF_TWO_NAMES)
def test_what_two_ranks_hold_is_the_whole_in_the_wrappers_own_words_too(
    home, trained, of_two, name
):
    expected = content(home / ("twin-mixed" if name == MIXED else "twin"))
    for rank in range(2):
        found = torch.load(trained / f"full-{name}-{rank}.pt")
        assert {key for key in expected if key.startswith("model.")} <= found.keys()
        assert [] == [k for k, t in found.items() if not torch.equal(t, expected[k])]


@pytest.mark.parametrize("name", [p for p in OF_TWO_NAMES if p.values != (MIXED,)])
def test_one_wrapping_takes_up_what_another_left(twins, of_two, name):
    found = of_two[0][name]["chained"]
    assert_taken_up(content(found["of"]), content(found["folder"]))
    begin = found["restored"][0] - STEPS
    assert twins[""][begin : begin + 2] == pytest.approx(found["losses"], rel=1e-5)


@pytest.mark.parametrize("name", OF_TWO_NAMES)
def test_one_process_takes_up_two_ranks(trained, twins, name):
    alone = twin(TWO_RANKS[name])
    restored = alone.load(trained / "trained" / name)
    assert (STEPS + 2, False, {"by": 0}) == (restored.step, restored.exact, restored.meta)
    live = alone.state.tensors()
    saved = content(trained / "trained" / name)
    assert [] == [key for key, tensor in saved.items() if not torch.equal(live[key], tensor)]
    losses = twins[name if name == MIXED else ""]
    assert losses[2:3] == pytest.approx(alone.train(1), rel=1e-2 if name == MIXED else 1e-5)


def test_each_byte_is_stored_and_counted_once(home, trained):
    store = twin().store(trained / "trained" / "ddp")
    (ref,) = store.folder.refs()
    whole = sum(t.nbytes for t in content(home / "twin").values())
    host = sum(
        spec.shape[0]
        for key, spec in payload.specs(path_of(trained / "trained" / "ddp")).items()
        if key.endswith(".host")
    )
    assert whole + host == store.folder.check(ref.id).num_bytes


def test_parameters_with_other_step_counts_are_refused_where_they_share_one(of_two):
    for rank in of_two:
        assert "inp.weight.step differ; here they are one" in rank["refused"]["uneven"]
        assert rank["refused"]["unchanged"]


def test_moments_that_each_rank_has_for_itself_are_refused_elsewhere(trained, of_two):
    assert of_two[0]["refused"]["zero again"]
    with pytest.raises(CheckpointError, match="by each of 2 ranks separately"):
        twin().load(trained / "zero")


def test_ranks_that_nothing_keeps_alike_are_not_taken_for_copies(trained, of_two):
    assert "saved separately by each rank" in of_two[0]["refused"]["by hand"]
    with pytest.raises(CheckpointError, match="by each of 2 ranks separately"):
        twin().load(trained / "by hand")


def widened(net):
    net.head = torch.nn.Linear(12, 4)
    return net


def test_a_model_of_other_shapes_is_refused_and_nothing_changes(trained):
    other = twin(wrap=widened)
    with pytest.raises(CheckpointError, match=r"model\.head\.weight was saved as .*\(4, 12\) now"):
        other.load(trained / "trained" / "fsdp2 nested")
    assert all(bool((t == 0.5).all()) for t in other.state.tensors().values())


def test_an_average_of_the_weights_is_taken_up_by_any_wrapping(of_two):
    first, *others = [content(folder) for folder in of_two[0]["averages"]]
    expected = {key: tensor for key, tensor in first.items() if key.startswith("extra.")}
    assert {k.replace("extra.average.", "model.") for k in expected} == {
        key for key in first if key.startswith("model.")
    }
    assert not torch.equal(expected["extra.average.head.weight"], first["model.head.weight"])
    for other in others:
        found = {key: tensor for key, tensor in other.items() if key.startswith("extra.")}
        assert expected.keys() == found.keys()
        assert [] == [key for key in expected if not torch.equal(expected[key], found[key])]
    alone = twin(average=ema)
    alone.load(of_two[0]["averages"][1])
    live = alone.state.tensors()
    assert [] == [key for key in expected if not torch.equal(expected[key], live[key])]
    assert STEPS == live["extra.average.num_steps"].item()


DAMAGE = {"flipped": flip, "truncated": halve, "missing": Path.unlink}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_part_of_one_rank_is_refused(trained, tmp_path, how):
    copy = tmp_path / "copy"
    shutil.copytree(trained / "trained" / "fsdp2 nested", copy)
    DAMAGE[how](path_of(copy) / "__1_0.distcp")
    alone = twin()
    with pytest.raises(CheckpointError, match=r"\(tried 1\)"):
        alone.load(copy)
    assert all(bool((t == 0.5).all()) for t in alone.state.tensors().values())


# ------------------------------------------------------------------- parts written one by one


@pytest.mark.parametrize("name", OF_TWO_NAMES)
def test_parts_that_ranks_wrote_alone_make_a_checkpoint(trained, tmp_path, name):
    shutil.copytree(trained / "alone" / name, tmp_path / "copy")
    alone = twin(TWO_RANKS[name])
    alone.load(tmp_path / "copy")
    assert_taken_up(content(trained / "trained" / name), content(tmp_path / "copy"))
    assert ["verified"] == [ref.state for ref in alone.store(tmp_path / "copy").folder.refs()]
    assert [] == list((tmp_path / "copy").glob(".alone*"))
    live = alone.state.tensors()
    saved = content(trained / "trained" / name)
    assert [] == [key for key, tensor in saved.items() if not torch.equal(live[key], tensor)]


def test_of_what_all_ranks_hold_each_writes_its_share(trained):
    parts = sorted((trained / "alone" / "ddp").glob(".alone-*/*/rank-*-of-2/*"))
    keys = [{k for k in payload.specs(part) if not k.startswith("rank.")} for part in parts]
    assert 2 == len(keys)
    assert set() == keys[0] & keys[1]
    assert content(trained / "trained" / "ddp").keys() == keys[0] | keys[1]


def drop_rank(part):
    shutil.rmtree(part)


def flip_rank(part):
    flip(next(part.glob("*/.metadata")))


def be_unfinished(part):
    part.rename(part.with_name(f".{part.name}"))


def be_another_runs(part):
    manifest = next(part.glob("*/manifest.json"))
    manifest.write_text(manifest.read_text().replace('"run"', '"walk"'))


@pytest.mark.parametrize("damage", [drop_rank, flip_rank, be_unfinished, be_another_runs])
def test_parts_that_are_not_all_there_and_sound_make_none_and_go(trained, tmp_path, damage):
    shutil.copytree(trained / "alone" / "fsdp2 nested", tmp_path / "copy")
    damage(next((tmp_path / "copy").glob(".alone-*/*/rank-1-of-2")))
    store = twin().store(tmp_path / "copy")
    assert () == store.folder.refs()
    assert [] == [p for p in (tmp_path / "copy").iterdir() if p.name != "index.json"]
    change = store.take_changes()[-1]
    assert ("bad", True) == (change.state, "saved by each rank on its own" in change.detail)


def test_a_part_whose_tensors_are_damaged_is_found_by_the_load_and_set_aside(trained, tmp_path):
    """Rank 0 reads back no tensors of others: the load does, each rank its share."""
    shutil.copytree(trained / "alone" / "fsdp2 nested", tmp_path / "copy")
    flip(next((tmp_path / "copy").glob(".alone-*/*/rank-1-of-2/*/*.distcp")))
    trainee = twin()
    store = trainee.store(tmp_path / "copy")
    assert ["verified"] == [ref.state for ref in store.folder.refs()]
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* \(tried 1\)"):
        store.load_newest(store.loadable_refs())
    assert () == store.folder.refs()
    assert 1 == len(list((tmp_path / "copy").glob("bad-*")))


def test_parts_of_what_was_saved_after_all_are_removed(trained, tmp_path):
    shutil.copytree(trained / "trained" / "ddp", tmp_path / "copy")
    shutil.copytree(trained / "alone" / "ddp", tmp_path / "copy", dirs_exist_ok=True)
    store = twin().store(tmp_path / "copy")
    assert ["healthy"] == [ref.state for ref in store.folder.refs()]
    assert [] == list((tmp_path / "copy").glob(".alone*"))


def test_parts_of_another_run_are_left_alone(trained, tmp_path):
    shutil.copytree(trained / "alone" / "ddp", tmp_path / "copy")
    (home,) = (tmp_path / "copy").glob(".alone-*")
    home.rename(home.with_name(".alone-another"))
    assert () == twin().store(tmp_path / "copy").folder.refs()
    assert 2 == len(list((tmp_path / "copy").glob(".alone-another/*/rank-*-of-2")))


def test_a_part_that_cannot_be_written_is_told_and_no_more(tmp_path):
    alone = twin()
    alone.train(1)
    snapshot = alone.snapshot()
    store = alone.store(tmp_path)
    snapshot.tensors()["model.head.weight"][0, 0] = float("nan")
    assert not store.write_alone(snapshot)
    assert "model.head.weight is not finite" in store.take_changes()[-1].detail
    assert 1 == store.num_failed


def test_metadata_with_a_hole_in_it_is_refused_at_the_load(trained):
    part = next((trained / "alone" / "fsdp2 nested").glob(".alone-*/*/rank-0-of-2/*"))
    whole = torch.empty(12, 6)
    with pytest.raises(
        CheckpointCorruptError, match=r"model\.inp\.weight is incomplete in the checkpoint"
    ):
        payload.read(part, [TensorBox.all_of("model.inp.weight", whole)])


# ------------------------------------------------------------------------------- four ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", known(OF_FOUR, FOUR_RANKS))
def test_four_ranks_take_up_two(of_four, twins, name):
    for rank in of_four:
        assert [STEPS + 2, False] == rank[name]["restored"]
        assert twins[""][2:4] == pytest.approx(rank[name]["losses"], rel=1e-5)
    found = of_four[0][name]
    assert_taken_up(content(found["of"]), content(found["folder"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", known(OF_FOUR, FOUR_RANKS))
def test_one_process_takes_up_the_parts_that_four_ranks_wrote_alone(of_four, tmp_path, name):
    folder = Path(of_four[0][name]["folder"]).parent
    alone = twin()
    shutil.copytree(folder / "alone" / name, tmp_path / "copy")
    alone.load(tmp_path / "copy")
    live = alone.state.tensors()
    saved = content(folder / "trained" / name)
    assert [] == [key for key, tensor in saved.items() if not torch.equal(live[key], tensor)]
