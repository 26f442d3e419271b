"""One process: a loop that keeps its own clip and optimizer.step() is guarded by one line."""

import gc
import math
import os
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.support.examples import each_once
from tests.support.inside import device_of, is_paused, limits_of, probe_of, tokens_of
from tests.support.watched import (  # noqa: F401
    Loop,
    Own,
    Reads,
    assert_same,
    own_place,
    run_directory,
    send_command,
    until,
)
from tests.trainer_hooks.measures.journal import Journal
from tests.trainer_hooks.probing import ask
from trainer_hooks.exchange.reduce_vector import ReducedNumbers
from trainer_hooks.lifecycle import shutdown
from trainvitals.clock import SystemClock
from trainvitals.errors import UsageError
from trainvitals.records import (
    CLIPS,
    NORM_OUTLIER,
    WITHHELD,
    CommandAcknowledged,
    FindingRaised,
    Note,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("mode", ["observe", "guard"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_healthy_loop_is_bit_for_bit_what_it_was_without_us(mode, fused):
    bare = Own(fused=fused).run(30)
    ours = Own(fused=fused)
    with ours.attach(mode=mode) as attached:
        ours.run(30)
    assert_same(bare.state(), ours.state())
    assert attached.step_index == 30
    assert attached.swallowed_errors == {}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("first", [0, 4])
def test_a_bad_step_leaves_no_trace_but_the_schedule(fused, first):
    loop = Own(fused=fused)
    with loop.attach():
        for _ in range(first):
            loop.step()
        before = loop.state()
        loop.step(gradient=NAN, scale=3.0)
        after = loop.state()
        assert_same(before["model"], after["model"])
        if first:
            assert_same(before["optimizer"], after["optimizer"])
        loop.step()
        assert not torch.equal(after["model"]["0.weight"], loop.model[0].weight)
    assert loop.skips() == 1
    assert all(torch.isfinite(p).all() for p in loop.model.parameters())


def test_outliers_are_left_alone_after_the_loop_s_own_clip_and_that_is_said_once():
    loop = Own()
    with loop.attach():
        for step in range(70):
            loop.step(gradient=1e6 if step == 60 else None)
        assert limits_of(loop.attached).grad_norm is None
    assert loop.skips() == 0
    assert [e.code for e in loop.said if isinstance(e, Note)] == ["no_probe", "norm_unknown"]


@pytest.mark.parametrize(
    ("how", "fused"), each_once(("given", "before", "owned", "measured"), (True, False))
)
def test_outliers_are_skipped_where_the_norm_before_the_clip_is_known(how, fused):
    loop = Own(fused=fused)
    options = {"owned": {"max_norm": 0.5}, "measured": {"max_norm": INF}}.get(how, {})
    with loop.attach(**options):
        for step in range(70):
            before = loop.parameters()
            bad = step in (60, 61)
            loop.step(
                gradient=1e6 if bad else None,
                clip=0.5 if how in ("given", "before") else None,
                give=how != "before",
                before=how == "before",
            )
            same = all(map(torch.equal, before, loop.parameters()))
            assert same == bad
    assert loop.skips() == 2
    assert [e.code for e in loop.said if isinstance(e, Note)] == ["no_probe"]


def test_a_clip_that_is_ours_is_the_one_that_was_the_loop_s():
    bare = Own(fused=False).run(20)
    ours = Own(fused=False)
    with ours.attach(max_norm=0.5):
        ours.run(20, clip=None)
    ours, bare = dict(ours.model.named_parameters()), dict(bare.model.named_parameters())
    for name in bare.keys() - {"0.bias"}:  # batch norm takes it out again: its gradient is noise
        torch.testing.assert_close(ours[name], bare[name])


def test_the_row_has_the_norms_before_and_after_the_loop_s_own_clip():
    loop = Own()
    with loop.attach():
        loop.step(clip=0.01, give=True)
        loop.step(clip=0.01)
    rows = Journal(Path(os.environ["VITALS_SHM"]))
    before, after = rows.steps("grad_norm"), rows.steps("grad_norm_clipped")
    assert [0] == list(before)  # unknown in the step whose norm was not given
    assert before[0] > 0.1
    assert pytest.approx({0: 0.01, 1: 0.01}, rel=1e-3) == after


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loop_that_gives_its_batches_has_the_state_asked_and_trains_as_without_us(accumulate):
    def train(loop):
        readings = []
        for step in range(45):
            for _ in range(accumulate):
                x = torch.randn(32, 4, generator=loop.data)
                if loop.attached is not None:
                    loop.attached.keep_batch(x, loss_of(loop.model))
                loss = loss_of(loop.model)(x)
                (loss / accumulate).backward()
                if loop.attached is not None:
                    loop.attached.loss(loss)
            loop.optimizer.step()
            loop.scheduler.step()
            loop.optimizer.zero_grad()
            if loop.attached is not None and step == 40:
                readings.append(probe_of(loop.attached).evaluate(ask(step)))
        loop.rng = torch.get_rng_state()
        return readings

    bare, ours = Own(), Own()
    torch.manual_seed(5)
    train(bare)
    torch.manual_seed(5)
    with ours.attach() as attached:
        (reading,) = train(ours)
        assert probe_of(attached).is_on
    assert_same(bare.state(), ours.state())
    assert 3 <= reading.num_batches
    assert "no_probe" not in [e.code for e in ours.said if isinstance(e, Note)]


def loss_of(model):
    return lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean()


def norms_of(loop):
    return [parameter.grad.norm().item() for parameter in loop.model.parameters()]


@pytest.mark.parametrize("fused", [True, False])
def test_a_loop_judged_before_its_clip_trains_bit_for_bit_as_without_us(fused):
    bare = Own(fused=fused).run(20)
    ours = Own(fused=fused)
    with ours.attach() as attached:
        ours.run(20, before=True)
    assert_same(bare.state(), ours.state())
    assert attached.swallowed_errors == {}
    assert [e.code for e in ours.said if isinstance(e, Note)] == ["no_probe"]


def test_judged_before_the_clip_the_norms_are_the_true_ones_and_the_layers_too():
    loop, true = Own(), []
    with loop.attach():
        real = loop.attached.before_clip
        loop.attached.before_clip = lambda clip: (true.append(norms_of(loop)), real(clip))
        loop.step(clip=0.01, before=True)
    rows = Journal(Path(os.environ["VITALS_SHM"]))
    assert pytest.approx({0: math.hypot(*true[0])}) == rows.steps("grad_norm")
    assert pytest.approx({0: 0.01}) == rows.steps("grad_norm_clipped")
    layers = {layer: norm for (_, layer), norm in rows.layers("grad_norm").items()}
    assert pytest.approx(math.hypot(*layers.values())) == math.hypot(*true[0])


@pytest.mark.parametrize(("earlier", "expected"), [((), [104]), ((40, 47), [])])
def test_a_gradient_that_becomes_zero_is_written_at_once_unless_zeros_come_and_go(
    earlier, expected
):
    loop, frozen = Own(), {104, *earlier}
    with loop.attach():
        parameter = next(iter(loop.model.parameters()))
        parameter.register_hook(lambda g: g * 0 if loop.attached.step_index in frozen else g)
        for _ in range(106):
            loop.step(before=True)
    rows = Journal(Path(os.environ["VITALS_SHM"])).layers("grad_norm")
    assert expected == sorted({step for step, _ in rows if step % 10 and step > 103})


def test_the_layers_of_an_unusual_norm_are_written_before_anything_is_reported():
    loop = Own()
    with loop.attach():
        for step in range(30):
            loop.step(gradient=100.0 if step == 25 else None, before=True)
    found = Journal(Path(os.environ["VITALS_SHM"]))
    assert {0, 10, 20, 25} == {step for step, _ in found.layers("grad_norm")}
    assert not [e for e in found.events if isinstance(e, FindingRaised)]


def test_a_clip_of_unknown_size_leaves_the_norm_after_it_missing():
    loop = Own()
    with loop.attach():
        loop.forward()
        loop.attached.before_clip()
        loop.optimizer.step()
    rows = Journal(Path(os.environ["VITALS_SHM"]))
    assert [0] == list(rows.steps("grad_norm"))
    assert {} == rows.steps("grad_norm_clipped")


def test_after_a_clip_of_the_loop_s_own_the_layers_norms_are_missing():
    loop = Own()
    with loop.attach():
        loop.step(clip=0.01)
    assert {} == Journal(Path(os.environ["VITALS_SHM"])).layers("grad_norm")


def test_1e30_is_a_finite_outlier_where_the_clip_alone_would_make_it_infinite():
    loop = Own()
    with loop.attach():
        for step in range(65):
            loop.step(gradient=1e30 if step == 60 else None, before=True)
    verdicts = Journal(Path(os.environ["VITALS_SHM"])).steps("verdict")
    assert NORM_OUTLIER | CLIPS | WITHHELD == verdicts[60]


def test_a_judgement_that_no_step_followed_is_made_anew():
    loop = Own()
    with loop.attach() as attached:
        loop.forward()
        attached.before_clip(0.5)  # the loop thinks better of it
        loop.optimizer.zero_grad()
        loop.step(gradient=NAN, before=True)
        assert 1 == attached.step_index
    assert 1 == loop.skips()


def test_the_clip_between_judgement_and_step_is_not_counted_as_the_monitor_s_time():
    loop = Own()
    with loop.attach() as attached:
        loop.step(before=True)
        loop.forward()
        attached.before_clip(0.5)
        # A clip of 1,000 seconds.
        with mock.patch.object(SystemClock, "monotonic_ns", lambda _: time.monotonic_ns() + 10**12):
            loop.optimizer.step()
    times = Journal(Path(os.environ["VITALS_SHM"]))
    assert times.steps("optimizer_seconds")[1] > 1000
    assert times.steps("monitor_seconds")[0] < 100


def test_a_loss_that_is_nan_is_skipped_although_its_gradients_are_finite():
    loop = Own()
    with loop.attach() as attached:
        loop.step()
        before = loop.parameters()
        attached.loss(NAN)
        loop.step()
        assert all(map(torch.equal, before, loop.parameters()))
        attached.loss(1.0)
        loop.step()
        assert not all(map(torch.equal, before, loop.parameters()))


@pytest.mark.parametrize("given", ["1.0", torch.ones(2), None])
@pytest.mark.parametrize("fused", [True, False])
def test_a_norm_that_is_no_number_does_not_take_the_guard_away(given, fused):
    loop = Own(fused=fused)
    with loop.attach() as attached:
        for gradient in (None, NAN):
            attached.grad_norm(given)
            loop.step(gradient=gradient, clip=None)
    assert all(torch.isfinite(p).all() for p in loop.parameters())
    assert attached.swallowed_errors == {"grad_norm": 2}


@pytest.mark.parametrize(("given", "skips"), [(3.0, 0), (INF, 1)])
def test_gradients_that_nothing_is_left_of_are_judged_by_the_given_norm(given, skips):
    loop = Own()
    with loop.attach() as attached:
        for empty in (False, True):
            loop.forward()
            attached.grad_norm(given if empty else 1.0)
            for param in loop.model.parameters():
                param.grad.mul_(0.0 if empty else 1.0)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert loop.skips() == skips


def test_observing_records_and_lets_everything_pass():
    loop = Own()
    with loop.attach(mode="observe"):
        loop.step()
        loop.step(gradient=NAN)
    assert torch.isnan(loop.model[0].weight).any()


def test_off_touches_nothing_but_clips_where_the_loop_left_that_to_us(monkeypatch, tmp_path):
    monkeypatch.setenv("VITALS_MODE", "off")
    bare = Own().run(5)
    for options, clip in [({}, 0.5), ({"max_norm": 0.5}, None)]:
        ours = Own()
        with trainer_hooks.attach(ours.model, ours.optimizer, **options) as attached:
            attached.loss(1.0)
            attached.grad_norm(1.0)
            attached.keep_batch(torch.ones(1), loss_of(ours.model))
            ours.run(5, clip=clip)
        assert_same(bare.state(), ours.state())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"max_norm": 0.0}, "max_norm"), ({"max_norm": NAN}, "max_norm")],
)
def test_what_cannot_be_is_refused(options, words):
    loop = Own()
    with pytest.raises(UsageError, match=words):
        loop.attach(**options)
    assert "step" not in vars(Loop().optimizer).keys() - vars(loop.optimizer).keys()


