"""What cannot be guarded is refused in words; what only looks like it is let in."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import _apply_optimizer_in_backward

import trainer_hooks
from tests.support.watched import own_place  # noqa: F401
from trainvitals.errors import StorageError, UsageError


def model_and_optimizer():
    model = nn.Linear(2, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def backward(model):
    loss = model(torch.ones(3, 2)).square().mean()
    loss.backward()
    return loss


def assert_refused(words, model, optimizers, **keywords):
    with pytest.raises(UsageError, match=words) as caught:
        trainer_hooks.watch(model, optimizers, **keywords)
    assert caught.value.hint


# ------------------------------------------------------------------------------ what is not sound


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("keep_batches", "monitor.batches(loader, keep_batches="),
        ("max_norm", "monitor.step(loss, "),
    ],
)
def test_an_argument_of_another_call_is_refused_with_its_place(name, belongs):
    with pytest.raises(UsageError, match=rf"watch\(\) has no argument {name}") as caught:
        trainer_hooks.watch(*model_and_optimizer(), **{name: True})
    assert belongs in caught.value.hint
    with pytest.raises(TypeError, match="unexpected keyword argument 'keep_btches'"):
        trainer_hooks.watch(*model_and_optimizer(), keep_btches=True)


NO_NORMS = [float("nan"), 0, -1.0, "1", torch.tensor(1.0)]


@pytest.mark.parametrize("max_norm", NO_NORMS, ids=repr)
def test_a_norm_that_cannot_be_clipped_to_is_refused_at_the_first_step(max_norm):
    model, optimizer = model_and_optimizer()
    with trainer_hooks.watch(model, optimizer) as monitor:
        loss = backward(model)
        with pytest.raises(UsageError, match="max_norm is"):
            monitor.step(loss, max_norm=max_norm)
    with pytest.raises(UsageError, match="max_norm is"):
        trainer_hooks.attach(model, optimizer, max_norm=max_norm)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("max_norm", NO_NORMS, ids=repr)
def test_a_norm_that_becomes_unsound_clips_nothing_and_is_counted(max_norm, fused):
    weights = []
    for norms in ([1e-3, max_norm], [1e-3, None]):
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        with trainer_hooks.watch(model, optimizer) as monitor:
            for norm in norms:
                monitor.step(backward(model), max_norm=norm)
        weights.append(model.weight.detach())
        assert monitor.swallowed_errors == ({} if norms[1] is None else {"max_norm": 1})
    assert torch.equal(*weights)


@pytest.mark.parametrize("guard", [trainer_hooks.watch, trainer_hooks.attach])
@pytest.mark.parametrize("earlier", [trainer_hooks.watch, trainer_hooks.attach])
def test_an_optimizer_that_is_guarded_already_is_refused(earlier, guard):
    model, optimizer = model_and_optimizer()
    with earlier(model, optimizer), pytest.raises(UsageError, match="already guarded"):
        guard(model, optimizer)
    guard(model, optimizer).close()


@pytest.mark.parametrize("guard", [trainer_hooks.watch, trainer_hooks.attach])
def test_what_could_not_be_set_up_leaves_all_as_it_was(guard, tmp_path):
    model, optimizer = model_and_optimizer()
    average = torch.optim.swa_utils.AveragedModel(model)
    before = set(vars(optimizer)), set(vars(average))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        guard(model, optimizer, dir=tmp_path / "file", state={"ema": average})
    assert (set(vars(optimizer)), set(vars(average))) == before
    assert not optimizer._optimizer_load_state_dict_post_hooks
    guard(model, optimizer).close()


# ------------------------------------------------------------------------------------- closures


class Sharpness(torch.optim.SGD):
    """Asks for a closure in its signature."""

    def step(self, closure):
        closure()


class LateSharpness(torch.optim.SGD):
    """Asks for a closure only once it is called: nothing shows before."""

    def step(self, closure=None):
        assert closure is not None, "needs a closure"


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sharpness])
def test_an_optimizer_that_needs_a_closure_is_refused(kind):
    model = nn.Linear(2, 1)
    assert_refused("needs closure", model, kind(model.parameters(), lr=0.1))


def test_an_optimizer_that_asks_for_a_closure_only_when_called_says_so_itself():
    model = nn.Linear(2, 1)
    optimizer = LateSharpness(model.parameters(), lr=0.1)
    with (
        pytest.raises(AssertionError, match="needs a closure"),
        trainer_hooks.watch(model, optimizer) as monitor,
    ):
        monitor.step(backward(model))


def test_a_closure_given_to_the_step_is_refused():
    model, optimizer = model_and_optimizer()
    with trainer_hooks.watch(model, optimizer) as monitor:
        backward(model)
        with pytest.raises(UsageError, match="no closure"):
            monitor.step(lambda: backward(model))


class NoOptimizer:
    """Wraps one, and is none."""

    def __init__(self, inner):
        self.param_groups = inner.param_groups


def test_what_is_no_optimizer_is_refused():
    model, optimizer = model_and_optimizer()
    assert_refused("NoOptimizer; each must be", model, NoOptimizer(optimizer))
    assert_refused("NoOptimizer; each must be", model, [optimizer, NoOptimizer(optimizer)])


def test_a_generator_of_optimizers_will_do():
    model, optimizer = model_and_optimizer()
    with trainer_hooks.watch(model, (o for o in [optimizer])) as monitor:
        monitor.step(backward(model))


# ------------------------------------------------------------------- optimizers within backward


def by_dict(model):
    """The way of torch's own tutorial."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    return hook


