"""Every optimizer class of torch.optim in each of its implementations, and some from elsewhere."""

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}
"""Found in the module, so that a class which a new torch brings is not forgotten."""

_LOOPS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}
_MAXIMIZE = {"maximize": {"maximize": True, "foreach": False}}
_FUSED = {"fused": {"fused": True}, "fused-maximize": {"fused": True, "maximize": True}}
_ADAM = {
    **_LOOPS,
    **_MAXIMIZE,
    **_FUSED,
    "amsgrad": {"amsgrad": True, "foreach": False},
    "fused-amsgrad": {"fused": True, "amsgrad": True, "weight_decay": 0.1},
    "fused-capturable": {"fused": True, "capturable": True},
    "fused-tensor-lr": {"fused": True, "lr": lambda: torch.tensor(0.001)},
    "tensor-lr-and-betas": {
        "lr": lambda: torch.tensor(0.001),
        "betas": (torch.tensor(0.9), torch.tensor(0.99)),
        "foreach": False,
    },
}
VARIANTS = {
    "Adafactor": {**_LOOPS, **_MAXIMIZE},
    "Adadelta": {**_LOOPS, **_MAXIMIZE, "decay": {"weight_decay": 0.1}},
    "Adagrad": {**_LOOPS, **_MAXIMIZE, **_FUSED, "fused-decay": {"fused": True, "lr_decay": 0.1}},
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": {**_LOOPS, **_MAXIMIZE},
    "ASGD": {**_LOOPS, **_MAXIMIZE, "early": {"t0": 2.0}},
    "LBFGS": {},  # refused: test_refusals
    "Muon": {"": {}, "nesterov-off": {"nesterov": False}},
    "NAdam": {**_LOOPS, **_MAXIMIZE, "decoupled": {"decoupled_weight_decay": True}},
    "RAdam": {**_LOOPS, **_MAXIMIZE},
    "RMSprop": {**_LOOPS, **_MAXIMIZE, "centered": {"centered": True, "momentum": 0.9, "lr": 1e-4}},
    "Rprop": {name: {**k, "step_sizes": (1e-6, 1e-3)} for name, k in (_LOOPS | _MAXIMIZE).items()},
    "SGD": {
        **_LOOPS,
        **_MAXIMIZE,
        **_FUSED,
        "momentum": {"momentum": 0.9, "foreach": False},
        "momentum-foreach": {"momentum": 0.9, "foreach": True},
        "nesterov": {"momentum": 0.9, "nesterov": True, "foreach": False},
        "dampening": {"momentum": 0.9, "dampening": 0.5, "foreach": False},
        "fused-momentum": {"momentum": 0.9, "fused": True},
        "fused-nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": True},
        "fused-dampening": {"momentum": 0.9, "dampening": 0.5, "fused": True},
    },
    "SparseAdam": {"": {}, "maximize": {"maximize": True}},
}
"""What is left out cannot run: ``capturable`` alone is refused on a CPU, and ``differentiable`` on
any parameter that is trained (a leaf)."""


class Lion(Optimizer):
    """A third party's optimizer: plain tensor code, which knows of no flag."""

    def __init__(self, params, lr=0.001):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                param.add_((average * 0.9 + param.grad * 0.1).sign(), alpha=-group["lr"])
                average.mul_(0.99).add_(param.grad, alpha=0.01)