def test_a_closure_is_refused():
    loop = Own()
    with loop.attach():
        loop.forward()
        with pytest.raises(UsageError, match="closure"):
            loop.optimizer.step(lambda: 1.0)
        loop.optimizer.step(closure=None)


def test_no_gradient_at_the_first_step_is_an_error():
    loop = Own()
    with loop.attach(), pytest.raises(UsageError, match="gradient"):
        loop.optimizer.step()


@pytest.mark.parametrize("schedule", ["before", "after"])
def test_closing_gives_the_optimizer_back_whoever_wraps_it_too(schedule):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if schedule == "before":
        torch.optim.lr_scheduler.StepLR(optimizer, 5)
    before = vars(optimizer).get("step")
    attached = trainer_hooks.attach(model, optimizer)
    if schedule == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if schedule == "after":
            scheduler.step()  # warns where it does not find its mark
    attached.close()
    assert attached.step_index == 2
    if schedule == "before":
        assert vars(optimizer).get("step") is before
    assert list(optimizer._optimizer_step_pre_hooks) == []
    model.weight.grad.fill_(NAN)
    optimizer.step()
    assert torch.isnan(model.weight).all()
    assert attached.step_index == 2


def test_it_stays_without_a_name_and_ends_with_its_optimizer():
    loop = Own()
    trainer_hooks.attach(loop.model, loop.optimizer)
    gc.collect()
    loop.step(gradient=NAN)
    assert all(torch.isfinite(p).all() for p in loop.model.parameters())
    del loop
    gc.collect()
    assert list(shutdown.open_monitors) == []


