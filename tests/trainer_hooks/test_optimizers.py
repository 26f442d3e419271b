"""Every optimizer x every fault: a skip leaves no trace, and training goes on as if it never was.

Each training is compared with a twin that has no monitor and never saw the bad steps.
"""

import pytest
import torch

import trainer_hooks
from tests.support.examples import one_in
from tests.support.inside import device_of, events_of, facts_of, records_of
from tests.support.watched import own_place  # noqa: F401
from tests.trainer_hooks.each_outlier import withhold_each_outlier_in
from tests.trainer_hooks.every_optimizer import (  # noqa: F401
    CLASSES,
    COMPLEX,
    MAKERS,
    VARIANTS,
    backward,
    bits,
    differing,
    one_thread,
    train_twin,
)
from trainer_hooks.guard.optimizers import OptimizerGuard, takes_found_inf

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant")  # torch's Adagrad, once

NAN, INF = float("nan"), float("inf")
FUSED = [name for name in MAKERS if "fused" in name]
HONOURS = {"Adam", "AdamW", "SGD", "Adagrad"}

NONFINITE = [(value, site) for value in (NAN, INF) for site in ("loss", "element", "all")]
OUTLIERS = [(1e30, "element"), (1e30, "all"), ("spike", "loss"), ("spike", "all")]
WARM = 18
FAULTS = {0: (NAN, "loss")} | {
    WARM + 2 * i: fault for i, fault in enumerate([*NONFINITE, *OUTLIERS])
}
"""The first step ever, each way of being non-finite, and finite outliers once the rule is warm."""


@pytest.fixture(autouse=True)
def each_outlier_is_withheld(monkeypatch):
    withhold_each_outlier_in(monkeypatch)


def train(monitor, model, optimizers, faults, steps, scaler=None, max_norm=None):
    """Return the losses of the good steps, and what each bad step changed."""
    losses, traces = [], {}
    for step in range(steps):
        before = bits(model, optimizers)
        loss = backward(model, step, faults.get(step), scaler)
        generator = torch.get_rng_state()
        monitor.step(loss, max_norm=max_norm)
        assert torch.equal(generator, torch.get_rng_state())
        if step in faults:
            after = bits(model, optimizers)
            # State that a skipped first step made is judged by the twin.
            traces[step] = [k for k in differing(before, after) if step or k in before]
        else:
            losses.append(loss.item())
    return losses, traces


def assert_like_twin(make, faults, *, scaler=None, **keywords):
    steps = max(faults) + 4
    model, optimizers = make(**keywords)
    with trainer_hooks.watch(model, optimizers, scaler=scaler) as monitor:
        losses, traces = train(monitor, model, optimizers, faults, steps, scaler)
        skips = facts_of(monitor).num_skips
    twin_losses, twin_bits = train_twin(make, faults, steps, **keywords)
    assert {step: [] for step in faults} == traces
    assert twin_losses == losses
    after = bits(model, optimizers)
    assert [] == [k for k in differing(twin_bits, after) if k in twin_bits]
    assert {k for k in monitor.swallowed_errors if "journal" not in k} == set()
    return skips


def test_no_optimizer_class_of_torch_is_forgotten():
    assert set(CLASSES) <= set(VARIANTS), "a new class: say in VARIANTS how it is made"


@pytest.mark.parametrize("name", one_in(4, MAKERS))
def test_no_fault_leaves_a_trace(name):
    skips = assert_like_twin(MAKERS[name], FAULTS)
    assert len(FAULTS) == skips


@pytest.mark.parametrize("name", one_in(6, MAKERS))
def test_no_fault_leaves_a_trace_under_a_scaler(name):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    faults = {0: (INF, "element"), WARM: (NAN, "loss"), WARM + 2: ("spike", "all")}
    assert_like_twin(MAKERS[name], faults, scaler=scaler)
    assert scaler.get_scale() == 2.0**6


