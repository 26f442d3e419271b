"""The probe on one process: what it leaves as it was, what it reads, and when it is off."""

import copy
import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import trainer_hooks
from tests.support.inside import events_of, probe_of
from tests.support.watched import own_place  # noqa: F401
from tests.trainer_hooks.probing import MoCo, ask, batches, notes, seeded, trained
from trainer_hooks.probe.bank import BatchBank
from trainer_hooks.probe.isolated_forward import isolated_forward
from trainvitals.errors import UsageError
from trainvitals.policy.evidence import NONFINITE_GRADIENT
from trainvitals.records import DecisionMade, StateRead

NAN = float("nan")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("accumulate", [1, 2, 6])
def test_a_training_is_bit_for_bit_the_same_with_and_without_probing(accumulate):
    keywords = {"accumulate": accumulate, "count": 45 * accumulate}
    bare, _, _ = trained(seeded(MoCo), probe=False, **keywords)
    probed, readings, is_on = trained(seeded(MoCo), probe=True, **keywords)
    assert is_on
    assert max(reading.num_batches for reading in readings) >= 8
    assert bare == probed
    assert {} == probed["faults"]


# --------------------------------------------------------------------------- a plain regression


class Regression:
    """A loop without noise of its own: a linear net, one batch a step, hence a tight rehearsal."""

    def __init__(self, *, make=None, steps=60, dropout=0.0, **watch):
        torch.manual_seed(0)
        self.model = (
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))
            if make is None
            else make()
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.steps = steps
        made = torch.Generator().manual_seed(1)
        self.data = [torch.randn(32, 4, generator=made) for _ in range(steps)]
        self.monitor = trainer_hooks.watch(self.model, self.optimizer, **watch)
        self.probe = probe_of(self.monitor)
        self.told = notes(self.monitor)

    def loss(self, x):
        return (self.model(x) - x.sum(1, keepdim=True)).square().mean()

    def run(self, probe="right", before=lambda step: None, after=lambda step: None):
        probe = self.loss if probe == "right" else probe
        with self.monitor:
            for x in self.monitor.batches(self.data, probe=probe):
                before(self.monitor.step_index)
                loss = self.loss(x)
                loss.backward()
                self.monitor.step(loss)
                after(self.monitor.step_index)
            self.is_on = self.probe.is_on
            self.kept = self.probe.bank.num_batches()
        return self

    def said(self, code):
        return [note.text for note in self.told if note.code == code]


def test_a_gradient_that_is_not_finite_is_read_though_the_loss_is_as_before():
    loop, readings, broken = Regression(), [], []

    def probe(x):
        loss = loop.loss(x)
        return loss + (loop.model[0].weight.sum() * 0.0).sqrt() if broken else loss

    def after(step):
        for is_broken in (False, True) if step == 50 else ():
            broken[:] = [is_broken] * is_broken
            readings.append(loop.probe.evaluate(ask(50)))

    loop.run(probe, after=after)
    sound, damaged = readings
    assert sound.now == damaged.now
    assert (True, False) == (sound.has_gradient, damaged.has_gradient)
    assert math.inf == damaged.ratio(0.01) > (sound.ratio(0.01) or 0.0)
    assert damaged.detail.startswith(f"{NONFINITE_GRADIENT} (rank 0)")
    assert {} == dict(loop.monitor.swallowed_errors)


class Gated(nn.Module):
    """Adds a little of a hand-written sigmoid: its exp overflows, and the result stays finite."""

    def __init__(self):
        super().__init__()
        self.body, self.gate, self.head = nn.Linear(4, 16), nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)) + 0.01 / (1 + torch.exp(-self.gate(x))))