def test_an_optimizer_state_loaded_later_keeps_the_verdict_on_the_device():
    loop = Own()
    with loop.attach() as attached:
        loop.step()
        loop.optimizer.load_state_dict(loop.optimizer.state_dict())
        assert not device_of(attached).engine.reads_verdict
        loop.step(gradient=NAN)
    assert all(torch.isfinite(p).all() for p in loop.model.parameters())


@pytest.mark.usefixtures("no_read_is_free")
@pytest.mark.parametrize("how", ["given", "owned", "unknown"])
def test_a_fused_step_reads_nothing_of_the_present_step(monkeypatch, how):
    loop = Own()
    options = {"max_norm": 0.5} if how == "owned" else {}
    with loop.attach(**options) as attached:
        for step in range(45):
            loss = loop.forward()
            if step == 30:
                loop.model[0].weight.grad[0, 0] = NAN
            norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
            with Reads() as reads, monkeypatch.context() as patched:
                for name in ("__bool__", "__float__", "__int__", "item", "cpu", "numpy"):
                    patched.setattr(torch.Tensor, name, lambda *_, n=name: pytest.fail(n))
                attached.loss(loss, weight=torch.tensor(3))
                if how == "given":
                    attached.grad_norm(norm)
                loop.optimizer.step()
            loop.optimizer.zero_grad()
            assert reads.seen == []
    assert attached.swallowed_errors == {}
    assert attached.step_index == 45