def by_list(model):
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    return lambda param: [optimizer.step() for optimizer in optimizers]


def by_partial(model):
    def hook(optimizer, param):
        optimizer.step()

    return functools.partial(hook, torch.optim.SGD(model.parameters(), lr=0.1))


def by_default(model):
    def hook(param, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)):  # noqa: B008
        optimizer.step()

    return hook


class Stepper:
    def __init__(self, model):
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def __call__(self, param):
        self.optimizer.step()

    def hook(self, param):
        self.optimizer.step()


OF_THE_MODULE = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def by_global(model):
    return lambda param: OF_THE_MODULE.step()


@pytest.mark.parametrize(
    "make",
    [by_dict, by_list, by_partial, by_default, by_global, Stepper, lambda m: Stepper(m).hook],
)
def test_a_gradient_hook_that_steps_an_optimizer_is_refused(make):
    model, optimizer = model_and_optimizer()
    model.bias.register_post_accumulate_grad_hook(make(model))
    assert_refused("hook of parameter 'bias' steps an optimizer", model, optimizer)


def test_torch_s_own_optimizer_in_backward_is_refused():
    model, optimizer = model_and_optimizer()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    assert_refused("_apply_optimizer_in_backward on parameter 'weight'", model, optimizer)


def test_a_gradient_hook_that_only_looks_is_let_in():
    model, optimizer = model_and_optimizer()
    norms = []
    model.weight.register_post_accumulate_grad_hook(lambda param: norms.append(param.grad.norm()))
    model.bias.register_post_accumulate_grad_hook(
        lambda param: norms.append(optimizer.param_groups[0]["lr"])
    )
    with trainer_hooks.watch(model, optimizer) as monitor:
        monitor.step(backward(model))
    assert len(norms) == 2


def test_a_hook_that_steps_by_a_function_of_another_is_not_seen_and_leaves_no_gradients():
    model, optimizer = model_and_optimizer()
    steps = by_dict(model)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: steps(p))
    with (
        pytest.raises(UsageError, match="has a gradient at the first step"),
        trainer_hooks.watch(model, optimizer) as monitor,
    ):
        monitor.step(backward(model))


def test_a_first_step_without_a_gradient_is_refused_before_the_optimizer_is_called():
    model, optimizer = model_and_optimizer()
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
    with (
        pytest.raises(UsageError, match="has a gradient at the first step"),
        trainer_hooks.watch(model, optimizer) as monitor,
    ):
        monitor.step(torch.tensor(1.0))
    assert [] == calls


# ---------------------------------------------------------------------------------- what else


def test_state_that_cannot_be_put_back_is_refused():
    model, optimizer = model_and_optimizer()
    assert_refused("'thing'.* has no state_dict", model, optimizer, state={"thing": object()})


def test_a_whole_step_in_one_graph_is_refused_in_our_words():
    model, optimizer = model_and_optimizer()
    with trainer_hooks.watch(model, optimizer) as monitor:
        step = torch.compile(lambda loss: monitor.step(loss), fullgraph=True, backend="eager")
        loss = backward(model)
        words = "outside the compiled graph|`Monitor.step` should not be traced"  # torch 2.7 says
        with pytest.raises(Exception, match=words) as caught:
            step(loss)
    assert type(caught.value).__module__.startswith("torch._dynamo")


# ----------------------------------------------------------------- steps beside monitor.step()


def test_a_step_that_was_left_in_a_watched_loop_is_refused_before_it_does_harm():
    model, optimizer = model_and_optimizer()
    monitor = trainer_hooks.watch(model, optimizer)
    before = model.weight.detach().clone()
    backward(model)
    model.weight.grad.fill_(float("nan"))
    with pytest.raises(UsageError, match=r"called outside monitor\.step") as caught:
        optimizer.step()
    assert "attach()" in caught.value.hint
    assert torch.equal(before, model.weight)
    monitor.close()
    optimizer.step()


def test_a_step_beside_the_monitor_is_counted_once_training_runs():
    model, optimizer = model_and_optimizer()
    with trainer_hooks.watch(model, optimizer) as monitor:
        monitor.step(backward(model))
        assert monitor.swallowed_errors == {}
        backward(model)
        optimizer.step()
        monitor.step(backward(model))
        assert monitor.swallowed_errors == {"unguarded_step": 1}


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_checkpoint_that_fills_the_state_of_an_optimizer_is_no_step(make):
    model = nn.Linear(2, 1)
    optimizer = make(model.parameters(), lr=0.1)
    with trainer_hooks.watch(model, optimizer) as monitor:
        get_optimizer_state_dict(model, optimizer)
        monitor.step(backward(model))
        get_optimizer_state_dict(model, optimizer)
        assert (monitor.step_index, monitor.swallowed_errors) == (1, {})


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"state": nn.Linear(2, 1)}, "state is a Linear; it must be a mapping"),
        ({"signals": {"weight_norm": True}}, "signals is a dict; it must be a SignalSettings"),
        ({"schedulers": "cosine"}, "schedulers holds a str, which has no step"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_in_words(keywords, words):
    assert_refused(words, *model_and_optimizer(), **keywords)