@pytest.mark.parametrize("name", [*one_in(3, FUSED), "RMSprop foreach", "SparseAdam"])
def test_no_fault_leaves_a_trace_where_gradients_are_clipped(name):
    """Without a twin: to clip is to round, and torch rounds elsewhere."""
    model, optimizers = MAKERS[name]()
    with trainer_hooks.watch(model, optimizers) as monitor:
        losses, traces = train(monitor, model, optimizers, FAULTS, max(FAULTS) + 4, max_norm=0.1)
    assert {step: [] for step in FAULTS} == traces
    assert all(loss == loss for loss in losses)


@pytest.mark.parametrize("name", one_in(3, COMPLEX))
def test_no_fault_leaves_a_trace_in_complex_parameters(name):
    assert_like_twin(MAKERS[name], {0: (NAN, "element"), 5: (INF, "all")}, wave=True)


@pytest.mark.parametrize(("value", "site"), NONFINITE)
@pytest.mark.parametrize("name", one_in(4, FUSED))
def test_the_first_step_ever_may_be_any_fault(name, value, site):
    assert_like_twin(MAKERS[name], {0: (value, site), 1: (value, site)})


# ------------------------------------------------------- who takes the flag, and who never sees it


def moved_with_flag(optimizer, params, flag, gradient):
    """Step with ``found_inf`` set as the guard sets it; return what moved."""

    def tensors():
        states = [v for p in params for v in optimizer.state[p].values() if torch.is_tensor(v)]
        return [t.detach().clone() for t in [*params, *states]]

    for param in params:
        param.grad = torch.full_like(param, gradient)
    before = tensors()
    optimizer.found_inf = torch.tensor(flag)
    optimizer.step()
    del optimizer.found_inf
    after = tensors()
    return [i for i, old in enumerate(before) if not torch.equal(old, after[i])]


@pytest.mark.parametrize("kind", sorted(HONOURS))
def test_a_class_that_is_given_the_flag_honours_it(kind):
    """Fails where a torch release changes what the guard relies on."""
    params = [torch.nn.Parameter(torch.ones(5, 3)), torch.nn.Parameter(torch.ones(4))]
    optimizer = CLASSES[kind](params, lr=0.1, fused=True)
    guard = OptimizerGuard(optimizer, None)
    assert takes_found_inf(optimizer)
    assert moved_with_flag(optimizer, params, 0.0, 1.0) != []
    assert moved_with_flag(optimizer, params, 1.0, NAN) == []
    assert moved_with_flag(optimizer, params, 1.0, INF) == []
    assert moved_with_flag(optimizer, params, 1.0, 1.0) == []
    assert moved_with_flag(optimizer, params, 0.0, 1.0) != []
    optimizer.grad_scale = torch.tensor(4.0)
    assert moved_with_flag(optimizer, params, 1.0, NAN) == []
    guard.release()


@pytest.mark.parametrize("kind", sorted(HONOURS))
def test_a_class_that_is_given_the_flag_divides_its_gradients_by_the_scale(kind):
    moved = []
    for scale, gradient in ((1.0, 0.25), (4.0, 1.0)):
        param = torch.nn.Parameter(torch.ones(5))
        optimizer = CLASSES[kind]([param], lr=0.1, fused=True)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
        param.grad = torch.full_like(param, gradient)
        optimizer.step()
        moved.append(bits(torch.nn.ParameterList([param]), [optimizer]))
    assert [] == differing(*moved)


@pytest.mark.parametrize("name", MAKERS)
def test_only_fused_ones_of_these_classes_are_given_it(name):
    _, optimizers = MAKERS[name]()
    assert ("fused" in name and "dampening" not in name) == takes_found_inf(optimizers[0])


def test_an_optimizer_that_is_not_given_the_flag_never_sees_one():
    seen = []

    class Looking(torch.optim.AdamW):
        def step(self, closure=None):
            seen.append(getattr(self, "found_inf", None))
            return super().step(closure)

    model = MAKERS["Lion"]()[0]
    with trainer_hooks.watch(model, Looking(model.parameters(), fused=True)) as monitor:
        for step in range(3):
            monitor.step(backward(model, step, (NAN, "loss") if step == 1 else None))
    assert seen == [None, None]


