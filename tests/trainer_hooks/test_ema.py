"""The average of the weights: right, exact under skips and rollbacks, and put in and out again."""

import copy

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.support.watched import INF, NAN, Loop, Reads, own_place  # noqa: F401
from tests.trainer_hooks.averages import assert_same_bits, batch, bits, moved, small
from tests.trainer_hooks.every_optimizer import MAKERS, backward, one_thread  # noqa: F401
from trainer_hooks import EMA
from trainer_hooks.guard import fused_ema
from trainer_hooks.guard.averages import refuse_averages
from trainvitals.errors import UsageError

FAULTS = {0: (NAN, "loss"), 1: (INF, "all"), 4: (NAN, "element"), 7: (INF, "loss")}


def decays(decay, num_updates, *, warmup):
    return [min(decay, (1 + n) / (10 + n)) if warmup else decay for n in range(num_updates)]


# ------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("every", [1, 3])
def test_it_is_the_average_that_float64_gives(dtype, warmup, every):
    model = small(dtype)
    ema = EMA(model, 0.6, warmup=warmup, every=every)
    wanted = {name: p.detach().double() for name, p in model.named_parameters()}
    due = iter(decays(0.6, 12, warmup=warmup))
    for step in range(12):
        moved(model, step)
        ema.update()
        if (step + 1) % every == 0:
            decay = next(due)
            for name, param in model.named_parameters():
                wanted[name] = decay * wanted[name] + (1 - decay) * param.detach().double()
    found = ema.state_dict()
    assert found.pop("num_steps").item() == 12
    assert {torch.float32} == {tensor.dtype for tensor in found.values()}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), wanted[name], rtol=1e-6, atol=1e-6)


def test_weights_of_every_type_and_layout_are_averaged(monkeypatch):
    monkeypatch.setattr(fused_ema, "_MOST_CONVERTED", 5)  # several chunks
    model = nn.Module()
    model.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    model.turned = nn.Parameter(torch.randn(4, 6).t())
    model.strided = nn.Parameter(torch.randn(6, 6)[::2, ::3])
    model.repeated = nn.Parameter(torch.ones(1).expand(5))
    model.pairs = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    model.long = nn.Parameter(torch.randn(3, dtype=torch.float64))
    model.short = nn.Parameter(torch.randn(7, dtype=torch.float16))
    model.empty = nn.Parameter(torch.empty(0))
    model.whole = nn.Parameter(torch.arange(3), requires_grad=False)
    ema = EMA(model, 0.5, warmup=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.data = param * 3 if name != "repeated" else param + 2
    ema.update()
    found = ema.state_dict()
    assert "whole" not in found
    for name in before.keys() - {"whole"}:
        torch.testing.assert_close(found[name].to(before[name].dtype), 2 * before[name])


def test_the_sign_of_zero_and_denormals_stay():
    model = nn.Linear(4, 1, bias=False)
    values = torch.tensor([[-0.0, 0.0, 1e-42, -1e-45]])
    with torch.no_grad():
        model.weight.copy_(values)
    ema = EMA(model)
    for _ in range(5):
        ema.update()
    assert_same_bits({"weight": values}, {"weight": ema.state_dict()["weight"]})


@pytest.mark.parametrize("far", [False, True])
def test_a_bad_step_writes_nothing_whatever_lies_there(monkeypatch, far):
    monkeypatch.setattr(EMA, "_is_far", lambda *_: far)
    model = nn.Linear(4, 1, bias=False)
    values = torch.tensor([[-0.0, NAN, INF, 1e-45]])
    with torch.no_grad():
        model.weight.copy_(values)
    ema = EMA(model)
    with torch.no_grad():
        model.weight.fill_(NAN)
    before = bits(ema)
    ema.begin(torch.ones((), dtype=torch.float64))
    ema.follow(["weight"])
    assert_same_bits(before, bits(ema))
    assert_same_bits({"weight": values}, {"weight": before["weight"]})


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"decay": 0.0}, "decay"),
        ({"decay": 1.0}, "decay"),
        ({"decay": NAN}, "decay"),
        ({"decay": -0.1}, "decay"),
        ({"every": 0}, "every"),
        ({"dtype": torch.int32}, "dtype"),
    ],
)
def test_a_setting_out_of_range_is_refused(keywords, named):
    with pytest.raises(UsageError, match=named):
        EMA(small(), **keywords)


