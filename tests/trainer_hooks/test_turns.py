"""Several models and optimizers in one watch: each step moves one, and is judged by its own."""

import copy
import math
import os
import sys

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import trainvitals
from tests.support.forked import COMMANDS, TRAINING
from tests.support.inside import facts_of
from tests.support.watched import assert_same, own_place  # noqa: F401
from tests.trainer_hooks import ranks_taking_turns
from tests.trainer_hooks.gan import BATCHES, NAN, Gan, watched
from tests.trainer_hooks.spawned import spawned
from tests.trainer_hooks.torchrun import Trained, reader_of, run_id_of, wait_for_agents
from trainvitals.errors import TrainingHalted, UsageError
from trainvitals.views import DecisionsQuestion, SeriesQuestion


@pytest.mark.parametrize(
    ("mode", "fused"),
    [*((mode, True) for mode in ("off", "observe", "guard", "heal")), ("guard", False)],
)
def test_a_healthy_gan_is_bit_for_bit_what_it_was_without_us(mode, fused):
    state, _ = watched(Gan(fused=fused), mode=mode, checkpoints=mode == "heal")
    assert_same(Gan(fused=fused).bare(), state)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", ["guard", "heal"])
def test_a_bad_update_of_one_player_is_dropped_and_no_other(mode, fused):
    bad = {20, 31, 50, 51}  # the discriminator's, the generator's, both of one batch
    decisions = []
    state, monitor = watched(
        Gan(fused=fused, bad=bad),
        each=lambda _, outcome: decisions.append(outcome.decision),
        mode=mode,
        checkpoints=mode == "heal",
    )
    assert_same(Gan(fused=fused, bad=bad).bare(dropped=bad), state)
    assert facts_of(monitor).num_skips == len(bad)
    reasons = {d.step: d.reason.split(":")[0] for d in decisions if d is not None}
    assert {reasons[20], reasons[50 if 50 in reasons else 20]} == {"discriminator"}
    assert {reasons[31], reasons[51]} == {"generator"}


ALONE = """
from tests.trainer_hooks.gan import Gan
from tests.trainer_hooks.gan import watched

watched(Gan(bad={40}), weight=16)
"""


def test_each_has_its_own_curves_and_the_first_one_s_are_the_run_s(tmp_path):
    environ = {**os.environ, "VITALS_AGENT": "auto"}
    TRAINING.run([sys.executable, "-c", ALONE], env=environ, check=True, timeout=120)
    wait_for_agents(tmp_path / "runs")
    trained = Trained(0, "", {}, tmp_path / "runs")
    run_id = run_id_of(trained)
    with reader_of(trained) as reader:

        def steps_of(metric):
            curve = reader.ask(SeriesQuestion(run_id=run_id, metric=metric, source="rank:0"))
            pairs = zip(curve.step, curve.value, strict=True)
            return [step for step, value in pairs if value is not None and math.isfinite(value)]

        generator, discriminator = range(1, 2 * BATCHES, 2), range(0, 2 * BATCHES, 2)
        assert steps_of("steps.loss") == steps_of("scalars.loss/generator") == [*generator]
        assert steps_of("scalars.grad_norm/generator") == [*generator]
        # The rows of a layer are those of steps that move it.
        of_g, of_d = steps_of("layers.generator.0"), steps_of("layers.discriminator.0")
        assert of_g[:4] == [1, 11, 21, 31] and set(of_g) <= {*generator}
        assert of_d[:4] == [0, 10, 20, 30] and set(of_d) <= {*discriminator}
        assert steps_of("steps.tokens_seen") == steps_of("steps.perplexity") == [*generator]
        norms = steps_of("scalars.grad_norm/discriminator")
        assert norms == [step for step in discriminator if step != 40]
        (skip,) = reader.ask(DecisionsQuestion(run_id=run_id))
    assert (skip.decision.step, skip.decision.reason) == (
        40,
        "discriminator: loss is nan on rank 0",
    )

    def vitals(*command):
        command = [sys.executable, "-m", "trainvitals", *command, "--dir", tmp_path / "runs"]
        ended = COMMANDS.run(command, check=True, capture_output=True, text=True, timeout=60)
        return ended.stdout + ended.stderr

    assert "all as recorded" in vitals("replay", run_id)
    why = " ".join(vitals("why", run_id, "40").split())
    assert "Loss/discriminator NaN" in why and "Loss/discriminator over the next 4 steps" in why
    assert "not measured" not in why


