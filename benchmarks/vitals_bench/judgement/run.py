"""One training of a world, bare or with the library in its loop, and what became of it."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

import trainer_hooks
from trainvitals.auto_clip import AutoClip
from trainvitals.errors import TrainingHalted
from vitals_bench.judgement.faults import Fault
from vitals_bench.judgement.ledger import READ_EVERY, Ledger
from vitals_bench.judgement.tasks import Batch, Task
from vitals_bench.judgement.worlds import WORLDS, World, shortened
from vitals_bench.training import own_place

Policy = Literal[
    "none", "oracle", "observe", "guard", "guard+probe", "heal", "heal+probe", "guard+kind",
    "heal+kind", "guard+declared", "heal+declared",
]  # fmt: skip
"""``none``: no monitor. ``oracle``: none, and without the poisoned batches. ``observe``: a monitor
that never acts. The others watch in that mode, with a probe, or with the kind of loss declared.
``declared``: with a probe, the kind of loss, the schedule, and every change of the task."""
Clip = float | Literal["auto"] | None
Mode = Literal["observe", "guard", "heal"]
LAST_EVALUATIONS = (0.92, 0.94, 0.96, 0.98, 1.0)
"""Where in the training it is evaluated for its last word, which is the median."""
MOST_STEPS = 4
"""Times its length that a training may take, as a rollback that never ends would."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one training."""

    world: str
    clip: Clip
    policy: Policy
    seed: int
    ranks: int = 1
    """Processes it ran on."""
    first: float
    """The evaluation before the first step."""
    final: float
    """The median of the last evaluations."""
    digest: str
    """Of all parameters at the end, bit for bit."""
    attempted: int
    """Updates attempted, those that a rollback undid included."""
    seconds: float
    withheld: int = 0
    nonfinite: int = 0
    longest: int = 0
    withheld_steps: list[int] = []
    rollbacks: list[tuple[int, int, str]] = []
    """Each with its step, where it went, and its rule."""
    halted: str = ""
    """Why it was stopped, or empty."""
    readings: list[tuple[int, str, str, float | None, bool]] = []
    """Step, trigger, verdict, ratio, and whether the state was really damaged then."""
    advisories: dict[str, int] = {}
    """Findings that were not acted on, by kind."""
    notes: dict[str, int] = {}
    messages: dict[str, int] = {}
    """Alerts that notify or page, by name; an alert that lasts counts once."""
    pages: int = 0
    reported: int | None = None
    """Steps from the fault to the first finding or decision; None: nothing was reported."""
    errors: dict[str, int] = {}
    """What the library swallowed: there should be none."""
    error: str = ""
    """Why the benchmark itself could not run it."""