def test_the_flag_of_a_bad_step_is_one_float32_scalar_of_exactly_1():
    model, optimizers = MAKERS["AdamW fused"]()
    seen = []

    def note_flag(optimizer, *_) -> None:
        flag = getattr(optimizer, "found_inf", None)
        seen.append(None if flag is None else flag.clone())

    optimizers[0].register_step_pre_hook(note_flag)
    with trainer_hooks.watch(model, optimizers) as monitor:
        for step in range(30):
            monitor.step(backward(model, step, {4: (NAN, "all"), 25: (1e30, "all")}.get(step)))
    flags = {step: flag for step, flag in enumerate(seen) if flag is not None}
    assert {4: 1.0, 25: 1.0} == {step: flag.item() for step, flag in flags.items()}, "no read waits"
    assert {(flag.dtype, flag.dim()) for flag in flags.values()} == {(torch.float32, 0)}
    assert not hasattr(optimizers[0], "found_inf")


def test_a_step_that_somebody_replaced_goes_the_host_s_way_and_a_scheduler_s_does_not():
    _, (optimizer,) = MAKERS["AdamW fused"]()
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    assert takes_found_inf(optimizer)
    counted = optimizer.step
    optimizer.step = lambda: counted()
    assert not takes_found_inf(optimizer)
    optimizer.step = torch.compile(counted, backend="eager")
    assert not takes_found_inf(optimizer)


@pytest.mark.parametrize(
    ("name", "lag"),
    [("fused and fused", 1), ("fused and not", 0), ("SparseAdam", 0), ("Lookahead", 0)],
)
def test_one_optimizer_on_the_host_s_way_takes_the_lag_from_all(name, lag):
    model, optimizers = MAKERS[name]()
    with trainer_hooks.watch(model, optimizers) as monitor:
        assert lag == device_of(monitor).readback.lag
        outcomes = [
            monitor.step(backward(model, step, (NAN, "all") if step == 3 else None))
            for step in range(6)
        ]
    assert [3 + lag] == [i for i, o in enumerate(outcomes) if o.decision is not None]


def test_an_overflow_of_float16_is_counted_and_is_no_finding():
    model, optimizers = MAKERS["fused and not"]()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    with trainer_hooks.watch(model, optimizers, scaler=scaler) as monitor:
        said = events_of(monitor, keep=lambda event, **_: type(event).__name__)
        rows = records_of(monitor)
        for step in range(6):
            fault = (INF, "element") if step in (2, 4) else None
            monitor.step(backward(model, step, fault, scaler))
    assert [False, False, True, False, True, False] == [r.overflow for r in rows]
    assert [r.overflow for r in rows] == [r.skipped for r in rows]
    assert not {"FindingRaised", "DecisionMade"} & set(said)
    assert scaler.get_scale() == 2.0**6


class Apart(torch.optim.Optimizer):
    """A wrapper whose inner optimizer has a state of its own, in a list."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})
        self.optimizers = [torch.optim.AdamW(g["params"], lr=0.01) for g in self.param_groups]

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize("name", ["Lookahead", "Apart"])
def test_a_rollback_brings_back_the_state_of_an_optimizer_within_another(name, monkeypatch):
    monkeypatch.setenv("VITALS_LADDER_NONFINITE_IN_A_ROW", "3")
    model, optimizers = MAKERS["Lookahead"]()
    if name == "Apart":
        optimizers = [Apart(model.parameters())]
    held = [getattr(optimizers[0], "inner", None) or optimizers[0].optimizers[0]]
    kept, back = {}, None
    with trainer_hooks.watch(model, optimizers, mode="heal", checkpoints=True) as monitor:
        for _ in range(75):
            kept[monitor.step_index] = bits(model, held)
            fault = (NAN, "loss") if monitor.step_index in (55, 56, 57) and back is None else None
            outcome = monitor.step(backward(model, monitor.step_index, fault))
            if outcome.rolled_back_to is not None:
                back = outcome.rolled_back_to
                assert [] == differing(kept[back], bits(model, held))
    assert back is not None