def test_an_average_follows_the_verdict_of_its_own_model_s_step():
    """Both averages are updated after the generator's step, whoever's update was dropped."""
    bad = {20, 31, 50, 51}

    def averaged(gan, play):
        pairs = [(AveragedModel(gan.g), gan.of_g, gan.g), (AveragedModel(gan.d), gan.of_d, gan.d)]
        play(pairs)
        return {i: copy.deepcopy(average.state_dict()) for i, (average, *_) in enumerate(pairs)}

    gan = Gan(bad=bad)

    def bare(pairs):
        applied = {}

        def step(optimizer, _loss):
            applied[optimizer] = gan.updates - 1 not in bad
            if applied[optimizer]:
                optimizer.step()
            gan.of_g.zero_grad()
            gan.of_d.zero_grad()

        for real in gan.data:
            buffers = [buffer.clone() for buffer in gan.g.buffers()]
            gan.play(real, step)
            if not applied[gan.of_d]:  # its forward came before the discriminator's step
                for buffer, before in zip(gan.g.buffers(), buffers, strict=True):
                    buffer.copy_(before)
            for average, optimizer, model in pairs:
                if applied[optimizer]:
                    average.update_parameters(model)

    expected = averaged(gan, bare)
    gan = Gan(bad=bad)
    gan.schedules = []

    def guarded(pairs):
        state = {"g": pairs[0][0], "d": pairs[1][0]}
        with trainvitals.watch([gan.g, gan.d], [gan.of_g, gan.of_d], state=state) as monitor:
            for real in gan.data:
                gan.play(real, lambda o, loss: monitor.step(loss, optimizer=o))
                for average, _, model in pairs:
                    average.update_parameters(model)

    assert_same(expected, averaged(gan, guarded))


def test_gradients_left_in_the_other_s_parameters_are_not_its_own():
    """The generator's loss leaves gradients in the discriminator, which nobody zeroes."""
    gan = Gan()
    norms = []

    def each(monitor, outcome):
        held = [p.grad for model in (gan.g, gan.d) for p in model.parameters()]
        norms.append(all(grad is None for grad in held))

    watched(gan, each=each)
    assert all(norms)


def test_a_rollback_within_a_batch_leaves_out_the_rest_of_it_and_ends_as_the_clean_run(tmp_path):
    gan, back = Gan(), []

    def each(monitor, outcome):
        if outcome.step == 82 and not back:  # the discriminator's: the generator's turn is to come
            with torch.no_grad():
                next(gan.d.parameters()).fill_(NAN)
        if outcome.rolled_back_to is not None:
            back.append((outcome.step, outcome.rolled_back_to))

    settings = trainvitals.CheckpointSettings(
        directory=tmp_path / "kept", snapshot_every=21, save_every=30
    )
    state, _ = watched(gan, each=each, mode="heal", checkpoints=settings)
    assert len(back) == 1
    assert back[0][1] % 2 == 0  # a state to go back to lies between two batches
    assert_same(Gan().bare(), state)


def test_a_rollback_with_a_pending_graph_does_not_fail_the_backward_of_the_loop(tmp_path):
    """The generator's backward comes after a restore that wrote its weights and batch norm."""
    gan, back = Gan(), []

    def each(monitor, outcome):
        if outcome.step == 81 and not back:
            with torch.no_grad():
                next(gan.g.parameters()).data.fill_(NAN)
        if outcome.rolled_back_to is not None:
            back.append(outcome.step % 2)

    settings = trainvitals.CheckpointSettings(directory=tmp_path / "kept", snapshot_every=21)
    state, _ = watched(gan, each=each, mode="heal", checkpoints=settings)
    assert [0] == back  # the discriminator's step, before that backward
    assert_same(Gan().bare(), state)


def test_a_loop_that_is_left_where_a_rollback_came_trains_on(tmp_path):
    """The rest of that batch is not trained on; what follows without a loader is no part of it."""
    gan, back = Gan(), []
    settings = trainvitals.CheckpointSettings(directory=tmp_path / "kept", snapshot_every=10)
    models, optimizers = [gan.g, gan.d], [gan.of_g, gan.of_d]
    with trainvitals.watch(models, optimizers, mode="heal", checkpoints=settings) as monitor:

        def step(optimizer, loss):
            outcome = monitor.step(loss, optimizer=optimizer)
            back.extend([] if outcome.rolled_back_to is None else [outcome.rolled_back_to])
            if outcome.step == 40 and not back:
                with torch.no_grad():
                    next(gan.d.parameters()).fill_(NAN)

        for real in monitor.batches(gan.data):
            gan.play(real, step)
            if back:
                break
        for real in gan.data[:5]:
            gan.play(real, step)
        assert monitor.step_index == back[0] + 10


