"""Fabric, beside the fault matrix: the clip, the losses, resuming, what is put back and refused."""

import math
import re

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="not installed: lightning")
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("own_place"),
]

from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.loggers import CSVLogger  # noqa: E402
from lightning.fabric.plugins import MixedPrecision  # noqa: E402

from tests.support.inside import probe_of  # noqa: E402
from tests.support.watched import own_place  # noqa: E402, F401
from tests.trainer_hooks.measures.journal import Journal  # noqa: E402
from tests.trainer_hooks.probing import ask  # noqa: E402
from trainer_hooks.integrations import framework  # noqa: E402
from trainer_hooks.integrations.fabric import attach  # noqa: E402
from trainvitals.errors import MissingDependencyError, UsageError  # noqa: E402
from trainvitals.records import RunEnded  # noqa: E402

NAN = float("nan")
REPLACED = ("backward", "clip_gradients", "log_dict")


class Loop:
    """A loop through Fabric, as people write it."""

    def __init__(self, *, fused=True, guarded=True, fabric=None, options=None, **given):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        bare = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
        self.net, self.bare = net, bare
        self.fabric = fabric or Fabric(accelerator="cpu", devices=1, **given)
        self.fabric.launch()
        self.model, self.optimizer = self.fabric.setup(net, bare)
        if guarded:
            self.attached = attach(self.fabric, self.model, self.optimizer, **(options or {}))
        self.inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

    def step(self, *, bad=False, clips=1, micro=1, divisor=1, **clip):
        self.optimizer.zero_grad()
        for _ in range(micro):
            loss = self.model(self.inputs).square().mean()
            self.fabric.backward(loss / divisor)
        if bad:
            self.net[0].weight.grad[0, 0] = NAN
        for _ in range(clips):
            self.fabric.clip_gradients(self.model, self.optimizer, **({"max_norm": 0.1} | clip))
        self.optimizer.step()
        return loss.item()

    def weight(self):
        return self.net[0].weight.detach().clone()


def float16(**options):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return Loop(plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **options)


def journal(tmp_path):
    return Journal(tmp_path / "shm")


