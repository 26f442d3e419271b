"""The worlds of the bench: trainings by name, each healthy, poisoned, or with a damaged state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from vitals_bench.judgement.faults import FOR_GOOD, Course, Fault
from vitals_bench.judgement.games import GanTask, PpoTask, ReinforceTask
from vitals_bench.judgement.kinds import (
    AccumulatedTask,
    ByolTask,
    ContrastiveTask,
    CountingTask,
    DiffusionTask,
    DqnTask,
    EdgeTask,
    ExpertsTask,
    FlowTask,
    GrpoTask,
    LongTailTask,
    LowRankTask,
    MultitaskTask,
    PhysicsTask,
    QuantizedTask,
    RnnTask,
    ScheduledTask,
    SegmentationTask,
    Seq2seqTask,
    SharpnessTask,
    TripletTask,
    VaeTask,
    WganTask,
)
from vitals_bench.judgement.patterns import PatternsTask
from vitals_bench.judgement.regression import RegressionTask
from vitals_bench.judgement.tasks import Batch, Poison, Task
from vitals_bench.judgement.text import TextTask

Label = Literal["healthy", "poisoned", "damaged"]


class Make(Protocol):
    """Makes a task of a seed."""

    def __call__(self, *, seed: int) -> Task:
        """Return it."""


@dataclass(frozen=True, kw_only=True)
class SlicedTask(Task):
    """A batch dealt out among four ranks: what befalls it befalls the third one's slice alone."""

    whole: Task
    ranks: int = 4
    other: Task | None = None
    """Where a rank's slice comes from now and then."""
    share: float = 0.0
    """Share of the batches in which one rank has such a slice."""

    def model(self) -> nn.Module:
        """Return the task's untrained model."""
        return self.whole.model()

    def batch(self, index: int) -> Batch:
        """Return a batch; perhaps with a slice of the other task."""
        if self.is_evaluation(index):
            return (self.other or self.whole).batch(index)
        batch = self.whole.batch(index)
        if self.other is None or not self.chance(index, self.share):
            return batch
        rank = int(torch.randint(0, self.ranks, (1,), generator=self.generator(index, 5)))
        return self._with_slice(batch, self.other.batch(index), rank)

    def _with_slice(self, batch: Batch, other: Batch, rank: int) -> Batch:
        size = len(batch[0]) // self.ranks
        tensors = tuple(tensor.clone() for tensor in batch)
        for tensor, source in zip(tensors, other, strict=True):
            tensor[rank * size : (rank + 1) * size] = source[rank * size : (rank + 1) * size]
        return tensors

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each example."""
        return self.whole.losses(model, batch)

    def poison(self, batch: Batch, kind: Poison, index: int) -> Batch:
        """Return the batch with a poisoned slice."""
        return self._with_slice(batch, self.whole.poison(batch, kind, index), 2)


def sliced(*, seed: int, whole: Make, other: Make | None = None, share: float = 0.0) -> SlicedTask:
    """Return a task with its batches dealt out among four ranks."""
    task = whole(seed=seed)
    return SlicedTask(
        seed=seed,
        steps=task.steps,
        lr=task.lr,
        whole=task,
        other=None if other is None else other(seed=seed),
        share=share,
    )


@dataclass(frozen=True, kw_only=True)
class World:
    """A training and the truth about it."""

    name: str
    label: Label
    family: str
    """What is compared together in a table."""
    make: Make
    base: str
    """The world without the fault, whose unmonitored run is the clean one; a healthy one names
    itself."""
    fault: Fault | None = None

    @property
    def course(self) -> Course | None:
        """Course of the fault; None for a healthy training."""
        return None if self.fault is None else self.fault.course


WORLDS: dict[str, World] = {}


def _healthy(family: str, name: str, task: Callable[..., Task], **settings: Any) -> None:
    make = partial(task, **settings)
    WORLDS[name] = World(name=name, label="healthy", family=family, make=make, base=name)


def _faulty(family: str, base: str, name: str, fault: Fault) -> None:
    label: Label = "poisoned" if fault.is_of_the_data else "damaged"
    name, make = f"{base}-{name}", BASES[base]
    WORLDS[name] = World(name=name, label=label, family=family, make=make, base=base, fault=fault)


BASES: Mapping[str, Make] = {
    "gpt": TextTask,
    "memory": partial(TextTask, memorise=True),
    "regression": RegressionTask,
    "patterns": PatternsTask,
    "ranks-memory": partial(sliced, whole=partial(TextTask, memorise=True)),
    "ranks-regression": partial(sliced, whole=partial(RegressionTask, examples=64)),
    "ranks-patterns": partial(sliced, whole=partial(PatternsTask, examples=32)),
}
"""Trainings that faults happen to."""
POISONS: Mapping[str, tuple[Poison, ...]] = {
    "gpt": ("shuffle", "const"),
    "memory": ("shuffle",),
    "regression": ("shuffle", "x50", "const"),
    "patterns": ("shuffle", "x50"),
    "ranks-memory": ("shuffle",),
    "ranks-regression": ("shuffle", "const"),
    "ranks-patterns": ("shuffle", "x50"),
}
WINDOWS = (3, 10, 30)
TASKS: Mapping[str, Callable[..., Task]] = {
    "gpt": TextTask,
    "regression": RegressionTask,
    "patterns": PatternsTask,
}


def _register_memorising() -> None:
    family, settings = "memorising", {"steps": 800, "memorise": True}
    for lr in (1e-3, 4e-3, 1.5e-2, 4e-2):
        _healthy(family, f"memory-lr{lr:g}", TextTask, lr=lr, **settings)
    for lr in (1e-3, 4e-3, 1.5e-2):
        _healthy(family, f"memory-dropout-lr{lr:g}", TextTask, lr=lr, dropout=0.1, **settings)
    _healthy(family, "memory-tied", TextTask, lr=4e-3, tied=True, **settings)


def _register_hard() -> None:
    family = "hard batches"
    for name, task in TASKS.items():
        for percent in (0.5, 1.0, 2.0, 3.0, 5.0):
            _healthy(family, f"{name}-hard{percent:g}", task, steps=900, hard=percent / 100)
        if task is not PatternsTask:
            _healthy(family, f"{name}-every100", task, steps=1_000, every=100)
            _healthy("bursts", f"{name}-burst500", task, steps=1_600, burst=500)
        if task is not TextTask:
            for percent in (3, 6):
                settings = {"steps": 900, "heavy_weights": percent / 100}
                _healthy("heavy weights", f"{name}-weights{percent}", task, **settings)
    for name, examples in (("regression", 64), ("patterns", 32)):
        whole = partial(TASKS[name], examples=examples)
        for percent in (3, 12):
            task = partial(sliced, whole=whole, other=partial(whole, hard=1.0))
            _healthy("hard on one rank", f"ranks-{name}-hard{percent}", task, share=percent / 100)


def _register_changes() -> None:
    for length in (170, 200, 350):
        _healthy("blocks", f"gpt-blocks{length}", TextTask, steps=1_050, blocks=length)
    family = "changes"
    _healthy(family, "gpt-curriculum", TextTask, curriculum=250)
    _healthy(family, "gpt-length", TextTask, short=300)
    _healthy(family, "regression-new-task", RegressionTask, new=350)
    _healthy(family, "memory-new-task", TextTask, memorise=True, new=350)
    _healthy(family, "patterns-epochs", PatternsTask, steps=800, epoch=40, noise=1.0)
    _healthy(family, "patterns-restarts", PatternsTask, steps=800, restart=200, lr=1e-2)
    _healthy(family, "regression-batch-ramp", RegressionTask, steps=750, batch_ramp=True)
    _healthy("tails", "regression-heavy-tails", RegressionTask, steps=800, heavy_tails=True)
    _healthy("tails", "regression-hinge", RegressionTask, steps=900, hinge=True)


def _register_spikes() -> None:
    family, lr = "optimizer spikes", 3e-2
    _healthy(family, "regression-spikes", RegressionTask, steps=800, lr=lr)
    _healthy(family, "patterns-spikes", PatternsTask, steps=800, lr=lr)
    _healthy(family, "memory-spikes", TextTask, steps=800, lr=lr, memorise=True)
    fixed = partial(RegressionTask, steps=1_500)
    _healthy(family, "fixed-set-calm", fixed, lr=5e-3, fixed=4)
    _healthy(family, "fixed-set-spikes", fixed, lr=lr, fixed=4)
    _healthy(family, "fixed-set-noise", fixed, lr=lr, fixed=8, noise=0.3)


def _register_games() -> None:
    _healthy("adversarial", "gan", GanTask)
    _healthy("adversarial", "gan-tail", GanTask, tail=0.6)
    _healthy("adversarial", "gan-tail-lr", GanTask, tail=1.0, lr=5e-3)
    family = "reinforcement"
    _healthy(family, "reinforce", ReinforceTask)
    _healthy(family, "reinforce-jackpot", ReinforceTask, steps=300, jackpot=0.0006)
    _healthy(family, "reinforce-tail", ReinforceTask, steps=300, tail=True)
    _healthy(family, "ppo", PpoTask)


def _register_poison() -> None:
    for base, kinds in POISONS.items():
        _healthy("plain", base, BASES[base])
        on_one_rank = base.startswith("ranks-")
        family = "poison on one rank" if on_one_rank else "poison"
        for kind in kinds:
            for steps in (12,) if on_one_rank else WINDOWS:
                fault = Fault(kind="poison", poison=kind, steps=steps)
                _faulty(family, base, f"poison-{kind}{steps}", fault)
    for base in ("regression", "patterns"):
        for steps in (40, 200):
            _faulty("NaN", base, f"nan{steps}", Fault(kind="poison", poison="nan", steps=steps))
        _faulty("NaN", base, "nan-loss40", Fault(kind="nan_loss", steps=40))


def _register_damage() -> None:
    for base in ("regression", "patterns"):
        _faulty("overflow", base, "overflow", Fault(kind="overflow"))
    for base in ("gpt", "memory", "regression", "patterns"):
        rate = Fault(kind="rate", factor=30.0, steps=20)
        _faulty("rate x30 for 20", base, "rate20", rate)
        _faulty("rate x30 for good", base, "rate", replace(rate, steps=FOR_GOOD))
        _faulty("zeroed moments", base, "moments", Fault(kind="moments"))
        _faulty("a layer x10", base, "layer", Fault(kind="layer", factor=10.0))
        _faulty("rate creeps", base, "creep", Fault(kind="creep", steps=FOR_GOOD))


NEW_KINDS: Mapping[str, Make] = {
    "diffusion": DiffusionTask,
    "vae": VaeTask,
    "flow": FlowTask,
    "wgan": WganTask,
    "infonce": ContrastiveTask,
    "byol": ByolTask,
    "triplet": TripletTask,
    "moe": ExpertsTask,
    "seq2seq": Seq2seqTask,
    "rnn": RnnTask,
    "segmentation": SegmentationTask,
    "pinn": PhysicsTask,
    "gpt-fast": CountingTask,
    "cyclic": partial(ScheduledTask, steps=600, lr=3e-3),
    "one-cycle": partial(ScheduledTask, steps=600, lr=3e-3, shape="one-cycle"),
    "label-noise": partial(PatternsTask, steps=500, flips=0.5),
    "long-tail": LongTailTask,
    "edge-of-stability": EdgeTask,
    "lora": LowRankTask,
    "qat": QuantizedTask,
    "sam": SharpnessTask,
    "accumulation": AccumulatedTask,
    "multitask": MultitaskTask,
    "batch-of-one": partial(RegressionTask, steps=800, examples=1, lr=1e-3),
    "memorizing": partial(TextTask, memorise=True, steps=400, lr=1e-2),
    "hard-batches": partial(RegressionTask, steps=600, hard=0.03),
    "new-task": partial(RegressionTask, steps=600, new=300),
    "dqn": DqnTask,
    "grpo": GrpoTask,
}
KINDS = (
    *NEW_KINDS,
    *("ppo", "reinforce", "gan", "gan-tail", "gpt-curriculum", "gpt-length", "patterns-restarts"),
    *("patterns-epochs", "regression-heavy-tails", "regression-batch-ramp"),
    *("regression-weights3", "regression-hinge", "fixed-set-noise"),
)
"""Kinds of healthy training: each runs without a clip, with one, and with ``max_norm="auto"``."""
FAULT_KINDS = ("gpt-fast", "seq2seq", "diffusion", "moe", "segmentation", "regression")
"""Kinds that every one of ``FAULTS`` happens to."""
RANKS_KINDS = ("ranks-regression", "ranks-patterns")
"""Those of trainings on several ranks."""
TOKEN_KINDS = ("gpt-fast", "seq2seq")
"""Kinds with tokens as inputs, which no fault can make NaN, large or constant."""
_MIDDLE = 250
FAULTS: Mapping[str, Fault] = {
    "shuffle12": Fault(kind="poison", begin=_MIDDLE, steps=12),
    "const12": Fault(kind="poison", begin=_MIDDLE, steps=12, poison="const"),
    "x50-3": Fault(kind="poison", begin=_MIDDLE, steps=3, poison="x50"),
    "nan1": Fault(kind="poison", begin=_MIDDLE, steps=1, poison="nan"),
    "nan40": Fault(kind="poison", begin=_MIDDLE, steps=40, poison="nan"),
    "nan-loss": Fault(kind="nan_loss", begin=_MIDDLE, steps=5),
    "labels": Fault(kind="poison", begin=_MIDDLE, steps=FOR_GOOD),
    "repeat": Fault(kind="repeat", begin=_MIDDLE, steps=FOR_GOOD),
    "gradient-x1000": Fault(kind="gradient", begin=_MIDDLE, factor=1e3),
    "gradient-x30-20": Fault(kind="gradient", begin=_MIDDLE, steps=20, factor=30.0),
    "sign20": Fault(kind="gradient", begin=_MIDDLE, steps=20, factor=-1.0),
    "rate20": Fault(kind="rate", begin=_MIDDLE, steps=20, factor=30.0),
    "rate": Fault(kind="rate", begin=_MIDDLE, steps=FOR_GOOD, factor=30.0),
    "creep": Fault(kind="creep", begin=_MIDDLE, steps=FOR_GOOD),
    "moments": Fault(kind="moments", begin=_MIDDLE),
    "layer": Fault(kind="layer", begin=_MIDDLE, factor=10.0),
    "dead": Fault(kind="dead", begin=_MIDDLE),
    "flip": Fault(kind="flip", begin=_MIDDLE),
    "logits": Fault(kind="logits", begin=_MIDDLE, steps=FOR_GOOD, factor=1.02),
    "decay": Fault(kind="decay", begin=_MIDDLE, steps=FOR_GOOD, factor=3.0),
}
"""Faults by name, in the middle of a kind's training."""


