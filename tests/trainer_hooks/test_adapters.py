"""LoRA adapters: what the first steps train is recorded once, and no update differs."""

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.support.watched import own_place  # noqa: F401
from tests.trainer_hooks.measures.journal import Journal
from trainer_hooks.features.adapters import adapters_of, bases_of

pytestmark = pytest.mark.usefixtures("own_place")


class Adapted(nn.Module):
    """A linear layer with a LoRA adapter, named as PEFT names it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)
        self.is_active = True

    def forward(self, x):
        adapter = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + (adapter if self.is_active else 0.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.adapted = Adapted()
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.adapted(x)).square().mean()


def recorded(tmp_path, chosen, *, task="sft", is_active=True, steps=5) -> dict[str, list[float]]:
    """Train parameters whose names contain one of the texts; return the scalars of adapters."""
    model = Net()
    model.adapted.is_active = is_active
    for name, parameter in model.named_parameters():
        parameter.requires_grad = any(text in name for text in chosen)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1)
    x = torch.randn(8, 4)
    with trainer_hooks.watch(model, optimizer, task=task) as monitor:
        for _ in range(steps):
            loss = model(x)
            loss.backward()
            monitor.step(loss)
        assert {} == monitor.swallowed_errors
    journal = Journal(tmp_path / "shm")
    scalars: dict[str, list[float]] = {}
    for _, name, value in journal.scalars():
        scalars.setdefault(name, []).append(value)
    return {name: values for name, values in scalars.items() if name.startswith("lora/")}


GOOD = {"lora/optimizer_share": [1.0], "lora/has_gradient": [1.0], "lora/base_share": [0.0]}


def test_adapters_that_are_trained_alone_or_with_a_head(tmp_path):
    assert GOOD == recorded(tmp_path, ["lora_"])


def test_a_head_is_no_base(tmp_path):
    assert GOOD == recorded(tmp_path, ["lora_", "head"])


def test_adapters_that_are_not_in_the_optimizer(tmp_path):
    assert {"lora/optimizer_share": [0.0], "lora/base_share": [0.0]} == recorded(tmp_path, ["head"])


def test_adapters_without_a_gradient(tmp_path):
    counts = recorded(tmp_path, ["lora_", "head"], is_active=False)
    assert GOOD | {"lora/has_gradient": [0.0]} == counts


def test_a_base_that_is_trained(tmp_path):
    assert GOOD | {"lora/base_share": [1.0]} == recorded(tmp_path, ["lora_", "base_layer"])


def test_nothing_is_recorded_without_a_kind_of_run(tmp_path):
    assert {} == recorded(tmp_path, ["lora_"], task=None)


def test_nothing_is_recorded_before_the_third_step(tmp_path):
    assert {} == recorded(tmp_path, ["lora_"], steps=2)


def test_peft_names_its_adapters_as_we_read_them():
    peft = pytest.importorskip("peft", reason="not installed: peft")
    config = peft.LoraConfig(target_modules=["base_layer"], r=2)
    plain = nn.ModuleDict({"base_layer": nn.Linear(4, 4)})
    model = peft.inject_adapter_in_model(config, plain)
    params = dict(model.named_parameters())
    assert 2 == len(adapters_of(model))
    assert [(4, 4)] == [tuple(base.shape) for base in bases_of(params)]