def test_a_relaunch_goes_on_exactly(tmp_path, monkeypatch):
    settings = trainvitals.CheckpointSettings(
        directory=tmp_path / "kept", snapshot_every=21, save_every=30
    )
    models = {}

    class CutError(Exception):
        pass

    def cut(monitor, outcome):
        models["run"] = monitor.run_id
        if outcome.step == 81:
            raise CutError

    with pytest.raises(CutError):
        watched(Gan(), each=cut, mode="heal", checkpoints=settings)
    monkeypatch.setenv("VITALS_RUN_ID", models["run"])
    firsts = []
    state, _ = watched(
        Gan(), each=lambda _, o: firsts.append(o.step), mode="heal", checkpoints=settings
    )
    assert 0 < firsts[0] < 82
    assert_same(Gan().bare(), state)


def test_a_player_that_is_lost_is_not_hidden_by_the_other():
    gan = Gan(bad=set(range(0, 10**6, 2)), batches=150)  # each update of the discriminator
    with pytest.raises(TrainingHalted, match="discriminator"):
        watched(gan)


def test_a_scaler_and_a_schedule_move_with_their_own_optimizer():
    bare = Gan(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    bare.schedules.append(torch.optim.lr_scheduler.StepLR(bare.of_d, 5, 0.5))

    def step(optimizer, _loss):
        bare.scaler.step(optimizer)
        bare.scaler.update()
        bare.schedules[0 if optimizer is bare.of_g else 1].step()
        bare.of_g.zero_grad()
        bare.of_d.zero_grad()

    for real in bare.data:
        bare.play(real, step)
    expected = bare.state()
    gan = Gan(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    gan.schedules.append(torch.optim.lr_scheduler.StepLR(gan.of_d, 5, 0.5))
    state, _ = watched(gan, scaler=gan.scaler)
    assert_same(expected, state)
    assert gan.scaler.state_dict() == bare.scaler.state_dict()


def test_models_that_one_backward_trains_are_stepped_together():
    torch.manual_seed(0)
    encoder, head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (encoder, head)]
    with trainvitals.watch({"encoder": encoder, "head": head}, optimizers) as monitor:
        for _ in range(20):
            x = torch.randn(8, 4)
            loss = (head(encoder(x)) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            assert monitor.step(loss).decision is None
    assert monitor.swallowed_errors == {}


# ------------------------------------------------------------------------------- misuse


def two():
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    return models, [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


def test_an_optimizer_that_nobody_watches_is_refused():
    models, optimizers = two()
    other = torch.optim.Adam(nn.Linear(4, 1).parameters())
    with trainvitals.watch(models, optimizers) as monitor:
        models[0](torch.ones(1, 4)).sum().backward()
        with pytest.raises(UsageError, match="was given Adam, which is not one of the 2"):
            monitor.step(optimizer=other)


def test_a_second_step_after_all_backwards_has_no_gradients_and_says_so():
    models, optimizers = two()
    with trainvitals.watch(models, optimizers) as monitor:
        for model in models:
            model(torch.ones(1, 4)).sum().backward()
        monitor.step(optimizer=optimizers[0])
        with pytest.raises(UsageError, match=r"'model1' has a gradient"):
            monitor.step(optimizer=optimizers[1])


def test_a_probe_is_refused_where_optimizers_take_turns():
    models, optimizers = two()
    with trainvitals.watch(models, optimizers) as monitor:
        for batch in monitor.batches([torch.ones(1, 4)], probe=lambda b: models[0](b).sum()):
            loss = models[0](batch).sum()
            loss.backward()
            with pytest.raises(UsageError, match="a probe reads one loss"):
                monitor.step(loss, optimizer=optimizers[0])


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ([], "the list of models is empty"),
        ([nn.Linear(4, 1), 3], r"models\['int'\] is an int"),
        ({"a.b": nn.Linear(4, 1)}, "named 'a.b'"),
        ({"keys": nn.Linear(4, 1)}, "named 'keys'"),
    ],
)
def test_models_that_cannot_be_watched_are_named(models, says):
    optimizer = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)
    with pytest.raises(UsageError, match=says):
        trainvitals.watch(models, optimizer)


# ------------------------------------------------------------------------------- two ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return spawned(ranks_taking_turns.main, tmp_path_factory.mktemp("turns"))


@pytest.mark.parametrize("mode", ["guard", "heal"])
def test_on_two_ranks_a_healthy_gan_is_as_without_us_and_a_bad_update_is_dropped(mode, two_ranks):
    for ends in two_ranks:
        assert ends[mode] == {"state": ends["plain"], "back": False}
        assert ends[f"{mode} bad"] == {"state": ends["dropped"], "back": False}


def test_on_two_ranks_a_rollback_within_a_batch_ends_as_the_clean_run(two_ranks):
    for ends in two_ranks:
        assert ends["back"] == {"state": ends["plain"], "back": True}