def test_what_cannot_be_averaged_is_refused():
    taken = nn.Module()
    taken.num_steps = nn.Parameter(torch.ones(1))
    for model in (nn.ReLU(), nn.Linear(2, 2, device="meta"), taken):
        with pytest.raises(UsageError, match=r"averag"):
            EMA(model)


# -------------------------------------------------------------------------------- under guard


def train(name, faults, steps, **keywords):
    """Return the bits of an average that the monitor updates, and the steps that left it alone."""
    model, optimizers = MAKERS[name]()
    ema, stood = EMA(model, 0.9, **keywords), []
    with trainer_hooks.watch(model, optimizers, state={"ema": ema}) as monitor:
        for step in range(steps):
            before = bits(ema)
            monitor.step(backward(model, step, faults.get(step)))
            if all(torch.equal(t, before[n]) for n, t in bits(ema).items()):
                stood.append(step)
        assert {} == monitor.swallowed_errors
    return bits(ema), stood


def twin(name, faults, steps, **keywords):
    """Return those of one that is updated by hand and never saw the bad steps."""
    model, optimizers = MAKERS[name]()
    ema = EMA(model, 0.9, **keywords)
    for step in range(steps):
        if step not in faults:
            backward(model, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            ema.update()
    return bits(ema)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["AdamW fused", "RMSprop foreach"])
def test_a_skip_leaves_no_trace_in_it(monkeypatch, name, every, far):
    """``far`` acts as if the average lay in host memory and the weights on a GPU."""
    wanted = twin(name, FAULTS, 9, every=every)
    monkeypatch.setattr(EMA, "_is_far", lambda *_: far)
    found, stood = train(name, FAULTS, 9, every=every)
    assert [*FAULTS] == stood
    assert_same_bits(wanted, found)


@pytest.mark.parametrize("far", [False, True])
def test_its_update_reads_nothing_of_the_present_step(monkeypatch, far):
    monkeypatch.setattr(EMA, "_is_far", lambda *_: far)
    model = small()
    ema = EMA(model)
    for step in range(5):
        bad = torch.tensor(float(step == 2))
        moved(model, step)
        with Reads() as reads, monkeypatch.context() as patched:
            for name in ("__bool__", "__float__", "item", "tolist", "cpu", "numpy"):
                patched.setattr(torch.Tensor, name, lambda *_, n=name: pytest.fail(n))
            ema.begin(bad)
            ema.follow(["0.weight", "2.bias"])
        # Its own counter, in host memory, which no step of a device writes.
        assert reads.seen == (["_local_scalar_dense"] if far else [])
    assert bits(ema)["num_steps"].item() == 4


def test_two_optimizers_that_the_loop_steps_itself_are_both_averaged():
    def parts():
        model = small()
        first, last = model[0].parameters(), [*model[1].parameters(), *model[2].parameters()]
        return model, [torch.optim.SGD(p, lr=0.1, fused=True) for p in (first, last)]

    found = []
    for watched in (True, False):
        model, optimizers = parts()
        ema = EMA(model, 0.9)
        attached = trainer_hooks.attach(model, optimizers, state={"ema": ema}) if watched else None
        for step in range(6):
            bad = step in (0, 3)
            if watched or not bad:
                (model(batch(step)).square().mean() * (NAN if bad else 1.0)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                if not watched:
                    ema.update()
        if attached is not None:
            attached.close()
        found.append(bits(ema))
    assert_same_bits(*found)


def test_a_compiled_model_is_averaged_under_its_own_names():
    model = small()
    compiled = torch.compile(model, backend="eager")
    ema = EMA(compiled, 0.9)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, fused=True)
    with trainer_hooks.watch(compiled, optimizer, state={"ema": ema}) as monitor:
        for step in range(3):
            loss = compiled(batch(step)).square().mean()
            loss.backward()
            monitor.step(loss)
        compiled.eval()
        plain = compiled(batch(9))
        with ema.swap():
            swapped = compiled(batch(9))
        again = compiled(batch(9))
    other = small().eval()
    ema.copy_to(other)
    assert {name for name, _ in model.named_parameters()} | {"num_steps"} == {*ema.state_dict()}
    assert torch.equal(plain, again)
    assert torch.equal(other(batch(9)), swapped)