def _register_kinds() -> None:
    for name, make in NEW_KINDS.items():
        _healthy("kinds", name, make)
    for base in (*FAULT_KINDS, *RANKS_KINDS):
        for name, fault in FAULTS.items():
            if base in TOKEN_KINDS and fault.poison != "shuffle":
                continue
            world = World(
                name=f"{base}!{name}",
                label="poisoned" if fault.is_of_the_data else "damaged",
                family=f"{name} in a kind",
                make=WORLDS[base].make,
                base=base,
                fault=fault,
            )
            WORLDS[world.name] = world


for _register in (
    _register_memorising,
    _register_hard,
    _register_changes,
    _register_spikes,
    _register_games,
    _register_poison,
    _register_damage,
    _register_kinds,
):
    _register()


def worlds_of(label: Label) -> Iterator[World]:
    """Yield the worlds of one label."""
    return (world for world in WORLDS.values() if world.label == label)


def shortened(world: World, steps: int) -> World:
    """Return the world with fewer steps and its fault in the middle: does it run at all."""
    fault = None if world.fault is None else replace(world.fault, begin=steps // 2)
    return replace(world, make=partial(_shorter, world.make, steps), fault=fault)


def _shorter(make: Make, steps: int, *, seed: int) -> Task:
    return replace(make(seed=seed), steps=steps)
