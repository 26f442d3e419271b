"""What each rank does in ``test_faults``: every wrapping of one world size."""

import copy
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import trainer_hooks
from tests.support.inside import device_of
from tests.trainer_hooks.each_outlier import withhold_each_outlier
from tests.trainer_hooks.wrappings.models import (
    SCALE,
    SLOW,
    TORCH,
    WRAPPINGS,
    Fsdp1,
    Wrapping,
    not_syncing,
)
from trainer_hooks.exchange.reduce_vector import ReducedNumbers, Verdict, culprits, judge_on_device
from trainer_hooks.tensors.experts import expert_groups
from trainer_hooks.tensors.gradients import local_tensor, shards_of

KINDS = {"nan": float("nan"), "inf": float("inf"), "1e30": 1e30, "x300": 300.0}
PLACES = ("loss", "element", "all")
WARM_UP = 17
SHARDED = (
    *("fsdp2 nested", "hsdp", "sequence parallel", "fsdp2 x tp, sequence parallel"),
    *("experts in ddp", "marked experts in fsdp2"),
)
"""Those that are also tried where a part has no gradient, or a rank cannot measure its own."""
CLIP = 0.05
"""Below every norm here, so that it always clips."""


class Loop:
    """A training of one wrapped network, watched."""

    def __init__(self, wrapping: Wrapping, rank: int) -> None:
        self.wrapping = wrapping
        self.rank = rank
        self.model = wrapping.wrap(wrapping.net())
        self.optimizer = wrapping.optimizer(self.model)
        self.scaler = wrapping.scaler(self.model)
        self._evaluate()
        self.monitor = trainer_hooks.watch(self.model, self.optimizer, scaler=self.scaler)

    def _evaluate(self) -> None:
        """Look at the model before it trains, as loops do: some wrappers gather it for that."""
        self.model.eval()
        with torch.no_grad(), self.wrapping.computing():
            self.model(torch.zeros(4, 4, 6))
        self.model.train()

    @property
    def verdict(self) -> Verdict:
        """What the ranks have agreed on in the last step: elsewhere it is known one step later."""
        packer = device_of(self.monitor).packer
        return judge_on_device(packer.layout, packer.pack, torch.zeros((), dtype=torch.float64))

    @property
    def reduced(self) -> ReducedNumbers:
        """The numbers that the ranks have exchanged in the last step."""
        packer = device_of(self.monitor).packer
        return ReducedNumbers(packer.layout, packer.pack.tolist())

    def params(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's part of every gradient that it has, by name; safe to write to."""
        found = {}
        for name, param in zip(device_of(self.monitor).norms.names, self.params(), strict=True):
            if param.grad is not None:
                if param.grad.is_sparse:
                    param.grad = param.grad.coalesce()
                local = local_tensor(param.grad)
                local = local._values() if local.is_sparse else local
                if local.numel():
                    found[name] = local
        return found

    def backward(self, factor: float = 1.0) -> Tensor:
        """Run the micro-batches forward and backward; return the mean loss."""
        total = torch.zeros(())
        wrapping = self.wrapping
        replica = self.rank // wrapping.tensor_parallel // wrapping.context_parallel
        num = wrapping.micro_batches
        for i, batch in enumerate(batches(replica, num)):
            inputs, targets = (wrapping.part_of(part, self.rank) for part in batch)
            with nullcontext() if i == num - 1 else not_syncing(self.model):
                with self.wrapping.computing():
                    out = self.model(inputs)
                loss = (out.float() - targets).square().mean() * factor / num
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total += loss.detach()
        return total

    def squares(self) -> dict[str, float]:
        return dict(zip(device_of(self.monitor).norms.names, self.reduced.squares, strict=True))

    def state(self) -> list[Any]:
        """Return copies of everything that a skipped step may not change, on this rank."""
        tensors = [local_tensor(param.detach()) for param in self.params()]
        for param in self.params():
            moments = self.optimizer.state.get(param, {})
            tensors += [local_tensor(m) for m in moments.values() if isinstance(m, Tensor)]
        tensors += list(self.model.buffers())
        return [tensor.clone() for tensor in tensors]


def batches(replica: int, num: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the micro-batches of one replica: the same in every step."""
    generator = torch.Generator().manual_seed(1000 + replica)
    for _ in range(num):
        inputs = torch.randn(4, 4, 6, generator=generator)
        yield inputs, torch.randn(4, 4, 3, generator=generator)


# --------------------------------------------------------------------------------- the norms


def reference_squares(wrapping: Wrapping, world: int) -> dict[str, float]:
    """Return the squares of a bare network's gradients over all replicas' data, by name."""
    net = wrapping.net()
    replicas = wrapping.num_replicas(world)
    scale = SCALE if wrapping.scaled else 1.0
    for replica in range(replicas):
        for inputs, targets in batches(replica, wrapping.micro_batches):
            with wrapping.computing():
                out = net(inputs)
            loss = (out.float() - targets).square().mean() * scale / wrapping.micro_batches
            loss.backward()
    total = replicas * scale
    return {
        name: 0.0 if p.grad is None else (p.grad.to_dense().double() / total).square().sum().item()
        for name, p in net.named_parameters()
    }


def by_flat_parameter(names: list[str], squares: dict[str, float]) -> dict[str, float]:
    """Add the squares up by the flat parameter that holds them, where there are any."""
    owners = [name.removesuffix("_flat_param") for name in names if name.endswith("_flat_param")]
    if not owners:
        return squares
    sums = dict.fromkeys(names, 0.0)
    for name, square in squares.items():
        owner = max((o for o in owners if name.startswith(o)), key=len)
        sums[owner + "_flat_param"] += square
    return sums


def full_squares(loop: Loop) -> dict[str, float]:
    """Return the squares of whole gradients, gathered in the slow way that is surely right.

    None for FSDP1, whose parts know of no whole, and for experts of one name that are another one
    on each rank.
    """
    found = {}
    scale = 1.0 if loop.scaler is None else loop.scaler.get_scale()
    for name, param in zip(device_of(loop.monitor).norms.names, loop.params(), strict=True):
        is_apart = (
            getattr(getattr(param, "device_mesh", None), "size", int)() < dist.get_world_size()
        )
        if isinstance(loop.model, Fsdp1) or (name.startswith("experts") and is_apart):
            continue
        grad = torch.zeros(()) if param.grad is None else param.grad
        full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.to_dense()
        found[name] = (full.double() / scale).square().sum().item()
    return found


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5 if one.dtype == torch.float32 else 1e-2)


def norms(wrapping: Wrapping, rank: int, world: int) -> dict[str, Any]:
    """Measure one step's norms, and what the clip left of the gradients."""
    loop = Loop(wrapping, rank)
    with loop.monitor as monitor:
        loss = loop.backward()
        full = full_squares(loop)
        device_of(monitor).norms.align()
        scale = 1.0 if loop.scaler is None else loop.scaler.get_scale()
        with_gradient = [p for p in loop.params() if p.grad is not None]
        before = [local_tensor(p.grad).clone() / scale for p in with_gradient]
        monitor.step(loss, max_norm=CLIP)
    ours = loop.squares()
    coefficient = CLIP / loop.verdict.grad_norm.item()
    clipped = [
        _close(local_tensor(loop.optimizer.state[p]["exp_avg"]), g * coefficient * 0.1)
        for p, g in zip(with_gradient, before, strict=True)
        if "exp_avg" in loop.optimizer.state[p]
    ]
    # On gloo, FSDP2 of an older torch adds gradients up without averaging them.
    adds_up = TORCH < (2, 13) and hasattr(loop.model, "set_requires_gradient_sync")
    expected = full if wrapping.rounded or adds_up else reference_squares(wrapping, world)
    ours = {name.replace("experts.module.", "experts."): square for name, square in ours.items()}
    return {
        "ours": ours,
        "total": loop.verdict.grad_norm.item() ** 2,
        "expected": by_flat_parameter(list(ours), expected),
        "full": full,
        "clipped": all(clipped),
        "num_parameters": device_of(monitor).norms.num_parameters,
        "names": [name for name, _ in wrapping.net().named_parameters()],
        "true_num_parameters": sum(p.numel() for p in wrapping.net().parameters()),
        "faults": monitor.swallowed_errors,
    }


def short_of_a_gradient(wrapping: Wrapping, rank: int) -> dict[str, Any]:
    """Measure a step in which rank 1 has no gradient for one of its parts."""
    loop, name = Loop(wrapping, rank), "blocks.0.up.weight"
    with loop.monitor as monitor:
        loss = loop.backward()
        param = dict(zip(device_of(monitor).norms.names, loop.params(), strict=True))[name]
        if rank == 1:
            param.grad = None
        own = 0.0 if rank == 1 else local_tensor(param.grad).double().square().sum().item()
        monitor.step(loss)
    return {"own": own, "ours": loop.squares()[name]}


# -------------------------------------------------------------------------------- the faults


def poison(loop: Loop, place: str, value: float) -> str:
    """Change this rank's own gradients after backward; return which parameter's, if one."""
    grads = loop.gradients()
    relative = value == KINDS["x300"]
    if place == "all":
        for grad in grads.values():
            grad.mul_(value) if relative else grad.fill_(value)
        return ""
    if relative:
        scale = 1.0 if loop.scaler is None else loop.scaler.get_scale()
        value *= loop.verdict.grad_norm.item() * scale
    name, grad = next(iter(grads.items()))
    grad.view(-1)[0] = value
    return name


def fault(loop: Loop, place: str, kind: str) -> dict[str, Any]:
    """Train one step with a fault on rank 1 alone, and one without; say what they left."""
    value, here = KINDS[kind], loop.rank == 1
    before = loop.state()
    scale_before = None if loop.scaler is None else copy.deepcopy(loop.scaler.state_dict())
    loss = loop.backward(value if here and place == "loss" else 1.0)
    poisoned = poison(loop, place, value) if here and place != "loss" else ""
    rng = torch.get_rng_state()
    outcomes = [loop.monitor.step(loss, max_norm=CLIP)]
    same_rng = torch.equal(rng, torch.get_rng_state())
    after = loop.state()
    scale_after = None if loop.scaler is None else loop.scaler.state_dict()
    bits, reduced = int(loop.verdict.bits.item()), loop.reduced
    squares = loop.squares()
    outcomes.append(loop.monitor.step(loop.backward(), max_norm=CLIP))
    trained = loop.state()
    decisions = [outcome.decision for outcome in outcomes if outcome.decision is not None]
    return {
        "bits": bits,
        "clean_bits": int(loop.verdict.bits.item()),
        "decisions": [[d.step, d.action, d.acted, d.rule, d.reason] for d in decisions],
        "kept": len(before) == len(after) and all(map(torch.equal, before, after)),
        "same_rng": same_rng,
        "scale": [None if s is None else s["scale"] for s in (scale_before, scale_after)],
        "culprits": culprits(reduced, reduced.losses()),
        "poisoned": poisoned,
        "bad_names": [name for name, x in squares.items() if x - x != 0.0],
        "trained": not all(map(torch.equal, after, trained)),
        "finite": all(bool(torch.isfinite(t).all()) for t in trained if t.is_floating_point()),
    }


def faults(wrapping: Wrapping, rank: int) -> dict[str, Any]:
    """Warm up, then bring every fault in turn."""
    loop = Loop(wrapping, rank)
    with loop.monitor as monitor:
        for _ in range(WARM_UP):
            monitor.step(loop.backward(), max_norm=CLIP)
        found: dict[str, Any] = {
            f"{kind} in {place}": fault(loop, place, kind) for place in PLACES for kind in KINDS
        }
    return {
        "cases": found,
        "faults": monitor.swallowed_errors,
        "lag": device_of(monitor).readback.lag,
    }


def unmeasured(wrapping: Wrapping, rank: int) -> dict[str, Any]:
    """Train where our own measuring fails: first on rank 1 alone, then on all ranks."""

    def fail() -> Any:
        raise OSError(28, "No space left on device")

    loop, bits = Loop(wrapping, rank), []
    with loop.monitor as monitor:
        norms, measure = device_of(monitor).norms, device_of(monitor).norms.gradients
        for failing in ((), (1,), (0, 1, 2, 3), ()):
            norms.gradients = fail if rank in failing else measure
            before = loop.state()
            monitor.step(loop.backward(), max_norm=CLIP)
            bits.append(int(loop.verdict.bits.item()))
            assert not all(map(torch.equal, before, loop.state())), "the step did not train"
    params = dict(zip(norms.names, loop.params(), strict=True))
    shards = shards_of(params, {}, expert_groups(loop.model))
    digests = [local_tensor(p.detach()).double().sum().item() for p in loop.params()]
    return {"bits": bits, "held": list(zip(shards, digests, strict=True))}


def main(rank: int, folder: str, *, world: int, names: Sequence[str]) -> None:
    """Run all of it on this rank, one after another; a hang in one is a hang of all."""
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    withhold_each_outlier()
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    results: dict[str, dict[str, Any]] = {}
    known = WRAPPINGS[world] | SLOW
    for name in names:
        wrapping = known[name]
        found = results[name] = {}
        try:
            found["norms"] = norms(wrapping, rank, world)
            found["faults"] = faults(wrapping, rank)
            if name in SHARDED:
                found["short"] = short_of_a_gradient(wrapping, rank)
                found["unmeasured"] = unmeasured(wrapping, rank)
        except Exception as error:
            error.add_note(f"in {name!r} on rank {rank} of {world}")
            raise
        torch._dynamo.reset()
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # gloo aborts a process at its exit now and then; what was found is written