class Lookahead(Optimizer):
    """A wrapper that holds another optimizer and never calls its own base's constructor."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state
        self.defaults = inner.defaults
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]
        self.count = 0

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % 3 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for param, kept in zip(group["params"], slow, strict=True):
                    kept.lerp_(param, 0.5)
                    param.copy_(kept)


class Small(nn.Module):
    """Tables, matrices and a bias; on demand a sparse gradient or a complex parameter."""

    def __init__(self, *, sparse=False, wave=False):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 4, sparse=sparse)
        self.hidden = nn.Linear(4, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)
        self.wave = nn.Parameter(torch.randn(8, dtype=torch.complex64)) if wave else None

    def loss(self, step):
        """Return the loss on nearly the same data in each step: no step stands out by itself."""
        rows = torch.arange(12).roll(step)
        hidden = torch.tanh(self.norm(self.hidden(self.table(rows))))
        if self.wave is not None:
            hidden = hidden * self.wave.abs()
        return (self.head(hidden) - torch.sin(rows.float())[:, None]).square().mean() + 0.5


def _made(keywords):
    return {name: value() if callable(value) else value for name, value in keywords.items()}


def _from_torch(name, keywords):
    def make(*, wave=False):
        kind, sparse = CLASSES[name], name == "SparseAdam"
        model = Small(sparse=sparse, wave=wave)
        given = {"lr": 0.001, **_made(keywords)}
        own = list(model.parameters())
        if sparse:
            own = [model.table.weight]
        elif name == "Muon":
            own = [p for p in own if p.dim() == 2]
        rest = [p for p in model.parameters() if not any(p is one for one in own)]
        optimizers = [kind(own, **given)]
        if rest:
            optimizers.append(torch.optim.AdamW(rest, lr=0.001, fused=True))
        return model, optimizers

    return make


def _of_all(factory, **keywords):
    def make(*, wave=False):
        model = Small(wave=wave, **keywords)
        return model, factory(model)

    return make


MAKERS = {
    f"{name} {variant}".strip(): _from_torch(name, keywords)
    for name in CLASSES
    for variant, keywords in VARIANTS.get(name, {}).items()
} | {
    "Lion": _of_all(lambda m: [Lion(m.parameters())]),
    "Lookahead": _of_all(
        lambda m: [Lookahead(torch.optim.AdamW(m.parameters(), lr=0.001, fused=True))]
    ),
    "SGD sparse": _of_all(lambda m: [torch.optim.SGD(m.parameters(), lr=0.001)], sparse=True),
    "Adagrad sparse": _of_all(
        lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.001)], sparse=True
    ),
    "fused and fused": _of_all(
        lambda m: [
            torch.optim.AdamW(m.table.parameters(), lr=0.001, fused=True),
            torch.optim.SGD([*m.parameters()][1:], lr=0.001, momentum=0.9, fused=True),
        ]
    ),
    "fused and not": _of_all(
        lambda m: [
            torch.optim.AdamW(m.table.parameters(), lr=0.001, fused=True),
            torch.optim.RMSprop([*m.parameters()][1:], lr=0.001),
        ]
    ),
}
COMPLEX = [
    name
    for name in MAKERS
    if name.split()[0] in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta")
    and not any(word in name for word in ("fused", "sparse"))
]


def bits(model, optimizers):
    """Return copies of all that a step may change, in a form to compare bit for bit."""
    found = dict(model.state_dict().items())
    for i, optimizer in enumerate(optimizers):
        for j, state in enumerate(optimizer.state.values()):
            found |= {f"{i}.{j}.{name}": value for name, value in state.items()}
        found[f"{i}.count"] = getattr(optimizer, "count", 0)
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def differing(one, other):
    """Return the names of what is not bit for bit the same."""
    names = one.keys() ^ other.keys()
    for name in one.keys() & other.keys():
        left, right = one[name], other[name]
        both = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        if not (torch.equal(left, right) if both else left == right):
            names.add(name)
    return sorted(names)


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors of 48 elements gain nothing from threads, which spin on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def backward(model, step, fault=None, scaler=None):
    """Train up to the gradients, with the fault in the place it says."""
    value, site = fault or (None, None)
    factor = 100.0 if value == "spike" else value
    loss = model.loss(step) * (factor if site == "loss" else 1.0)
    (scaler.scale(loss) if scaler else loss).backward()
    for param in model.parameters() if site in ("element", "all") else ():
        grad = param.grad._values() if param.grad.is_sparse else param.grad
        if site == "all":
            grad.mul_(factor) if value == "spike" else grad.fill_(factor)
        else:
            grad.view(-1)[:1].fill_(factor)
            break
    return loss.detach()


def train_twin(make, faults, steps, **keywords):
    """Train without us and without the bad steps."""
    model, optimizers = make(**keywords)
    losses = []
    for step in range(steps):
        if step in faults:
            continue
        losses.append(backward(model, step).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return losses, bits(model, optimizers)
