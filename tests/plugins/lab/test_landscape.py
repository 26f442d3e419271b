"""The loss round a checkpoint: known landscapes, everything put back, the same seed the same."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.plugins.lab import bad_steps
from tests.plugins.lab.bad_steps import train
from trainer_hooks.recovery.checkpoints.manifest import is_id, parse_id
from trainvitals.cli import main
from trainvitals.errors import UsageError
from vitals_plugins.lab.landscape.picture import draw_landscape
from vitals_plugins.lab.landscape.surface import (
    copy_model_tensors,
    direction_to_weights,
    losses_along,
    open_loss_surface,
    random_directions,
)
from vitals_plugins.lab.landscape.words import landscape_sentences, line_facts, path_facts
from vitals_plugins.lab.repro.play import slots

PLACES = [(i - 10) / 10 for i in range(21)]


def quadratic() -> nn.Linear:
    """Return a model whose loss is half the square of its weights: known along any line."""
    torch.manual_seed(0)
    return nn.Linear(5, 3, dtype=torch.float64)


def half_square(model):
    return lambda batch: 0.5 * model.weight.square().sum() * batch


def along(model, loss_of, directions, *, batches=(1.0,), mode="eval", places=PLACES, seed=0):
    with open_loss_surface(model, loss_of, batches, mode=mode, seed=seed) as around:
        return losses_along(around, directions, places)


# ------------------------------------------------------------------------------ the directions


def mixed() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 6), nn.Linear(6, 2)
    )
    model[4].weight.requires_grad_(False)
    with torch.no_grad():
        model[3].weight[2] = 0.0
    return model


def test_each_filter_of_a_direction_is_as_long_as_the_model_s_and_nothing_else_moves():
    model = mixed()
    names = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}
    (direction,) = random_directions(model, 1, seed=0)
    moved = {}
    for (_, _, tensor), part in zip(slots(model), direction, strict=True):
        if part is not None:
            moved[names[id(tensor)]] = part
            of_model = tensor.detach().flatten(1).norm(dim=1)
            torch.testing.assert_close(part.flatten(1).norm(dim=1), of_model)
    assert ["0.weight", "3.weight"] == list(moved), "no bias, no norm, nothing frozen, no buffer"
    assert not moved["3.weight"][2].any(), "a filter of zeros stays one"


def test_a_seed_gives_its_directions_and_two_of_one_seed_differ():
    model = mixed()
    one, other = random_directions(model, 2, seed=7)
    (again,) = random_directions(model, 1, seed=7)
    assert torch.equal(one[0], again[0])
    assert not torch.equal(one[0], other[0])


def test_a_model_without_filters_is_refused():
    with pytest.raises(UsageError, match="no trainable weight with filters"):
        random_directions(nn.LayerNorm(4), 1, seed=0)


# --------------------------------------------------------------------------- known landscapes


def test_the_losses_along_a_line_are_those_of_the_quadratic():
    model = quadratic()
    (direction,) = random_directions(model, 1, seed=3)
    weights, part = model.weight.detach(), direction[0]
    (losses,) = along(model, half_square(model), [direction], batches=(1.0, 3.0))
    for place, loss in zip(PLACES, losses, strict=True):
        known = 2.0 * 0.5 * (weights + place * part).square().sum().item()  # the batches' mean
        assert loss == pytest.approx(known, rel=1e-12)
    facts = line_facts(PLACES, losses, within=0.1)
    assert facts.curvature == pytest.approx(2.0 * weights.square().sum().item(), rel=1e-9)
    assert facts.slope == pytest.approx(2.0 * (weights * part).sum().item(), rel=1e-9)


def test_the_losses_on_a_plane_are_those_of_the_quadratic():
    model = quadratic()
    directions = random_directions(model, 2, seed=3)
    weights = model.weight.detach()
    losses = along(model, half_square(model), directions)
    for up, row in zip(PLACES, losses, strict=True):
        for right, loss in zip(PLACES, row, strict=True):
            moved = weights + right * directions[0][0] + up * directions[1][0]
            assert loss == pytest.approx(0.5 * moved.square().sum().item(), rel=1e-12)


def test_width_minimum_and_curvature_are_told():
    losses = [2.0 + 8.0 * place**2 for place in PLACES]
    facts = line_facts(PLACES, losses, within=0.16)
    assert (facts.curvature, facts.slope) == (pytest.approx(16.0), pytest.approx(0.0))
    # 2.32 is reached at .2; between the points beside it the loss is taken to be straight.
    assert (facts.low, facts.high) == (pytest.approx(-0.2), pytest.approx(0.2))
    assert facts.is_minimum and facts.lowest_at == 0.0
    tilted = [loss - place for place, loss in zip(PLACES, losses, strict=True)]
    facts = line_facts(PLACES, tilted, within=10.0)
    assert not facts.is_minimum and facts.lowest_at == pytest.approx(0.1)
    assert facts.is_open == (True, True)
    (_, _, width, minimum) = landscape_sentences(PLACES, (tuple(tilted),), 10.0)
    assert "from -1 to +1: a width of at least 2." in width
    assert (
        "not a minimum along direction 1: the loss is lowest at +0.1, 1.98 instead of 2." in minimum
    )


def test_points_that_are_not_finite_are_told_and_bound_the_width():
    losses = [math.nan if place > 0.35 else 1.0 for place in PLACES]
    facts = line_facts(PLACES, losses, within=0.1)
    assert (facts.low, facts.high, facts.is_open) == (-1.0, pytest.approx(0.3), (True, False))
    sentences = list(landscape_sentences(PLACES, (tuple(losses),), 0.1))
    assert sentences[-1] == "7 of 21 points are not finite (NaN or infinite)."
    assert draw_landscape(PLACES, (tuple(losses),), title="t", along="a").count("not finite") == 7
    losses[10] = math.inf
    assert "itself is inf: nothing else" in next(landscape_sentences(PLACES, (tuple(losses),), 0.1))


# ------------------------------------------------------------------------------ all is put back


def batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    for _ in range(3):
        model(torch.randn(16, 4))
    model[1].eval()  # some of it as the user set it
    return model, lambda batch: model(batch).square().mean(), [torch.randn(16, 4)]


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_weights_buffers_modes_and_generators_are_as_before(mode):
    model, loss_of, batches = batch_norm()
    before = [value.clone() for value in copy_model_tensors(model)]
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    losses = along(model, loss_of, random_directions(model, 1, 0), batches=batches, mode=mode)
    assert len(set(losses[0])) > 1
    assert all(map(torch.equal, before, copy_model_tensors(model)))
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    assert all(param.grad is None for param in model.parameters())


def test_all_is_put_back_where_the_loss_function_raises():
    model, _, batches = batch_norm()
    before = [value.clone() for value in copy_model_tensors(model)]

    def raises(batch):
        with torch.no_grad():
            model[0].weight.zero_()
            batch.zero_()
        raise ValueError("no such batch")

    with pytest.raises(UsageError, match="loss_of raised ValueError: no such batch"):
        along(model, raises, random_directions(model, 1, 0), batches=batches)
    assert all(map(torch.equal, before, copy_model_tensors(model)))
    assert batches[0].any()


def test_train_mode_has_dropout_and_the_batch_s_own_statistics_the_same_at_each_point():
    model, loss_of, batches = batch_norm()
    stays = [(None,) * len(list(slots(model)))]
    evaluated = along(model, loss_of, stays, batches=batches)[0]
    trained = along(model, loss_of, stays, batches=batches, mode="train")[0]
    assert len(set(evaluated)) == len(set(trained)) == 1
    assert evaluated[0] != trained[0]


def test_a_loss_of_derivatives_can_be_computed():
    model = quadratic()

    def penalty(batch):
        inputs = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        return slope.square().sum() * batch

    (losses,) = along(model, penalty, random_directions(model, 1, 0))
    assert losses[10] > 0


# ------------------------------------------------------------------------- between two states


def test_the_ends_of_a_way_have_the_losses_of_the_two_states_buffers_included():
    model, loss_of, batches = batch_norm()
    end = copy_model_tensors(model)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor))
        model[1].running_mean += 3.0
    places = [0.0, 0.5, 1.0]
    (losses,) = along(
        model, loss_of, [direction_to_weights(model, end)], batches=batches, places=places
    )
    model.eval()
    with torch.no_grad():
        assert losses[0] == pytest.approx(loss_of(batches[0]).item(), rel=1e-6)
        for tensor, there in zip(copy_model_tensors(model), end, strict=True):
            assert tensor.shape == there.shape
        for (_, _, tensor), there in zip(slots(model), end, strict=True):
            tensor.copy_(there)
        assert losses[2] == pytest.approx(loss_of(batches[0]).item(), rel=1e-5)


def test_a_barrier_is_what_rises_above_the_higher_end():
    facts = path_facts([0.0, 0.25, 0.5, 0.75, 1.0], [1.0, 2.0, 5.0, 3.0, 2.0])
    assert (facts.barrier, facts.highest_at, facts.highest) == (3.0, 0.5, 5.0)
    assert path_facts([0.0, 0.5, 1.0], [3.0, 2.5, 1.0]).barrier == 0.0
    assert path_facts([0.0, 0.5, 1.0], [math.nan, 2.5, 1.0]).barrier is None


# --------------------------------------------------------------------------------- the command

RUN = "01JD0000000000000000000000"


def shuffled():
    """Return what ``--entry`` asks for: dropout, and a loader that shuffles."""
    return *bad_steps.build(), DataLoader(bad_steps.dataset(), 8, shuffle=True)


def vitals(capsys, *arguments):
    """Return exit code, stdout and stderr of `vitals landscape`."""
    try:
        code = main.main(["landscape", *map(str, arguments)])
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    return code or 0, captured.out, captured.err


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return a folder with a run that kept checkpoints, and a file with a state dict."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "shm").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VITALS_SHM": str(folder / "shm"), "VITALS_DIR": str(folder / "runs"),
            "VITALS_RUN_ID": RUN, "VITALS_AGENT": "off",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        train(spoil=None, checkpoints=folder / "runs" / RUN / "checkpoints")
    torch.save({"model": bad_steps.build()[0].state_dict()}, folder / "first.pt")
    torch.save(nn.Linear(2, 2).state_dict(), folder / "other.pt")
    torch.save([1, 2], folder / "list.pt")
    (folder / "text.pt").write_text("no state dict")
    return folder


@pytest.fixture
def newest(saved) -> int:
    """Return the step of the run's newest checkpoint: the disk may be behind the loop."""
    names = [path.name for path in (saved / "runs" / RUN / "checkpoints").iterdir()]
    return max(parse_id(name)[0] for name in names if is_id(name))