@pytest.mark.parametrize("mode", ["guard", "heal"])
def test_a_weight_that_makes_only_the_gradients_nan_is_damage_and_is_rolled_back(mode):
    def before(step):
        if step == 80 and not damaged:
            damaged.append(loop.model.gate.weight.detach()[0, 0].mul_(2.0**40).item())

    damaged, loop = [], Regression(make=Gated, steps=100, mode=mode, checkpoints=mode == "heal")
    events = events_of(loop.monitor)
    loop.run(before=before)
    assert 1e10 < abs(damaged[0])
    (read,) = [event for event in events if isinstance(event, StateRead)]
    assert ("nonfinite", 80, "state") == (read.trigger, read.onset_step, read.verdict)
    assert 0 < read.now < 2 * read.then
    texts = [
        getattr(e, of).reason for e in events for of in ("finding", "decision") if hasattr(e, of)
    ]
    assert any(NONFINITE_GRADIENT in text for text in texts)
    assert not any("healthy" in text for text in texts)
    taken = [event.decision.action for event in events if isinstance(event, DecisionMade)]
    last = loop.loss(loop.data[-1])
    last.backward()
    is_trainable = all(p.grad.isfinite().all() for p in loop.model.parameters())
    if mode == "guard":
        assert (["skip_step"] * 20, False) == (taken, is_trainable)
    else:
        assert (["skip_step", "skip_step", "rollback"], True) == (taken, is_trainable)


def test_it_is_told_once_that_the_probe_is_on_and_how_much_it_keeps():
    loop = Regression().run()
    assert loop.is_on
    (text,) = loop.said("probe_bank")
    assert "MiB of at most" in text
    assert [] == loop.said("probe_off") == loop.said("no_probe")


def test_a_reading_compares_batches_of_16_to_40_steps_before_with_their_loss_then():
    readings = []

    def after(step):
        if step == 55:
            readings.append(loop.probe.evaluate(ask(50)))

    loop = Regression()
    loop.run(after=after)
    (reading,) = readings
    assert 8 == reading.num_batches  # steps 12, 15, ... 33
    assert 0 < reading.now < reading.then
    assert reading.older is None
    assert "steps 12 to 33" == reading.detail


def test_older_batches_are_in_the_record_beside_the_ones_that_decide():
    readings = []

    def after(step):
        if step == 300:
            readings.append(loop.probe.evaluate(ask(298)))

    loop = Regression(steps=300)
    loop.run(after=after)
    (reading,) = readings
    assert 9 == reading.num_batches
    assert reading.older is not None
    assert reading.detail.startswith("steps 258 to 282; with 0, 234 it is 1.")


def test_damage_of_the_state_is_read_as_such_and_a_state_of_nan_too():
    ratios = []

    def after(step):
        if step == 50:
            ratios.append(loop.probe.evaluate(ask(50)).ratio(0.01))
            for factor in (10.0, NAN):
                kept = [p.detach().clone() for p in loop.model.parameters()]
                with torch.no_grad():
                    loop.model[0].weight.mul_(factor)
                    loop.model[3].weight.mul_(factor)
                ratios.append(loop.probe.evaluate(ask(50)).ratio(0.01))
                with torch.no_grad():
                    for param, value in zip(loop.model.parameters(), kept, strict=True):
                        param.copy_(value)

    loop = Regression()
    loop.run(after=after)
    assert ratios[0] < 1.0
    assert ratios[1] > 2.0
    assert ratios[2] == float("inf")


def test_what_the_loop_does_to_its_batch_in_place_is_not_in_the_kept_copy():
    def steps(spoil):
        loop, numbers = Regression(), []
        with loop.monitor as monitor:
            for x in monitor.batches([x.clone() for x in loop.data], probe=loop.loss):
                loss = loop.loss(x)
                loss.backward()
                if spoil:
                    x.fill_(1e3)
                monitor.step(loss)
                if monitor.step_index == 55:
                    numbers.append(loop.probe.evaluate(ask(50)))
        return numbers

    assert steps(spoil=False) == steps(spoil=True)


def test_what_loss_of_does_to_its_batch_does_not_last():
    def spoils(batch):
        loss = loop.loss(batch["x"])
        batch.pop("x").fill_(1e3)
        return loss

    readings, loop = [], Regression()
    with loop.monitor as monitor:
        for batch in monitor.batches([{"x": x} for x in loop.data], probe=spoils):
            loss = loop.loss(batch["x"])
            loss.backward()
            monitor.step(loss)
            if monitor.step_index == 50:
                readings += [loop.probe.evaluate(ask(50)) for _ in range(2)]
    assert readings[0].num_batches == 8
    assert readings[0] == readings[1]


