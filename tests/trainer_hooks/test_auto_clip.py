"""``max_norm="auto"``: what a loop does with it, beside the same loop that clips by hand."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.support.watched import own_place  # noqa: F401
from tests.trainer_hooks.measures.journal import Journal
from trainvitals.auto_clip import AutoClip, AutoClipConfig
from trainvitals.errors import FormatError, UsageError

STEPS, OUTLIER = 60, 40
"""The outlier is in the warm-up, in which no outlier is withheld: it is clipped."""
INF = float("inf")


class Training:
    """A regression that can have one batch with gradients far above the others'."""

    def __init__(self, *, fused=True, outlier=None, lr=0.01):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=fused)
        self.outlier = outlier

    def backward(self, step):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 4, generator=generator)
        y = x.sum(1, keepdim=True) * (30.0 if step == self.outlier else 1.0)
        loss = (self.model(x) - y).square().mean()
        loss.backward()
        return loss

    def bare(self, clip=None, steps=STEPS):
        """Train without Vitals; with ``clip``, clip to its limits."""
        for step in range(steps):
            self.backward(step)
            if clip is not None:
                grads = [p.grad for p in self.model.parameters()]
                norms = torch._foreach_norm(grads, 2.0, dtype=torch.float64)
                norm = torch.stack(norms).square().sum().sqrt()
                limit = clip.limit(step)
                if limit is not None and norm > limit:
                    torch._foreach_div_(grads, (norm / limit).float())
                clip.add(step, norm.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.weights()

    def watched(self, max_norm="auto", steps=STEPS, **options):
        with trainer_hooks.watch(self.model, self.optimizer, **options) as monitor:
            for step in range(steps):
                monitor.step(self.backward(step), max_norm=max_norm)
        assert monitor.swallowed_errors == {}
        return self.weights()

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def journal():
    return Journal(Path(os.environ["VITALS_SHM"]))


@pytest.fixture
def never(monkeypatch):
    """A multiple that no gradient of these trainings reaches."""
    monkeypatch.setenv("VITALS_AUTO_CLIP_MULTIPLE", "1000")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", ["observe", "guard"])
def test_without_a_gradient_above_the_limit_it_is_the_unclipped_loop(never, fused, mode):
    bare = Training(fused=fused).bare()
    assert torch.equal(bare, Training(fused=fused).watched(mode=mode))


@pytest.mark.parametrize("mode", ["observe", "guard"])
def test_a_gradient_above_the_limit_is_clipped_to_it(mode):
    expected = Training(outlier=OUTLIER).bare(AutoClip())
    assert not torch.equal(expected, Training(outlier=OUTLIER).bare())
    ours = Training(outlier=OUTLIER).watched(mode=mode)
    assert torch.equal(expected, ours)


def test_an_optimizer_on_the_host_path_clips_to_the_same_limits():
    expected = Training(outlier=OUTLIER, fused=False).bare(AutoClip())
    ours = Training(outlier=OUTLIER, fused=False).watched()
    torch.testing.assert_close(expected, ours)
    assert 1 < len(journal().steps("auto_max_norm"))


def test_attach_clips_to_the_same_limits():
    expected = Training(outlier=OUTLIER).bare(AutoClip())
    training = Training(outlier=OUTLIER)
    with trainer_hooks.attach(training.model, training.optimizer, max_norm="auto"):
        training.bare()
    assert torch.equal(expected, training.weights())
    assert 1 < len(journal().steps("auto_max_norm"))


def test_off_clips_to_the_same_limits():
    expected = Training(outlier=OUTLIER).bare(AutoClip())
    training = Training(outlier=OUTLIER)
    monitor = trainer_hooks.watch(training.model, training.optimizer, mode="off")
    for step in range(STEPS):
        monitor.step(training.backward(step), max_norm="auto")
    torch.testing.assert_close(expected, training.weights())


def test_the_limit_is_in_the_row_of_its_step():
    Training(outlier=OUTLIER).watched()
    limits, norms = journal().steps("auto_max_norm"), journal().steps("grad_norm")
    clipped = journal().steps("grad_norm_clipped")
    clip = AutoClip()
    for step, norm in norms.items():
        assert clip.limit(step) == limits.get(step)
        clip.add(step, norm)
    assert norms[OUTLIER] > limits[OUTLIER] == clipped[OUTLIER]
    assert {} == journal().steps("max_norm")


@pytest.mark.parametrize("max_norm", [None, 1.0, INF])
def test_it_is_off_unless_asked_for(max_norm):
    Training(outlier=OUTLIER).watched(max_norm)
    assert {} == journal().steps("auto_max_norm")


def test_inf_measures_and_never_acts():
    bare = Training(outlier=OUTLIER).bare()
    assert torch.equal(bare, Training(outlier=OUTLIER).watched(INF, mode="observe"))
    assert OUTLIER in journal().steps("grad_norm")


@pytest.mark.parametrize("max_norm, messages", [(None, 1), (INF, 0), (1.0, 0), ("auto", 0)])
def test_a_loop_that_never_clips_gets_one_message(max_norm, messages, caplog):
    with caplog.at_level("INFO", "trainvitals"):
        Training().watched(max_norm, steps=5)
    texts = journal().notes("no_clip")
    assert messages == len(texts)
    assert all('max_norm="auto"' in text and "max_norm=math.inf" in text for text in texts)
    assert messages == sum("does not clip" in record.getMessage() for record in caplog.records)


def test_another_word_is_refused():
    training = Training()
    with (
        trainer_hooks.watch(training.model, training.optimizer) as monitor,
        pytest.raises(UsageError, match="max_norm is 'automatic'; it must be a number above 0, or"),
    ):
        monitor.step(training.backward(0), max_norm="automatic")


def test_the_settings_choose_the_limit(monkeypatch):
    monkeypatch.setenv("VITALS_AUTO_CLIP_MULTIPLE", "5")
    monkeypatch.setenv("VITALS_AUTO_CLIP_WINDOW", "20")
    expected = Training(outlier=OUTLIER).bare(AutoClip(AutoClipConfig(multiple=5.0, window=20)))
    assert torch.equal(expected, Training(outlier=OUTLIER).watched())


def test_norms_of_zero_do_not_stop_a_training():
    training = Training()
    with trainer_hooks.watch(training.model, training.optimizer) as monitor:
        for step in range(STEPS):
            loss = training.backward(step)
            if step < 40:
                for parameter in training.model.parameters():
                    parameter.grad.zero_()
            before = training.weights()
            monitor.step(loss, max_norm="auto")
    assert not torch.equal(before, training.weights())


def test_a_resumed_loop_continues_with_the_same_limits():
    whole = Training(outlier=OUTLIER).watched()
    first = Training(outlier=OUTLIER)
    with trainer_hooks.watch(first.model, first.optimizer) as monitor:
        for step in range(40):
            monitor.step(first.backward(step), max_norm="auto")
        # The last step's numbers arrive with the next one, so a state lacks one norm at most.
        state = monitor.state_dict()
    with trainer_hooks.watch(first.model, first.optimizer) as monitor:
        monitor.load_state_dict(state)
        for step in range(40, STEPS):
            monitor.step(first.backward(step), max_norm="auto")
    torch.testing.assert_close(whole, first.weights(), rtol=1e-2, atol=1e-2)
    limits = [row.get("auto_max_norm") for row in journal().rows["steps"] if row["step"] == 40]
    assert [None] * len(limits) != limits and None not in limits


def test_a_rollback_continues_with_the_limits_of_a_run_without_it():
    straight = Training(outlier=OUTLIER).watched()
    training, broken = Training(outlier=OUTLIER), False
    options = {"mode": "heal", "checkpoints": True}
    with trainer_hooks.watch(training.model, training.optimizer, **options) as monitor:
        while monitor.step_index < STEPS:
            if monitor.step_index == OUTLIER - 4 and not broken:
                broken = True
                with torch.no_grad():
                    training.model[0].weight.fill_(float("nan"))
            monitor.step(training.backward(monitor.step_index), max_norm="auto")
    assert broken
    assert 1 < len({row["attempt"] for row in journal().rows["steps"]})
    assert torch.equal(straight, training.weights())


def test_optimizers_that_take_turns_have_their_own_limits():
    small, large = nn.Linear(4, 1), nn.Linear(4, 1)
    models = {"small": small, "large": large}
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=1e-8, fused=True)
        for name, model in models.items()
    }
    with trainer_hooks.watch(models, optimizers) as monitor:
        for step in range(60):
            x = torch.randn(32, 4, generator=torch.Generator().manual_seed(step))
            for name, factor in (("small", 1.0), ("large", 1000.0)):
                loss = models[name](x).add(1.0).square().mean() * factor
                loss.backward()
                monitor.step(loss, max_norm="auto", optimizer=optimizers[name])
    limits = journal().steps("auto_max_norm")
    assert 100 * limits[118] < limits[119]


def test_a_state_that_is_damaged_is_refused():
    training = Training()
    with trainer_hooks.watch(training.model, training.optimizer) as monitor:
        monitor.step(training.backward(0), max_norm="auto")
        state = monitor.state_dict()
    state["auto_clip"] = {"0": {"norms": [[1, "x"]]}}
    with (
        trainer_hooks.watch(training.model, training.optimizer) as monitor,
        pytest.raises(FormatError, match="damaged"),
    ):
        monitor.load_state_dict(state)