class NumberedBatches(Dataset[Batch]):
    """A task's batches with their numbers, poisoned where the world says so; a rank's part."""

    def __init__(
        self, task: Task, fault: Fault | None, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        self._task, self._fault = task, fault
        self._rank, self._num_ranks = rank, num_ranks

    def __len__(self) -> int:
        """Return the number of batches."""
        return self._task.steps

    def __getitem__(self, index: int) -> Batch:
        """Return one batch behind its number."""
        is_frozen = self._fault is not None and self._fault.repeats(index)
        batch = self._task.batch(self._fault.begin if is_frozen and self._fault else index)
        if self._fault is not None and self._fault.poisons(index):
            batch = self._task.poison(batch, self._fault.poison, index)
        if self._num_ranks > 1:
            batch = tuple(part.chunk(self._num_ranks)[self._rank] for part in batch)
        return (torch.tensor(index), *batch)


class Training:
    """A loop as people write it, and what the benchmark wants to know of it."""

    def __init__(self, world: World, seed: int, clip: Clip) -> None:
        torch.manual_seed(seed)
        self.task = world.make(seed=seed)
        self.model = self.task.model()
        self.rank, self.num_ranks = 0, 1
        self.wrapped = self.model
        """What the loop calls: the model in DDP, where there are several ranks."""
        if dist.is_initialized():
            self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
            self.wrapped = DistributedDataParallel(self.model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self.task.optimizer(self.parameters)
        self.clip = clip
        self.fault = world.fault
        self.attempted = 0
        self.damaged = False
        """Whether the state is damaged at this moment, as far as the world knows."""
        self._evaluations: dict[int, float] = {}
        self._marks = {int(self.task.steps * share) - 1 for share in LAST_EVALUATIONS}
        self.first = self.task.evaluate(self.model)

    def loader(self) -> DataLoader[Batch]:
        """Return the loader of the task's batches, in their order."""
        data = NumberedBatches(self.task, self.fault, rank=self.rank, num_ranks=self.num_ranks)
        return DataLoader(data, batch_size=None, collate_fn=_as_it_is)

    def loss_of(self, batch: Batch) -> Tensor:
        """Return the loss of a batch as the loader gave it: what a probe is."""
        return self.task.loss(self.wrapped, batch[1:])

    def backward(self, batch: Batch) -> Tensor:
        """Set the rate, let the fault happen, and return the loss after its backward."""
        index, fault = int(batch[0]), self.fault
        rate = self.task.learning_rate(index)
        if fault is not None:
            rate *= fault.rate_factor(self.attempted)
            fault.damage(self.model, self.optimizer, self.attempted)
            self.damaged = self.damaged or fault.damages(self.attempted)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parts = self.task.collect(self.model, index) if self.task.is_on_policy else batch[1:]
        loss = self.task.loss(self.wrapped, parts)
        if fault is not None and fault.spoils_loss(self.attempted):
            loss = loss * math.nan
        self.task.backward(self.wrapped, loss, parts)
        factor = 1.0 if fault is None else fault.gradient_factor(self.attempted)
        if factor != 1.0:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)
        self.attempted += 1
        return loss.detach()

    def after(self, batch: Batch) -> None:
        """Evaluate where it is time."""
        if int(batch[0]) in self._marks:
            self._evaluations[int(batch[0])] = self.task.evaluate(self.model)

    def final(self) -> float:
        """Return the median of the last evaluations; of what there is now, if there are none."""
        values = list(self._evaluations.values()) or [self.task.evaluate(self.model)]
        return statistics.median(value if math.isfinite(value) else math.inf for value in values)

    def digest(self) -> str:
        """Return a hash of all parameters and buffers, bit for bit."""
        hashed = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            hashed.update(tensor.detach().contiguous().numpy().tobytes())
        return hashed.hexdigest()[:16]


def _as_it_is(batch: Any) -> Any:
    return batch


def clip_automatically(parameters: Sequence[nn.Parameter], clip: AutoClip, step: int) -> None:
    """Clip as ``max_norm="auto"`` does, without a monitor."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float64)
    norm = torch.stack(norms).square().sum().sqrt()
    limit = clip.limit(step)
    if limit is not None and norm.item() > limit:
        torch._foreach_div_(gradients, (norm / limit).float())
    clip.add(step, norm.item())


def clip_exactly(parameters: Sequence[nn.Parameter], max_norm: float) -> None:
    """Clip as ``clip_grad_norm_`` does, but by a norm summed in float64.

    So does the library; torch's own norm rounds otherwise, and a small training soon goes elsewhere
    by that alone.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float64)
    norm = torch.stack(norms).square().sum().sqrt()
    divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    torch._foreach_div_(gradients, divisor.float())


def train_bare(training: Training, *, leaves_out: bool = False) -> None:
    """Train without any monitor; ``leaves_out`` skips poisoned batches."""
    parameters, auto_clip = training.parameters, AutoClip()
    for batch in training.loader():
        fault = training.fault
        if leaves_out and fault is not None and fault.poisons(int(batch[0])):
            continue
        training.backward(batch)
        if training.clip == "auto":
            clip_automatically(parameters, auto_clip, training.attempted - 1)
        elif training.clip is not None:
            clip_exactly(parameters, training.clip)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.after(batch)


class TaskSchedule(LRScheduler):
    """The task's own learning rates as a scheduler, which a loop can declare."""

    def __init__(self, optimizer: Optimizer, task: Task) -> None:
        self._task = task
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the task, which a checkpoint cannot hold."""
        return {key: value for key, value in super().state_dict().items() if key != "_task"}

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Return the rate of every group."""
        return [self._task.learning_rate(self.last_epoch)] * len(self.optimizer.param_groups)


