"""One process: what a hostile loop does to the monitor, and what must hold all the same."""

import copy
import gc

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.support.inside import acks_of, device_of, events_of, refs_of, run_of, tokens_of
from tests.support.watched import Loop, Reads, assert_same, own_place, send_command  # noqa: F401
from trainvitals.errors import UsageError

NAN, INF = float("nan"), float("inf")


class Amp(Loop):
    """The loop under a gradient scaler on the CPU."""

    def __init__(self, *, fused=True, scale=2.0**10, **watch):
        super().__init__(fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        self.monitor = trainer_hooks.watch(
            self.model, self.optimizer, self.scheduler, scaler=self.scaler, **watch
        )

    def forward(self, scale=1.0):
        x = torch.randn(32, 4, generator=self.data)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.model(x)
        loss = (out.float() - x.sum(1, keepdim=True)).square().mean() * scale
        self.scaler.scale(loss).backward()
        return loss


@pytest.mark.parametrize("mode", ["observe", "guard"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_s_overflow_skips_in_every_mode_and_is_no_finding(mode, fused):
    loop = Amp(fused=fused, mode=mode)
    with loop.monitor as monitor:
        for _ in range(3):
            monitor.step(loop.forward())
        before = loop.state()
        loss = loop.forward()
        loop.model[0].weight.grad[0, 0] = INF
        monitor.step(loss)
        after = loop.state()
        assert loop.scaler.get_scale() == 2.0**9
        outcomes = [monitor.step(loop.forward()) for _ in range(3)]
    assert_same(before["optimizer"], after["optimizer"])
    assert torch.equal(before["model"]["0.weight"], after["model"]["0.weight"])
    assert not torch.equal(after["model"]["0.weight"], loop.model[0].weight)
    assert [o.decision for o in outcomes] == [None] * 3
    assert monitor.swallowed_errors == {}


def test_a_nan_loss_under_a_scaler_is_a_finding():
    loop = Amp(mode="guard")
    with loop.monitor as monitor:
        for _ in range(3):
            monitor.step(loop.forward())
        monitor.step(loop.forward(NAN))
        outcome = monitor.step(loop.forward())
    assert (outcome.decision.action, outcome.decision.cause) == ("skip_step", "nonfinite_loss")


def test_a_step_without_gradients_under_a_scaler_is_unknown_and_no_error():
    loop = Amp(mode="guard")
    with loop.monitor as monitor:
        monitor.step(loop.forward())
        monitor.step(torch.tensor(1.0))
        monitor.step(loop.forward())
    assert monitor.swallowed_errors == {}


@pytest.mark.parametrize("second_fused", [True, False])
def test_two_optimizers_under_one_scaler_skip_together(second_fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizers = [
        torch.optim.AdamW(model[0].parameters(), lr=0.1, fused=True),
        torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9, fused=second_fused),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with trainer_hooks.watch(model, optimizers, scaler=scaler) as monitor:
        for step in range(4):
            before = copy.deepcopy(model.state_dict())
            loss = model(torch.ones(2, 4)).square().mean()
            scaler.scale(loss).backward()
            if step == 2:
                model[1].bias.grad.fill_(INF)
            monitor.step(loss)
            assert torch.equal(before["0.weight"], model[0].weight) == (step == 2)
            assert torch.equal(before["1.weight"], model[1].weight) == (step == 2)
    assert scaler.get_scale() == 4.0
    assert monitor.swallowed_errors == {}


@pytest.mark.parametrize("weight", [NAN, torch.tensor(NAN), INF])
def test_a_weight_that_is_no_number_does_not_stop_the_loop(weight):
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        for _ in range(4):
            monitor.step(loop.forward(), weight=weight)
    assert monitor.step_index == 4


def test_micro_batches_weigh_and_take_numbers_and_do_not_share_memory():
    loop = Loop(mode="guard")
    tokens = torch.tensor(3)
    seen = []
    with loop.monitor as monitor:
        push = device_of(monitor).readback.push
        device_of(monitor).readback.push = lambda n, h: (seen.append(float(n[-3])), push(n, h))[1]
        for _ in range(3):
            loop.forward()
            monitor.micro(torch.tensor(1.0), tokens)
            tokens += 1  # the loop's own tensor
            tokens -= 1
            monitor.micro(5.0, 1)
            monitor.step()
    assert seen == [2.0, 2.0, 2.0]


def test_micro_batches_without_weights_are_not_counted_as_tokens():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        for _ in range(3):
            monitor.micro(loop.forward())
            monitor.step()
        assert tokens_of(monitor) == 0


def test_sparse_gradients_are_clipped_as_dense_ones_are():
    torch.manual_seed(0)
    tables = [nn.Embedding(6, 3, sparse=sparse) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        with trainer_hooks.watch(table, optimizer) as monitor:
            loss = table(torch.tensor([1, 1, 3])).square().sum() * 100
            loss.backward()
            monitor.step(loss, max_norm=0.5)
        assert monitor.swallowed_errors == {}
    assert torch.allclose(tables[0].weight, tables[1].weight)


def test_complex_empty_and_scalar_parameters_are_measured():
    model = nn.Module()
    model.wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    model.none = nn.Parameter(torch.ones(0, 4))
    model.scale = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with trainer_hooks.watch(model, optimizer) as monitor:
        for step in range(4):
            before = model.wave.detach().clone()
            loss = (model.wave.abs().square().sum() + model.none.sum()) * model.scale
            (loss * (NAN if step == 2 else 1.0)).backward()
            monitor.step(loss, max_norm=1.0)
            assert torch.equal(before, model.wave) == (step == 2)
    assert monitor.swallowed_errors == {}


class Centre(nn.Module):
    """Replaces its buffer in each forward, as DINO's centre does, and holds an expanded one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("wide", torch.ones(1).expand(5))

    def forward(self, x):
        out = self.inner(x)
        self.centre = self.centre * 0.9 + out.detach().mean(0) * 0.1
        return out - self.centre


@pytest.mark.parametrize("fused", [True, False])
def test_a_buffer_that_forward_replaces_is_put_back_too(fused):
    model = Centre()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    with trainer_hooks.watch(model, optimizer) as monitor:
        for x in (1.0, NAN, 2.0):
            before = copy.deepcopy(model.state_dict())
            loss = model(torch.full((3, 2), x)).square().mean()
            loss.backward()
            monitor.step(loss)
            if x != x:
                assert_same(before, model.state_dict())
    assert torch.isfinite(model.centre).all()


def test_plateau_schedulers_are_refused_with_a_way_out():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(UsageError, match="ReduceLROnPlateau"):
        trainer_hooks.watch(model, optimizer, scheduler)


def test_a_loaded_state_that_turns_fused_off_takes_the_host_path():
    old = Loop(fused=False)
    for _ in range(2):
        old.bare_step()
    loop = Loop(fused=True, mode="guard")
    with loop.monitor as monitor:
        loop.optimizer.load_state_dict(old.optimizer.state_dict())
        for scale in (1.0, NAN, 1.0):
            monitor.step(loop.forward(scale))
    assert torch.isfinite(loop.model[0].weight).all()


def test_a_step_after_close_says_so():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        monitor.step(loop.forward())
    with pytest.raises(UsageError, match="closed"):
        monitor.step(loop.forward())


def test_off_clips_all_optimizers_together_as_on_does():
    weights = []
    for mode in ("off", "guard"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        with trainer_hooks.watch(model, optimizers, mode=mode) as monitor:
            for _ in range(2):
                loss = model(torch.ones(2, 4)).square().mean() * 100
                loss.backward()
                monitor.step(loss, max_norm=0.5)
        weights.append(model[0].weight.detach().clone())
    assert torch.allclose(weights[0], weights[1])


def test_a_default_device_of_the_user_s_does_not_move_our_tensors():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        for _ in range(2):
            loss = loop.forward()
            with torch.device("meta"):
                monitor.step(loss)
    assert monitor.swallowed_errors == {}


def test_a_monitor_that_is_dropped_is_collected_and_its_optimizer_free_again():
    loop = Loop(mode="guard")
    loop.monitor.step(loop.forward())
    loop.monitor = None
    gc.collect()
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize("what", ["gradients", "squares_into"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_failing_preparation_still_clips(monkeypatch, fused, what):
    def boom(*_):
        raise RuntimeError("ours")

    plain = Loop(fused=fused)
    for _ in range(3):
        plain.forward(1e4)
        nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1)
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    ours = Loop(fused=fused, mode="guard")
    monkeypatch.setattr(device_of(ours.monitor).norms, what, boom)
    with ours.monitor as monitor:
        for _ in range(3):
            monitor.step(ours.forward(1e4), max_norm=0.1)
    assert monitor.swallowed_errors["prepare"] == 3
    assert torch.allclose(plain.model[0].weight, ours.model[0].weight, atol=1e-5)


def test_a_skip_in_the_last_step_is_in_the_ledger_and_a_rollback_there_did_not_act():
    for mode, action in (("guard", "skip_step"), ("heal", "rollback")):
        loop = Loop(mode=mode, checkpoints=True)
        said = events_of(loop.monitor)
        with loop.monitor as monitor:
            for step in range(30):
                if step == 29 and mode == "heal":
                    send_command(monitor, action="rollback")
                monitor.step(loop.forward(NAN if step == 29 and mode == "guard" else 1.0))
        decisions = [e.decision for e in said if type(e).__name__ == "DecisionMade"]
        assert (decisions[-1].step, decisions[-1].action) == (29, action)
        assert decisions[-1].acted == (mode == "guard")
        assert type(said[-1]).__name__ == "RunEnded"


@pytest.mark.usefixtures("no_read_is_free")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mode", ["guard", "heal"])
def test_a_fused_step_reads_nothing_of_the_present_step(monkeypatch, mode, frozen):
    loop = Loop(mode=mode, checkpoints=True)
    if frozen:
        loop.model[0].weight.requires_grad_(False)
    lists = []
    to_list = torch.Tensor.tolist
    with loop.monitor as monitor:
        for step in range(45):
            loss = loop.forward(NAN if step == 30 else 1.0)
            with Reads() as reads, monkeypatch.context() as patched:
                for name in ("__bool__", "__float__", "__int__", "item", "cpu", "numpy"):
                    patched.setattr(torch.Tensor, name, lambda *_, n=name: pytest.fail(n))
                patched.setattr(torch.Tensor, "tolist", lambda t: (lists.append(t), to_list(t))[1])
                monitor.step(loss, weight=torch.tensor(3), max_norm=1.0)
            assert reads.seen == []
    # What was read is the pinned copy of the step before, once a step, and the generator's state.
    size = device_of(monitor).packer.layout.size + 4
    assert len([t for t in lists if t.numel() == size]) == 44
    assert monitor.swallowed_errors == {}


def test_a_validation_loop_within_the_loop_leaves_the_position_alone():
    loop = Loop(mode="guard")
    places = []
    with loop.monitor as monitor:
        for _ in monitor.batches(range(4)):
            monitor.step(loop.forward())
            for _ in monitor.batches(range(9)):
                pass
            for _ in monitor.batches(range(9)):
                break
            gc.collect()
            places.append(monitor.batch_position)
        for _ in monitor.batches(range(2)):
            places.append(monitor.batch_position)
    assert [p.batch for p in places] == [0, 1, 2, 3, 0, 1]


def test_a_loop_that_owns_its_epochs_keeps_its_sampler_s_epoch():
    sampler = torch.utils.data.DistributedSampler(range(8), num_replicas=1, rank=0)
    loader = torch.utils.data.DataLoader(range(8), 2, sampler=sampler)
    loop, orders = Loop(mode="guard"), []
    with loop.monitor as monitor:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            orders.append([b.tolist() for b in monitor.batches(loader)])
    assert orders[0] != orders[1]


@pytest.fixture
def three_are_enough(monkeypatch):
    """Goes back after three steps in a row that are not finite."""
    monkeypatch.setenv("VITALS_LADDER_NONFINITE_IN_A_ROW", "3")
    monkeypatch.setenv("VITALS_LADDER_MAX_TRIES", "9")


def test_rollbacks_in_a_row_and_a_clock_that_runs_backwards_leave_a_line_of_branches(
    three_are_enough,
):
    loop, backs, branches = Loop(mode="heal", checkpoints=True), [], []
    host = run_of(loop.monitor)
    now = [host.clock.time_ns()]

    class Backwards:
        def time_ns(self):
            now[0] -= 10_000_000_000
            return now[0]

        def monotonic_ns(self):
            return 1

    host.clock = Backwards()
    with loop.monitor as monitor:
        done = 0
        while monitor.step_index < 80 and done < 300:
            bad = 40 <= done < 46 or 90 <= done < 96
            outcome = monitor.step(loop.forward(NAN if bad else 1.0))
            done += 1
            if outcome.rolled_back_to is not None:
                backs.append(outcome.rolled_back_to)
                branches.append(monitor.attempt)
        first = branches[0]
    assert len(backs) >= 2
    assert branches == sorted(set(branches))
    assert first > now[0] // 1_000_000 * 1_000
    assert torch.isfinite(loop.model[0].weight).all()
    assert monitor.swallowed_errors == {}


def test_a_command_that_a_rollback_overtakes_is_answered_all_the_same(three_are_enough):
    loop = Loop(mode="heal", checkpoints=True)
    with loop.monitor as monitor:
        acks = acks_of(monitor)
        for step in range(60):
            if step == 42:  # it comes with the step that rolls back
                command = send_command(monitor, action="rollback")
            outcome = monitor.step(loop.forward(NAN if step in (40, 41, 42) else 1.0))
            if step == 42:
                assert outcome.rolled_back_to is not None
    assert [ack.number for ack in acks()] == [command.number]


def test_a_snapshot_of_a_step_that_could_not_be_measured_is_not_trusted(monkeypatch):
    loop = Loop(mode="heal", checkpoints=True)
    with loop.monitor as monitor:
        squares_into = device_of(monitor).norms.squares_into
        for step in range(60):
            # The second snapshot is taken after 31 steps, and its flag travels with step 31.
            broken = (lambda *_: 1 / 0) if step == 31 else squares_into
            monkeypatch.setattr(device_of(monitor).norms, "squares_into", broken)
            monitor.step(loop.forward())
        steps = [ref.step for ref in refs_of(monitor)]
    assert 31 not in steps


def test_a_compiled_function_around_the_step_leaves_it_as_it_is():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        step = torch.compile(lambda loss: monitor.step(loss), backend="eager")
        before = loop.state()
        assert [step(loop.forward(scale).detach()).step for scale in (NAN, 1.0, 1.0)] == [0, 1, 2]
    assert torch.isfinite(loop.model[0].weight).all()
    assert not torch.equal(before["model"]["0.weight"], loop.model[0].weight)


ONE_SMALL_TENSOR = {
    "one float64 tensor": lambda: nn.Linear(4, 1, bias=False).double(),
    "one complex tensor": lambda: nn.Linear(4, 1, bias=False, dtype=torch.complex128),
    "one small bias beside a large matrix": lambda: nn.Linear(100, 100).double(),
    "one float32 tensor": lambda: nn.Linear(4, 1, bias=False),
}


@pytest.mark.parametrize("mode", ["observe", "guard"])
@pytest.mark.parametrize("enter", [trainer_hooks.watch, trainer_hooks.attach])
@pytest.mark.parametrize("make", ONE_SMALL_TENSOR.values(), ids=ONE_SMALL_TENSOR)
def test_measuring_writes_to_no_tensor_of_the_loop(make, enter, mode):
    # Flattened, one tensor of the dtype of the sums is a view of itself.
    bare = make()
    own = copy.deepcopy(bare)
    expected = torch.optim.SGD(bare.parameters(), lr=0.01, momentum=0.9)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01, momentum=0.9)
    signals = trainer_hooks.SignalSettings(every=1, weight_norm=True, outside_writes=True)
    with enter(own, optimizer, mode=mode, signals=signals) as monitor:
        for step in range(4):
            for model in (bare, own):
                size = model.in_features
                x = torch.linspace(-1.0, 1.0 + step, 2 * size, dtype=model.weight.dtype)
                loss = model(x.view(2, size)).abs().square().mean()
                loss.backward()
            expected.step()
            expected.zero_grad()
            if enter is trainer_hooks.watch:
                monitor.step(loss)
            else:
                monitor.loss(loss)
                optimizer.step()
                optimizer.zero_grad()
    assert_same(bare.state_dict(), own.state_dict())
    assert_same(expected.state_dict(), optimizer.state_dict())
    assert monitor.swallowed_errors == {}


def test_a_complex_loss_is_recorded_by_its_real_part_and_gradients_are_judged():
    loop = Loop(fused=True)
    with trainer_hooks.watch(loop.model, loop.optimizer) as monitor:
        for step in range(6):
            loss = loop.forward()
            if step == 3:
                loop.model[0].weight.grad[0, 0] = NAN
            monitor.step(torch.complex(loss.detach(), torch.tensor(1.0)))
    assert all(param.isfinite().all() for param in loop.model.parameters())
    assert monitor.swallowed_errors == {}