# ------------------------------------------------------------------------ rehearsed, or off


def test_wrong_functions_are_found_out_at_the_rehearsal():
    def sum_of_losses(x):
        return (loop.model(x) - x.sum(1, keepdim=True)).square().sum()

    def other_loss(x):
        return (loop.model(x) - x.sum(1, keepdim=True)).abs().mean().sqrt()

    wrong = {
        "sum": sum_of_losses,
        "other": other_loss,
        "constant": lambda x: 1.0,
        "zero": lambda x: torch.zeros(()),
        "sign": lambda x: -loop.loss(x),
        "doubled": lambda x: 2 * loop.loss(x),
        "halved": lambda x: loop.loss(x) / 2,
    }
    for name, function in wrong.items():
        loop = Regression(steps=12)
        loop.run(probe=function)
        assert not loop.is_on, name
        (text,) = loop.said("probe_off")
        assert "where step" in text, name
        assert loop.monitor.swallowed_errors == {}


def test_the_loss_of_the_loop_s_own_present_batch_is_found_out_although_it_fits():
    present = {}

    def of_what_the_loop_has(_batch):
        return loop.loss(present["x"])

    loop = Regression(steps=450)
    with loop.monitor as monitor:
        for x in monitor.batches(loop.data, probe=of_what_the_loop_has):
            present["x"] = x
            loss = loop.loss(x)
            loss.backward()
            monitor.step(loss)
        assert not loop.probe.is_on
        assert loop.said("probe_off")


def test_the_same_batch_again_and_again_is_no_reason_to_switch_off():
    loop = Regression()
    loop.data = [loop.data[0]] * 60
    assert loop.run().is_on


def test_dropout_and_a_loss_without_it_are_within_the_noise():
    def without_dropout(x):
        loop.model.eval()
        return loop.loss(x)

    for probe in ("right", without_dropout):
        loop = Regression(dropout=0.2)
        assert loop.run(probe=probe).is_on
        assert all(module.training for module in loop.model.modules())


def test_a_function_that_leaves_gradients_is_switched_off_and_nothing_stays():
    def backward(x):
        with torch.enable_grad():
            loss = loop.loss(x)
            loss.backward()
        return loss.detach()

    def with_graph(x):
        with torch.enable_grad():
            return loop.loss(x)

    def left_on(x):
        torch.set_grad_enabled(True)
        return loop.loss(x).detach()

    def frozen(x):
        loop.model[0].weight.requires_grad_(False)
        return loop.loss(x)

    plain = Regression().run(probe=None)
    for leaves in (backward, with_graph, left_on, frozen):
        loop = Regression()
        loop.run(probe=leaves)
        (text,) = loop.said("probe_off")
        assert "gradients" in text or "requires_grad" in text
        assert torch.is_grad_enabled()
        assert all(p.requires_grad for p in loop.model.parameters())
        assert_same_weights(plain, loop)


def test_a_function_that_writes_to_what_is_trained_is_switched_off_at_its_first_call():
    def scales(x):
        loop.model[0].weight.mul_(1.0001)
        return loop.loss(x)

    loop = Regression(steps=12)
    loop.run(probe=scales)
    (text,) = loop.said("probe_off")
    assert "loss_of changed trained parameters" in text


def test_a_function_that_raises_or_gives_no_number_is_switched_off_in_words():
    def raises(_x):
        raise KeyError("labels")

    texts = {
        raises: "raised KeyError: 'labels'",
        (lambda x: (loop.loss(x), None)): "returned a tuple; it must be one number",
        (lambda x: x): "returned a tensor of shape (32, 4); it must be one number",
    }
    for function, expected in texts.items():
        loop = Regression(steps=12)
        loop.run(probe=function)
        (text,) = loop.said("probe_off")
        assert expected in text