@pytest.fixture
def ask(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def asked(checkpoint, *more, entry=f"{__name__}:shuffled"):
        where = saved / checkpoint if str(checkpoint).endswith(".pt") else checkpoint
        return vitals(capsys, where, "--entry", entry, "--dir", saved / "runs", *more)

    return asked


def test_the_command_writes_losses_and_a_picture_the_same_for_the_same_seed(ask, tmp_path):
    how = ("--points", 5, "--mode", "train", "--batches", 2)
    code, out, err = ask("first.pt", *how)
    assert code == 0, err
    assert "Loss around first.pt: mean of 2 batches in train mode." in out
    assert "Along direction 1 the curvature is" in out
    assert ask("first.pt", *how, "--output", "again")[0] == 0
    for kind in ("json", "svg"):
        files = [(tmp_path / f"{name}.{kind}").read_bytes() for name in ("landscape", "again")]
        assert files[0] == files[1]
    written = json.loads(files[0]) if kind == "json" else json.loads(Path("again.json").read_text())
    assert [-1.0, -0.5, 0.0, 0.5, 1.0] == written["places"]
    assert (5, 0) == (len(written["losses"][0]), written["nonfinite"])
    assert Path("again.svg").read_text().startswith("<svg xmlns=")
    code, _, err = ask("first.pt", *how, "--seed", 1)
    assert code == 2 and "landscape.json exists and its content differs" in err
    assert ask("first.pt", *how, "--seed", 1, "--force")[0] == 0
    assert json.loads(Path("landscape.json").read_text())["losses"] != written["losses"]


def test_a_plane_round_a_checkpoint_of_a_run(ask, newest):
    code, out, err = ask(RUN, "--step", 12, "--dimensions", 2, "--points", 3)
    assert code == 0, err
    assert f"Loss around step 10 of {RUN}" in out
    assert "Along direction 2 the curvature is" in out
    code, out, _ = ask(RUN, "--dimensions", 2, "--points", 3, "--format", "csv", "--output", "b")
    assert 10 == len(out.splitlines())
    assert json.loads(Path("b.json").read_text())["checkpoint"] == f"step {newest} of {RUN}"


def test_the_way_between_two_checkpoints(ask, newest):
    code, out, err = ask(RUN, "--step", 5, "--to", newest, "--points", 3)
    assert code == 0, err
    assert f"Loss from step 5 of {RUN} to step {newest} of {RUN}" in out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("nobody",), 2, "there is no run 'nobody'"),
        ((RUN, "--step", 3), 2, "holds no checkpoint up to step 3"),
        (("first.pt", "--step", 3), 2, "--step needs a run"),
        (("first.pt", "--to", "5"), 2, "--to is step 5, and"),
        (("first.pt", "--to", "nowhere"), 2, "neither a step nor a file"),
        (("first.pt", "--to", "5", "--dimensions", 2), 2, "--to is a line"),
        (("other.pt",), 2, "other.pt belongs to another model"),
        (("list.pt",), 1, "holds no state dict, but a list"),
        (("text.pt",), 1, "cannot be read as a state dict"),
        (("first.pt", "--points", 4), 2, "it must be odd"),
        (("first.pt", "--points", 100_001), 2, "from 3 to 101"),
        (("first.pt", "--points", -3), 2, "--points is -3"),
        (("first.pt", "--radius", 0), 2, "--radius is 0; it must be above 0"),
        (("first.pt", "--radius", "nan"), 2, "--radius is nan"),
        (("first.pt", "--within", -1), 2, "--within is -1"),
        (("first.pt", "--mode", "test"), 2, "--mode is 'test'"),
        (("first.pt", "--batches", 0), 2, "Invalid value for '--batches'"),
        (("first.pt", "--output", "no/such/folder", "--points", 3), 1, "cannot be written"),
    ],
)
def test_what_cannot_be_is_said(ask, arguments, code, text):
    result = ask(*arguments)
    assert (code, True) == (result[0], text in " ".join(result[2].split())), result[2]


ENTRIES = {
    "no loader": ("*built, None", "returned no loader to take batches from"),
    "empty": ("*built, []", "the loader gave no batch"),
    "wrong batch": ("*built, [3]", "loss_of raised TypeError"),
    "raises": ("*built, (1 / 0 for _ in 'a')", "the loader raised ZeroDivisionError"),
    "meta": ("built[0].to('meta'), built[1], [3]", "a model on the device meta"),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_what_the_entry_lacks_is_said(ask, tmp_path, monkeypatch, name):
    returned, text = ENTRIES[name]
    path = tmp_path / "entry_of_test.py"
    path.write_text(
        "from tests.plugins.lab import bad_steps\n\n\ndef build():\n"
        f"    built = bad_steps.build()\n    return {returned}\n"
    )
    code, _, err = ask("first.pt", entry=f"{path}:build")
    assert code == 2
    assert text in " ".join(err.split())
    sys.modules.pop("entry_of_test", None)