def train_watched(
    training: Training, mode: Mode, *, probe: bool, declares: Literal["", "kind", "declared"]
) -> dict[str, Any]:
    """Train with the library in the loop; return what it did, as fields of an Outcome."""
    options: dict[str, Any] = {}
    if declares:
        options["loss_kind"] = training.task.loss_kind
    if declares == "declared":
        options["schedulers"] = TaskSchedule(training.optimizer, training.task)
    changes = training.task.changes if declares == "declared" else ()
    halted = ""
    damage: dict[tuple[int, int], bool] = {}
    with (
        own_place() if training.num_ranks == 1 else nullcontext(),
        trainer_hooks.watch(
            training.wrapped,
            training.optimizer,
            mode=mode,
            checkpoints=True if mode == "heal" else None,
            **options,
        ) as monitor,
    ):
        ledger = Ledger(monitor.run_id, loss_kind=options.get("loss_kind", "minimize"))
        feed: dict[str, Any] = {}
        if probe and not training.task.is_on_policy:
            feed["probe"] = training.loss_of
        try:
            batches = cast("Iterator[Batch]", monitor.batches(training.loader(), **feed))
            for batch in batches:
                if int(batch[0]) in changes:
                    monitor.expect("the task changes")
                loss = training.backward(batch)
                damage[monitor.attempt, monitor.step_index] = training.damaged
                outcome = monitor.step(loss, max_norm=training.clip)
                if outcome.rolled_back_to is not None:
                    fault = training.fault
                    training.damaged = (
                        fault is not None and fault.rate_factor(training.attempted) > 1.0
                    )
                training.after(batch)
                if training.attempted % READ_EVERY == 0:
                    ledger.read()
                if training.attempted > MOST_STEPS * training.task.steps:
                    halted = "the bench: it never ends"
                    break
        except TrainingHalted as error:
            halted = str(error)
        errors = dict(monitor.swallowed_errors)
        monitor.close()
        ledger.read()
        ledger.add_fleet_findings()
    begin = None if training.fault is None else training.fault.begin
    return {"halted": halted, "errors": errors, **_recorded(ledger, damage, begin)}


def _recorded(
    ledger: Ledger, damage: Mapping[tuple[int, int], bool], begin: int | None
) -> dict[str, Any]:
    """Return what the run wrote down of itself.

    Args:
        ledger: of the run.
        damage: whether the state was damaged, by attempt and step.
        begin: of the fault; None: the run is healthy.
    """
    kinds = [f.kind for f in ledger.findings if f.level == "advisory"]
    return {
        "withheld": ledger.withheld,
        "nonfinite": ledger.nonfinite,
        "longest": ledger.longest,
        "withheld_steps": ledger.withheld_steps[:200],
        "rollbacks": [(d.step, d.rollback_to_step, d.rule) for d in ledger.rollbacks()],
        "readings": [
            (step, read.trigger, read.verdict, read.ratio, damage.get((attempt, step), False))
            for attempt, step, read in ledger.readings
        ],
        "advisories": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "notes": dict(ledger.notes),
        "messages": ledger.messages(),
        "pages": ledger.num_pages(),
        "reported": None if begin is None else ledger.reported_after(begin),
    }


def run_one(
    world: str, *, clip: Clip, policy: Policy, seed: int, steps: int | None = None
) -> Outcome:
    """Train a world once and return what became of it; ``steps`` shortens it."""
    chosen = WORLDS[world] if steps is None else shortened(WORLDS[world], steps)
    return run_world(chosen, clip=clip, policy=policy, seed=seed)


def run_world(world: World, *, clip: Clip, policy: Policy, seed: int) -> Outcome:
    """Train once and return what became of it."""
    begin = time.monotonic()
    training = Training(world, seed, clip)
    watched: dict[str, Any] = {}
    if policy in ("none", "oracle"):
        train_bare(training, leaves_out=policy == "oracle")
    else:
        mode, _, extra = policy.partition("+")
        watched = train_watched(
            training,
            cast("Mode", mode),
            probe=extra in ("probe", "declared"),
            declares="kind" if extra == "kind" else "declared" if extra == "declared" else "",
        )
    return Outcome(
        world=world.name,
        clip=clip,
        policy=policy,
        seed=seed,
        ranks=training.num_ranks,
        first=training.first,
        final=training.final(),
        digest=training.digest(),
        attempted=training.attempted,
        seconds=round(time.monotonic() - begin, 2),
        **watched,
    )