def test_a_probe_that_fails_later_is_off_and_the_training_goes_on():
    calls = itertools.count()

    def fails(x):
        if next(calls) > 6:
            raise OSError("no such file")
        return loop.loss(x)

    readings = []

    def after(step):
        if step in (50, 51):
            readings.append(loop.probe.evaluate(ask(50)))

    loop = Regression()
    loop.run(probe=fails, after=after)
    assert [0, 0] == [reading.num_batches for reading in readings]
    assert "off" in readings[1].detail
    (text,) = loop.said("probe_off")
    assert "loss_of raised OSError: no such file" in text


def test_a_probe_that_draws_from_every_generator_changes_none():
    def draws(x):
        random.random(), np.random.rand(), torch.rand(1)
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        return loop.loss(x)

    def noise(after):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        after()
        return random.random(), np.random.rand(), torch.rand(1).item()

    loop = Regression()
    probed = noise(lambda: loop.run(probe=draws))
    assert loop.is_on
    loop = Regression()
    assert noise(lambda: loop.run(probe=None)) == probed


def test_a_loop_that_ends_asks_nothing_any_more_and_lets_go_of_its_batches():
    loop = Regression().run()
    loop.monitor.close()
    assert 0 == loop.probe.evaluate(ask(50)).num_batches
    assert 0 == loop.probe.bank.num_bytes


def test_a_probe_that_is_no_function_is_refused():
    loop = Regression()
    with pytest.raises(UsageError, match="probe is a str; it must be a function"):
        loop.run(probe="loss")


# ------------------------------------------------------------------------------------- the bank


def test_only_clean_steps_are_kept_and_a_rollback_forgets_what_came_after():
    def before(step):
        if step == 30:
            loop.data[step].fill_(NAN)

    kept = {}

    def after(step):
        kept[step] = set(loop.probe.bank.num_batches())
        if step == 50:
            loop.probe.rolled_back(40)
            kept["back"] = set(loop.probe.bank.num_batches())

    loop = Regression()
    loop.data = [x.clone() for x in loop.data]
    loop.data[30] = torch.full((32, 4), NAN)
    loop.run(after=after)
    assert {*range(0, 30, 3), *range(33, 49, 3)} == kept[50]
    assert {*range(0, 30, 3), 33, 36, 39} == kept["back"]


def test_a_step_of_which_something_is_only_told_is_kept_and_one_with_an_outlier_not():
    def before(step):
        if step == 0:
            loop.optimizer.param_groups[0]["lr"] = 0.0005
        if step == 30:  # a jump of the rate: told, and no fault of the batch
            loop.optimizer.param_groups[0]["lr"] = 0.005

    loop = Regression(steps=63)
    loop.data[57] = 1e3 * loop.data[57]
    found = events_of(loop.monitor, keep=lambda event, **_: getattr(event, "finding", None))
    loop.run(before=before)
    told = {(f.step, f.kind, f.level) for f in found if f is not None}
    assert {(30, "lr_jump", "advisory"), (57, "spike", "actionable")} <= told
    assert 30 in loop.kept
    assert 57 not in loop.kept


def test_the_bank_holds_few_old_batches_and_always_those_before_a_long_trouble():
    loop = Regression(steps=900)
    loop.run()
    steps = sorted(loop.kept)
    assert len(steps) <= 29 + 3 + 4
    onset = 899 - 32 - 8
    assert 8 <= sum(onset - 40 <= step <= onset - 16 for step in steps)
    assert any(onset - 128 <= step <= onset - 64 for step in steps)
    assert any(onset - 384 <= step <= onset - 256 for step in steps)


@pytest.mark.parametrize(
    ("kib", "num_near"), [(64, 8), (14, 4)], ids=["all fit", "every sixth step"]
)
def test_the_bank_keeps_to_its_bytes_and_keeps_fewer_where_they_are_short(kib, num_near):
    held = []

    def after(step):
        held.append(loop.probe.bank.num_bytes)
        if step == 150:
            held.append(0)
            near.append(loop.probe.evaluate(ask(148)).num_batches)

    near, loop = [], Regression(steps=160)
    loop.probe.bank = BatchBank(kib << 10)  # a batch has half a KiB
    loop.run(after=after)
    assert loop.is_on
    assert max(held) <= kib << 10
    assert num_near <= near[0]