class TestTheClip:
    def test_does_not_raise_before_the_guard_can_skip(self, tmp_path):
        loop = Loop()
        with loop.attached:
            loop.step()
            before = loop.weight()
            loop.step(bad=True)
            assert torch.equal(before, loop.weight())
            loop.step()
            assert not torch.equal(before, loop.weight())

    def test_raises_as_before_where_the_loop_wants_it(self):
        loop = Loop()
        with loop.attached, pytest.raises(RuntimeError, match="non-finite"):
            loop.step(bad=True, error_if_nonfinite=True)

    def test_raises_as_before_where_the_guard_only_observes(self):
        loop = Loop(options={"mode": "observe"})
        with loop.attached, pytest.raises(RuntimeError, match="non-finite"):
            loop.step(bad=True)

    def test_may_come_more_than_once_in_a_step(self, tmp_path):
        loop = Loop()
        with loop.attached:
            loop.step(clips=2)
            before = loop.weight()
            loop.step(clips=2, bad=True)
            assert torch.equal(before, loop.weight())

    def test_in_the_midst_of_a_step_does_not_let_pass_what_comes_after_it(self):
        loop = Loop()
        with loop.attached:
            loop.step()
            before = loop.weight()
            loop.optimizer.zero_grad()
            loop.fabric.backward(loop.model(loop.inputs).square().mean())
            loop.fabric.clip_gradients(loop.model, loop.optimizer, max_norm=0.1)
            loop.fabric.backward(loop.model(loop.inputs).square().mean() * NAN)
            loop.optimizer.step()
            assert torch.equal(before, loop.weight())

    @pytest.mark.parametrize("through_fabric", [True, False])
    @pytest.mark.parametrize("in_between", [True, False])
    def test_of_several_optimizers_is_judged_once(self, tmp_path, in_between, through_fabric):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        bare = [torch.optim.AdamW(layer.parameters(), fused=True) for layer in net]
        fabric = Fabric(accelerator="cpu", devices=1)
        model, *optimizers = fabric.setup(net, *bare)
        with attach(fabric, model, optimizers) as attached:
            for bad in (False, True, False):
                before = [p.detach().clone() for p in net.parameters()]
                loss = model(torch.ones(2, 4)).square().mean()
                fabric.backward(loss) if through_fabric else loss.backward()
                if bad:
                    net[1].weight.grad[0, 0] = NAN
                for optimizer in optimizers:
                    fabric.clip_gradients(model, optimizer, max_norm=0.1)
                    if in_between:
                        optimizer.step()
                for optimizer in optimizers:
                    if not in_between:
                        optimizer.step()
                    optimizer.zero_grad()
                after = [*net.parameters()]
                assert {bad} == {torch.equal(x, y) for x, y in zip(before, after, strict=True)}
        assert 3 == attached.step_index
        assert {0, 2} == set(journal(tmp_path).steps("grad_norm")) - {1}

    def test_of_somebody_else_s_optimizer_is_none_of_ours(self, tmp_path):
        loop = Loop()
        other = Loop(fabric=loop.fabric, guarded=False)
        with loop.attached:
            loop.step()
            other.step(error_if_nonfinite=True)
            loop.step()
        assert 2 == loop.attached.step_index

    def test_beside_that_of_the_guard_is_refused(self):
        loop = Loop(options={"max_norm": 0.1})
        with loop.attached, pytest.raises(UsageError, match="too"):
            loop.step()

    def test_by_another_norm_leaves_the_norm_after_it_unknown(self, tmp_path):
        loop = Loop()
        with loop.attached:
            loop.step(norm_type=math.inf)
        found = journal(tmp_path)
        assert {} == found.steps("grad_norm_clipped")
        assert {0} == set(found.steps("grad_norm"))

    @pytest.mark.parametrize("clip", [{}, {"max_norm": None, "clip_val": 0.1}])
    def test_of_scaled_gradients_unscales_them_once(self, tmp_path, clip):
        loop = float16(fused=False)
        with loop.attached:
            for bad in (False, True, False):
                before = loop.weight()
                loop.step(bad=bad, **clip)
                assert bad == torch.equal(before, loop.weight())
        norm = first_norm()
        found = journal(tmp_path)
        assert pytest.approx(norm, rel=2e-2) == found.steps("grad_norm")[0]
        assert {0: 1024.0, 1: 1024.0, 2: 512.0} == found.steps("loss_scale")

    def test_of_a_fused_optimizer_s_scaled_gradients_is_refused_by_fabric_as_before(self):
        loop = float16()
        with loop.attached, pytest.raises(NotImplementedError):
            loop.step()


def first_norm():
    loop = Loop(guarded=False)
    loop.fabric.backward(loop.model(loop.inputs).square().mean())
    return nn.utils.get_total_norm([p.grad for p in loop.net.parameters()]).item()


class TestTheLoss:
    def test_of_several_is_their_mean(self, tmp_path):
        loop = Loop()
        with loop.attached:
            loss = loop.step(micro=3)
        assert {0: pytest.approx(loss)} == journal(tmp_path).steps("loss")

    def test_is_undivided_where_the_divisor_is_told(self, tmp_path):
        loop = Loop(options={"loss_divisor": 3})
        with loop.attached:
            loss = loop.step(micro=3, divisor=3)
        assert {0: pytest.approx(loss)} == journal(tmp_path).steps("loss")

    @pytest.mark.parametrize("divisor", [0, -1, NAN, math.inf])
    def test_cannot_be_divided_by_everything(self, divisor):
        with pytest.raises(UsageError, match="loss_divisor"):
            Loop(options={"loss_divisor": divisor})


class TestItsEnd:
    def test_puts_everything_back(self):
        loop = float16(fused=False)
        precision = loop.fabric.strategy.precision
        assert all(name in vars(loop.fabric) for name in REPLACED)
        assert "unscale_gradients" in vars(precision)
        loop.attached.close()
        assert not [name for name in vars(loop.fabric) if name in REPLACED or "vitals" in name]
        assert "unscale_gradients" not in vars(precision)
        assert "step" not in vars(loop.bare)
        loop.step()

    def test_is_a_failure_where_the_loop_raises(self, tmp_path):
        loop = Loop()
        with pytest.raises(ZeroDivisionError), loop.attached:
            loop.step(divisor=0) and 1 / 0
            raise ZeroDivisionError
        (end,) = [e for e in journal(tmp_path).events if isinstance(e, RunEnded)]
        assert "failed" == end.state

    def test_lets_the_next_guard_in(self):
        loop = Loop()
        with pytest.raises(UsageError, match="already guarded"):
            attach(loop.fabric, loop.model, loop.optimizer)
        loop.attached.close()
        with attach(loop.fabric, loop.model, loop.optimizer) as again:
            loop.step()
        assert 1 == again.step_index