@pytest.mark.parametrize("how", ["watch", "attach"])
def test_an_unwatched_loop_averages_as_a_watched_one(how):
    found = []
    for mode in ("off", "guard"):
        model = small()
        ema = EMA(model, 0.9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        start = getattr(trainer_hooks, how)
        with start(model, optimizer, mode=mode, state={"ema": ema}) as monitor:
            for step in range(4):
                loss = model(batch(step)).square().mean()
                loss.backward()
                if how == "watch":
                    monitor.step(loss)
                else:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(bits(ema))
        optimizer.step()
        assert found[-1]["num_steps"].item() == bits(ema)["num_steps"].item() == 4
    assert_same_bits(*found)


def test_what_would_not_move_or_move_twice_is_refused_and_leaves_the_optimizer_free():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    ema, stranger = EMA(model), EMA(small())
    with pytest.raises(UsageError, match="never change"):
        trainer_hooks.watch(model, optimizer, state={"ema": stranger})
    with pytest.raises(UsageError, match="engine"):
        refuse_averages({"ema": ema}, [optimizer], has_engine=True)
    with trainer_hooks.watch(model, optimizer, state={"ema": ema, "twice": ema}):
        with pytest.raises(UsageError, match="already registered"):
            trainer_hooks.watch(model, optimizer, state={"ema": ema})
        with pytest.raises(UsageError, match="monitor already updates"):
            ema.update()
    ema.update()
    assert bits(ema)["num_steps"].item() == 1


def test_weights_that_were_loaded_after_it_was_made_are_where_it_starts():
    model = small()
    model[0].weight.requires_grad_(False)
    ema = EMA(model, 0.9)
    moved(model, 1)
    loaded = copy.deepcopy(model.state_dict())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, fused=True)
    with trainer_hooks.watch(model, optimizer, state={"ema": ema}) as monitor:
        assert torch.equal(loaded["2.bias"], ema.state_dict()["2.bias"])
        for step in range(2):
            loss = model(batch(step)).square().mean()
            loss.backward()
            monitor.step(loss)
    found = bits(ema)
    with trainer_hooks.watch(model, optimizer, state={"ema": ema}):
        assert_same_bits(found, bits(ema))  # it goes on
    assert torch.equal(loaded["0.weight"], found["0.weight"])
    assert not torch.equal(loaded["2.bias"], found["2.bias"])


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_a_rollback_brings_it_back_bit_for_bit(monkeypatch, every, far):
    monkeypatch.setattr(EMA, "_is_far", lambda *_: far)
    loop, kept, back = Loop(), {}, None
    ema = EMA(loop.model, 0.9, every=every)
    with trainer_hooks.watch(
        loop.model, loop.optimizer, loop.scheduler, mode="heal", checkpoints=True,
        state={"ema": ema},
    ) as monitor:  # fmt: skip
        while back is None and monitor.step_index < 60:
            kept[monitor.step_index] = bits(ema)
            if monitor.step_index == 40:
                with torch.no_grad():
                    loop.model[0].weight.fill_(NAN)
            back = monitor.step(loop.forward()).rolled_back_to
        assert back is not None
        assert_same_bits(kept[back], bits(ema))
        monitor.step(loop.forward())
        assert bits(ema)["num_steps"].item() == kept[back]["num_steps"].item() + 1
        assert all(t.isfinite().all() for t in bits(ema).values())


# ----------------------------------------------------------------------------------------- a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU in this machine")
@pytest.mark.parametrize("device", [None, "cpu"])
def test_on_a_gpu_no_step_is_waited_for_and_a_skip_leaves_no_trace(device):
    faults, found = (2, 5), []
    for watched in (True, False):
        model = small().cuda()
        ema = EMA(model, 0.9, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        state = {"ema": ema} if watched else {}
        with trainer_hooks.watch(model, optimizer, state=state) as monitor:
            for step in range(8):
                bad = step in faults
                if bad and not watched:
                    continue
                x = torch.randn(
                    6, 3, device="cuda", generator=torch.Generator("cuda").manual_seed(step)
                )
                loss = model(x).square().mean() * (NAN if bad else 1.0)
                loss.backward()
                torch.cuda.set_sync_debug_mode("error" if step > 3 else "default")
                monitor.step(loss)
                if not watched:
                    ema.update()
                torch.cuda.set_sync_debug_mode("default")
            assert {} == monitor.swallowed_errors
        found.append(bits(ema))
    assert {device or "cuda"} == {tensor.device.type for tensor in found[0].values()}
    assert_same_bits(*found)
