"""One rank of small trainings in which a bit flips: started by ``measure``, over gloo.

The library stands in the loop as in anybody's; the fault is put into a tensor by its bits.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainer_hooks import CheckpointSettings, watch
from trainer_hooks.recovery import replicas
from trainer_hooks.tensors.gradients import local_tensor
from trainvitals.records import DecisionMade, Finding, FindingRaised

EVERY = 5
"""Steps of a round, for the 50 of users: the trainings are short."""
FLIP_STEP = 12
HEALED_STEPS = 36
"""So that a round has passed behind the replay."""
BITS = {
    "sign": (31, 31),
    "exponent, high": (28, 30),
    "exponent, low": (23, 27),
    "mantissa, high": (16, 22),
    "mantissa, middle": (8, 15),
    "mantissa, low": (0, 7),
}
"""Classes of the bits of a float32: the lowest and the highest."""
TARGETS = ("weight", "moment", "gradient")
KINDS = ("DDP", "DDP, bf16", "DDP, accumulation", "DDP, PowerSGD", "DDP, compiled", "FSDP2, HSDP")


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One flip."""

    target: Literal["weight", "moment", "gradient"]
    bits: str
    bit: int
    rank: int
    layer: int
    element: int
    heals: bool

    @property
    def tensor(self) -> str:
        """The name of the parameter that it is of, as findings name it."""
        return f"{self.layer}.weight"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it."""

    trial: Trial
    ranks: int
    left_trace: bool
    """Whether any tensor differed between ranks once the flip was made; without rollbacks, at the
    end."""
    seen_after: int | None
    is_tensor_right: bool
    named: int
    """The rank; -1 where nobody was."""
    is_as_clean: bool
    """Whether the weights ended as those of the run without a flip, bit for bit."""


class Healthy(msgspec.Struct, frozen=True, kw_only=True):
    """Reports in a training without any flip."""

    kind: str
    ranks: int
    checks: int
    """Tensors that were compared, each time one was."""
    alarms: int
    abstains: bool


def steps_of(trial: Trial | None) -> int:
    """Return how long is trained: until all that may differ had its turn, or was healed."""
    if trial is None or trial.heals:
        return HEALED_STEPS
    return FLIP_STEP + EVERY * (2 if trial.target == "weight" else 11) + 3


def trials(ranks: int, *, times: int, seed: int = 0) -> Iterator[Trial]:
    """Yield the flips of a world, the same on all ranks."""
    rng = random.Random(1000 * seed + ranks)
    for heals in (False, True):
        for target in TARGETS:
            for name, (low, high) in BITS.items():
                for nth in range(times):
                    yield Trial(
                        target=target,  # type: ignore[arg-type]
                        bits=name,
                        bit=rng.randint(low, high),
                        rank=nth % ranks,
                        layer=rng.choice((0, 2, 4)),
                        element=rng.randrange(512),
                        heals=heals,
                    )


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = ((16, 64), (64, 64), (64, 16))
    layers = [layer for a, b in sizes for layer in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def _batches(count: int) -> list[Tensor]:
    return [torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def _flip(tensor: Tensor, trial: Trial) -> None:
    words = tensor.detach().view(-1).view(torch.int32)
    words[trial.element % words.numel()] ^= -(2**31) if trial.bit == 31 else 1 << trial.bit


class Played:
    """One watched training."""

    def __init__(self, rank: int, folder: Path, *, heals: bool) -> None:
        self.rank = rank
        self.model = DistributedDataParallel(_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        settings: dict[str, Any] = {}
        if heals:
            settings["checkpoints"] = CheckpointSettings(
                directory=folder / "kept", healthy_after=3, snapshot_every=4, save_every=10**6
            )
        self.monitor = watch(
            self.model, self.optimizer, mode="heal" if heals else "guard", dir=folder, **settings
        )
        self.left_trace = False

    def run(self, trial: Trial | None) -> None:
        """Train, with the flip where there is one."""
        is_flipped = False
        for batch in self.monitor.batches(_batches(steps_of(trial))):
            is_due = trial is not None and not is_flipped and self.monitor.step_index == FLIP_STEP
            is_mine = is_due and trial is not None and trial.rank == self.rank
            weight = self.model.module[trial.layer].weight if trial is not None else None
            if is_mine and trial is not None and weight is not None:
                if trial.target == "weight":
                    _flip(weight, trial)
                elif trial.target == "moment":
                    _flip(self.optimizer.state[weight]["exp_avg"], trial)
            loss = self.model(batch + 0.01 * self.rank).square().mean()
            loss.backward()
            if is_mine and trial is not None and trial.target == "gradient":
                assert weight is not None and weight.grad is not None, "DDP has just summed it"
                _flip(weight.grad, trial)
            self.monitor.step(loss)
            if is_due:
                is_flipped, self.left_trace = True, self._differs()
        if trial is not None and not trial.heals:
            # A moment's last bit may be forgotten before it has moved any weight.
            self.left_trace = self._differs()

    def _differs(self) -> bool:
        states = [t for s in self.optimizer.state.values() for t in s.values()]
        tensors = [*(p.detach() for p in self.model.parameters()), *states]
        own = b"".join(_flat(tensor).numpy().tobytes() for tensor in tensors)
        states_of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states_of_all, own)
        return len(set(states_of_all)) > 1


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


def _outcome(trial: Trial, played: Played, events: list[Any], clean: list[bytes]) -> Outcome:
    findings: list[Finding] = [e.finding for e in events if isinstance(e, FindingRaised)]
    decided = [e.decision for e in events if isinstance(e, DecisionMade)]
    accused = [(f.step, f.rank, f.reason) for f in findings if f.kind == "replica_corrupted"]
    accused += [(d.step, d.rank, d.reason) for d in decided if d.rule == "replica_corrupted"]
    accused.sort()
    named = accused[0][1] if accused else -1
    replayed = [f.rank for f in findings if f.kind == "replica_named"]
    if named < 0 and replayed:
        named = replayed[0]
    return Outcome(
        trial=trial,
        ranks=dist.get_world_size(),
        left_trace=played.left_trace,
        seen_after=accused[0][0] - FLIP_STEP if accused else None,
        is_tensor_right=bool(accused) and trial.tensor in accused[0][2],
        named=named,
        is_as_clean=_weights(played.model) == clean,
    )


def _weights(model: nn.Module) -> list[bytes]:
    return [_flat(local_tensor(p.detach())).numpy().tobytes() for p in model.parameters()]


def _play(rank: int, trial: Trial | None, *, heals: bool, events: list[Any]) -> Played:
    """Train once; on rank 0 what it wrote is added to ``events``."""
    base = [tempfile.mkdtemp(dir=_ROOT[0]) if rank == 0 else ""]
    dist.broadcast_object_list(base)
    played = Played(rank, Path(base[0]), heals=heals)
    hear(played.monitor, events)
    with played.monitor:
        played.run(trial)
    return played


def hear(monitor: Any, events: list[Any]) -> None:
    """Have what the monitor writes of the run put into a list as well."""
    emitter = monitor._run.emitter
    write = emitter.event

    def event(event: Any, **place: Any) -> None:
        events.append(event)
        write(event, **place)

    emitter.event = event


_ROOT: list[str] = [""]


def flips(rank: int, ranks: int, times: int) -> list[Outcome]:
    """Return what became of every flip."""
    replicas.ROUND = EVERY
    clean = _weights(_play(rank, None, heals=True, events=[]).model)
    outcomes = []
    for trial in trials(ranks, times=times):
        events: list[Any] = []
        played = _play(rank, trial, heals=trial.heals, events=events)
        outcomes.append(_outcome(trial, played, events, clean))
    return outcomes


# ------------------------------------------------------------------------- nothing is wrong


def healthy(rank: int, ranks: int, steps: int) -> list[Healthy]:
    """Return the reports in trainings without any fault; all tensors are compared each step."""
    replicas.ROUND = 1
    return [_healthy(kind, rank, ranks, steps) for kind in KINDS]


def _healthy(kind: str, rank: int, ranks: int, steps: int) -> Healthy:
    model: Any = _model()
    state: dict[str, Any] = {}
    if kind == "FSDP2, HSDP":
        sides = (ranks // 2, 2) if ranks % 2 == 0 and ranks > 2 else (ranks, 1)
        mesh = dist.device_mesh.init_device_mesh("cpu", sides, mesh_dim_names=("dp", "shard"))
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    if kind == "DDP, PowerSGD":
        state["hook"] = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=4)
        model.register_comm_hook(state["hook"], powerSGD_hook.powerSGD_hook)
    if kind == "DDP, compiled":
        model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=kind != "FSDP2, HSDP")
    base = [tempfile.mkdtemp(dir=_ROOT[0]) if rank == 0 else ""]
    dist.broadcast_object_list(base)
    events: list[Any] = []
    generator = torch.Generator().manual_seed(rank)
    with watch(model, optimizer, dir=base[0], state=state) as monitor:
        hear(monitor, events)
        compared = monitor._run.replicas
        for _ in range(steps):
            backward = partial(_backward, model, generator, kind)
            monitor.step(backward(monitor.micro))
    ours = ("replica_corrupted", "settings_differ")
    alarms = [e for e in events if isinstance(e, FindingRaised) and e.finding.kind in ours]
    checks = 0 if compared is None else steps * len(compared.keys)
    return Healthy(kind=kind, ranks=ranks, checks=checks, alarms=len(alarms), abstains=not checks)


def _backward(
    model: Any, generator: torch.Generator, kind: str, micro: Callable[[Tensor], None]
) -> Tensor:
    count = 3 if kind == "DDP, accumulation" else 1
    for i in range(count):
        batch = torch.randn(16, 16, generator=generator)
        waits = nullcontext() if i == count - 1 else model.no_sync()
        half = torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "DDP, bf16")
        with waits:
            with half:
                loss: Tensor = model(batch).square().mean()
            loss.backward()
        if count > 1:
            micro(loss)
    return loss


def main(argv: list[str]) -> None:
    """Play one part of the benchmark; rank 0 writes what came of it."""
    part, folder, number = argv
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _ROOT[0] = folder
    play: Callable[[int, int, int], Any] = flips if part == "flips" else healthy
    outcomes = play(rank, ranks, int(number))
    if rank == 0:
        Path(folder, "outcomes.json").write_bytes(msgspec.json.encode(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