def test_where_not_even_the_fewest_fit_it_is_off_and_told():
    loop = Regression(steps=60)
    loop.probe.bank = BatchBank(3 << 10)
    loop.run()
    assert not loop.is_on
    assert 0 == loop.probe.bank.num_bytes
    assert ["the probe is off: the batches do not fit into 0.00293 MiB"] == loop.said("probe_off")


def test_of_an_accumulated_step_at_most_four_batches_are_kept():
    loop = Regression(steps=60)
    with loop.monitor as monitor:
        for number, x in enumerate(monitor.batches(loop.data, probe=loop.loss)):
            loss = loop.loss(x)
            loss.backward()
            monitor.micro(loss)
            if number % 6 == 5:
                monitor.step()
        assert {0: 4, 3: 4, 6: 4} == loop.probe.bank.num_batches()


def test_batches_of_every_kind_are_copied_whole():
    from collections import namedtuple

    from trainer_hooks.probe.bank import copy_to_device, copy_to_host, same_content

    class Own:
        def __init__(self):
            self.x, self.name = torch.arange(3), "a"

    Pair = namedtuple("Pair", "left right")
    x = torch.arange(4.0)
    batch = {
        "x": x,
        "again": x,
        "array": np.arange(3),
        "words": ["a", "b"],
        "pair": Pair(torch.ones(2), (torch.zeros(1), 3)),
        "own": Own(),
        "none": None,
    }
    made, size = copy_to_host(batch, 1 << 20)
    again = copy_to_device(made)
    assert same_content(batch, made)
    assert size == 16 + 24 + 8 + 4 + 24
    assert again["x"] is again["again"]
    assert again["x"] is not x
    assert isinstance(again["pair"], Pair)
    assert again["words"] == ["a", "b"]
    x.zero_()
    batch["own"].x.zero_()
    batch["array"][:] = 0
    assert [0, 1, 2, 3] == again["x"].tolist()
    assert [0, 1, 2] == again["own"].x.tolist() == made["own"].x.tolist() == made["array"].tolist()
    assert not same_content(batch, made)


# ---------------------------------------------------------------------------------- no trace


def test_what_a_forward_writes_is_put_back_in_its_place():
    model = seeded(MoCo)
    optimizer = torch.optim.AdamW(model.encoder.parameters())
    model(batches()[0]["x"]).backward()
    model.eval()
    model.encoder.train()
    kept = copy.deepcopy(model.state_dict())
    grads = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in grads]
    tensors = [*model.parameters(), *model.buffers()]
    modes = [module.training for module in model.modules()]
    with isolated_forward(model, [optimizer]) as check:
        model.train()
        model(batches()[1]["x"])
        model.momentum[0].weight.data = torch.zeros(8, 6)
        model.queue = torch.zeros(3)
        model.cache = torch.zeros(3)
        check()
    assert all(
        a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True)
    )
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    assert all(a is p.grad for a, p in zip(grads, model.parameters(), strict=True))
    assert all(a is None or torch.equal(a, b) for a, b in zip(grads, values, strict=True))
    assert modes == [module.training for module in model.modules()]
    assert 1 == model.calls
    assert not hasattr(model, "cache")


def test_no_cast_of_a_forward_without_gradients_is_left_for_the_loop():
    loop, loss, read = Regression(steps=30), None, []
    with loop.monitor as monitor:
        for x in monitor.batches(loop.data, probe=lambda x: loop.loss(x)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                if loss is not None:  # so what the step leaves in the cache is what forward finds
                    monitor.step(loss)
                    read.append(loop.probe.evaluate(ask(monitor.step_index)).num_batches)
                loss = loop.loss(x)
            loss.backward()
            assert loop.model[0].weight.grad is not None
    assert max(read) > 3


# -------------------------------------------------------------------------------- no probe at all


def test_a_loop_without_a_probe_is_told_once_the_line_that_would_give_one():
    loop = Regression(steps=20).run(probe=None)
    (text,) = loop.said("no_probe")
    assert "probe=" in text
    assert [] == Regression(steps=20, mode="observe").run(probe=None).said("no_probe")


def assert_same_weights(one, other):
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