def test_off_leaves_all_as_it_was(tmp_path):
    loop, bare = Loop(options={"mode": "off"}), Loop(guarded=False)
    before = vars(loop.fabric).keys() & {*REPLACED, "_vitals_attached"}
    for each in (loop, bare):
        each.step()
    assert set() == before
    assert "step" not in vars(loop.bare)
    assert torch.equal(bare.weight(), loop.weight())
    assert not (tmp_path / "runs").exists()


def test_clean_training_is_what_it_is_without_a_guard():
    loop, bare = Loop(), Loop(guarded=False)
    for each in (loop, bare):
        for _ in range(5):
            each.step()
    loop.attached.close()
    assert all(map(torch.equal, bare.net.state_dict().values(), loop.net.state_dict().values()))


def test_a_resume_goes_on_from_the_checkpoint_s_step_and_limits(tmp_path):
    loop = Loop()
    with loop.attached:
        for _ in range(24):
            loop.step()
        state = {"model": loop.model, "optimizer": loop.optimizer, "vitals": loop.attached}
        loop.fabric.save(tmp_path / "one.ckpt", state)
    again = Loop()
    with again.attached:
        state = {"model": again.model, "optimizer": again.optimizer, "vitals": again.attached}
        again.fabric.load(tmp_path / "one.ckpt", state)
        assert 24 == again.attached.step_index
        again.step()
    assert 24 in journal(tmp_path).steps("grad_norm_limit")
    assert 25 == again.attached.step_index


def test_what_is_logged_is_kept_and_what_is_no_number_is_left(tmp_path):
    loop = Loop(loggers=CSVLogger(tmp_path))
    with loop.attached:
        loop.step()
        loop.fabric.log("one", torch.tensor(1.5, requires_grad=True))
        loop.fabric.log_dict({"two": 2, "step": 7})
    assert [(1, "one", 1.5), (1, "two", 2.0), (1, "step", 7.0)] == journal(tmp_path).scalars()
    assert {} == loop.attached.swallowed_errors


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "XLAStrategy"])
def test_an_engine_of_its_own_is_refused(name):
    loop = Loop(guarded=False)
    kind = type(loop.fabric.strategy)
    loop.fabric.strategy.__class__ = type("Mine", (type(name, (kind,), {}),), {})
    with pytest.raises(UsageError, match=name):
        attach(loop.fabric, loop.model, loop.optimizer)


def test_a_fabric_that_is_too_old_is_told_what_to_install(monkeypatch):
    loop = Loop(guarded=False)
    monkeypatch.setattr(framework, "version", lambda _: "2.1.4")
    expected = re.escape("lightning is 2.1.4; at least 2.4 is needed")
    with pytest.raises(MissingDependencyError, match=expected):
        attach(loop.fabric, loop.model, loop.optimizer)


def test_the_stand_alone_package_is_guarded_as_well(tmp_path):
    from lightning_fabric import Fabric as Alone

    loop = Loop(fabric=Alone(accelerator="cpu", devices=1))
    with loop.attached:
        loop.step()
        before = loop.weight()
        loop.step(bad=True)
    assert torch.equal(before, loop.weight())


# ----------------------------------------------------------------------------------- the probe


def test_a_loop_that_gives_its_batches_has_the_state_asked_and_trains_as_before():
    def train(loop):
        made = torch.Generator().manual_seed(2)
        for _ in range(25):
            x = torch.randn(4, 4, generator=made)
            if hasattr(loop, "attached"):
                loop.attached.keep_batch(x, loss_of(loop.model))
            loop.optimizer.zero_grad()
            loop.fabric.backward(loss_of(loop.model)(x))
            loop.fabric.clip_gradients(loop.model, loop.optimizer, max_norm=0.1)
            loop.optimizer.step()
        return [t.detach().clone() for t in loop.net.state_dict().values()]

    bare, ours = train(Loop(guarded=False)), Loop()
    with ours.attached:
        after = train(ours)
        reading = probe_of(ours.attached).evaluate(ask(30))
        assert probe_of(ours.attached).is_on
    assert 0 < reading.num_batches
    assert all(map(torch.equal, bare, after))


def loss_of(model):
    return lambda x: model(x).square().mean()