def test_accumulated_losses_weigh_as_they_were_given():
    loop, losses = Own(), []
    with loop.attach() as attached:
        push = device_of(attached).readback.push
        device_of(attached).readback.push = lambda n, h: (
            losses.append(float(n[device_of(attached).packer.layout.size + 1])),
            losses.append(ReducedNumbers(device_of(attached).packer.layout, list(n)).losses()),
            push(n, h),
        )[2]
        attached.loss(1.0, 3)
        attached.loss(5.0, 1)
        loop.step()
        loop.step()
    assert losses[:2] == [2.0, [2.0]]
    assert losses[3] == [None]  # none was given
    assert tokens_of(attached) == 4


def test_commands_work_in_a_loop_that_steps_by_itself(monkeypatch):
    monkeypatch.setattr("trainer_hooks.features.commands.ROUND_SECONDS", 0.01)
    loop = Own()

    def acks():
        return [event.ack for event in loop.said if isinstance(event, CommandAcknowledged)]

    with loop.attach(mode="guard") as attached:
        loop.run(30)

        def resume():
            until(lambda: is_paused(attached))
            send_command(attached, action="resume")

        person = threading.Thread(target=resume)
        person.start()
        send_command(attached, action="pause")
        loop.run(4)
        person.join()
        send_command(attached, action="skip", argument=2.0)
        loop.run(6)
        send_command(attached, action="profile", argument=2.0)
        loop.run(6)
        until(lambda: [*(run_directory(attached) / "profiles").glob("step*.gz")])
    assert ["done"] * 4 == [ack.status for ack in acks()]
    assert 2 == loop.skips()
