"""What each of two real ranks does in ``test_torchtitan``; results go to a file by rank."""

import gc
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.script import state_of
from tests.integrations.trainings.torchtitan import (
    IGNORE_INDEX,
    Trainer,
    distributed,
    job,
)
from trainer_hooks.integrations.torchtitan import attach
from trainvitals.errors import TrainingHalted, UsageError

NAN = float("nan")
HERE = Path()
KEEP = {
    "checkpoint__enable": True,
    "checkpoint__interval": 2,
    "checkpoint__last_save_model_only": False,
}
NAMES = ("forward_backward_step", "train")


class Spoiled(Trainer):
    """Has faults at its own steps, which count from 1, on rank 1 alone."""

    bad: Any = ()
    acts: Any = MappingProxyType({})

    def train_step(self, data_iterator: Any) -> None:
        before = self.bits()
        super().train_step(data_iterator)
        after = self.bits()
        self.changed = getattr(self, "changed", [])
        self.changed.append(not all(map(torch.equal, before, after)))

    def bits(self) -> list[torch.Tensor]:
        live = [
            tensor
            for part, optimizer in zip(self.model_parts, self.optimizers, strict=True)
            for tensor in state_of(part, optimizer)
        ]
        return [getattr(t, "to_local", lambda t=t: t)().detach().clone() for t in live]

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        if self.step in self.acts:
            self.acts[self.step](self)
        loss = super().forward_backward_step(**batch)
        if self.step in self.bad and dist.get_rank() == 1:
            params = [p for p in self.model_parts[0].parameters() if p.grad is not None]
            # One whose gradient lies as it does: tensor parallel ones may be laid out anew.
            like = (getattr(p.grad, "placements", 0) == getattr(p, "placements", 0) for p in params)
            grad = params[list(like).index(True)].grad
            getattr(grad, "to_local", lambda: grad)().view(-1)[0] = NAN
        return loss


class LaterTrainer(Trainer):
    """Steps as torchtitan does from August 2026 on: what is not finite ends the job."""

    def train_step(self, data_iterator: Any) -> None:
        self.optimizers.zero_grad()
        batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        tokens = torch.tensor(sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batches))
        mesh = self.parallel_dims.get_mesh("batch")
        all_tokens = torch.tensor(distributed.dist_sum(tokens, mesh))
        total = torch.zeros(())
        loss_is_finite = torch.ones((), dtype=torch.int32)
        for input_dict, labels in batches:
            loss = self.forward_backward_step(
                input_dict=input_dict, labels=labels, global_valid_tokens=all_tokens
            ).detach()
            loss_is_finite.logical_and_(torch.isfinite(loss).all())
            total.add_(loss)
        norm = distributed.clip_grad_norm_(
            list(self.model_parts[0].parameters()), self.job_config.training.max_norm
        )
        dist.all_reduce(loss_is_finite, op=dist.ReduceOp.MIN)
        finite = loss_is_finite.logical_and(torch.isfinite(norm).all())
        torch._assert_async(finite, f"not finite at step {self.step}")
        self.optimizers.step()
        self.lr_schedulers.step()
        loss = distributed.dist_sum(total, mesh)
        self.metrics_processor.log(self.step, loss, loss, norm.item())


class Asserting(Spoiled, LaterTrainer):
    """The same faults in the later train step."""


def made(kind: type[Spoiled], name: str, *, steps: int, **settings: Any) -> Spoiled:
    """Return a trainer; settings are the job's, ``section__name``."""
    here = HERE / name
    (here / "shm").mkdir(parents=True, exist_ok=True)
    os.environ |= {"VITALS_DIR": str(here / "runs"), "VITALS_SHM": str(here / "shm")}
    config = job(here, steps)
    for key, value in settings.items():
        section, _, word = key.partition("__")
        setattr(getattr(config, section), word, value)
    return kind(config)


def summary(trainer: Spoiled, attached: Any, **more: Any) -> dict[str, Any]:
    """Return how it went, and what is left of the guard."""
    left = [name for name in NAMES if name in vars(trainer)]
    left += ["log"] if "log" in vars(trainer.metrics_processor.logger) else []
    left += ["dcp_load"] if "dcp_load" in vars(trainer.checkpointer) else []
    left += ["state"] if "vitals" in trainer.checkpointer.states else []
    names = [getattr(optimizer.step, "__name__", "") for optimizer in trainer.optimizers]
    left += ["step"] if set(names) != {"step"} else []
    return {
        "changed": trainer.changed,
        "left": left,
        "step": attached.step_index,
        "faults": attached.swallowed_errors,
        **more,
    }


# ---------------------------------------------------------------------------------- the cases


def ddp() -> dict[str, Any]:
    dims = {"parallelism__data_parallel_replicate_degree": 2}
    trainer = made(Spoiled, "ddp", steps=6, parallelism__data_parallel_shard_degree=1, **dims)
    trainer.bad = (4,)
    attached = attach(trainer)
    trainer.train()
    return summary(trainer, attached)


def failing() -> dict[str, Any]:
    trainer = made(Spoiled, "failing", steps=6)

    def boom(_: Any) -> None:
        raise RuntimeError("boom")

    trainer.acts = {3: boom}
    attached = attach(trainer)
    again = ""
    try:
        attach(trainer)
    except UsageError as error:
        again = str(error)
    with suppress(RuntimeError):
        trainer.train()
    return summary(trainer, attached, again=again)


def halting() -> dict[str, Any]:
    trainer = made(Spoiled, "halting", steps=20)

    def break_parameter(trainer: Spoiled) -> None:
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(trainer.model_parts[0].parameters()).to_local().view(-1)[0] = NAN

    trainer.acts = {3: break_parameter}
    attached = attach(trainer)
    halted = ""
    try:
        trainer.train()
    except TrainingHalted as error:
        halted = str(error)
    return summary(trainer, attached, halted=halted)


def healing() -> dict[str, Any]:
    """A weight of rank 1 turns NaN after a snapshot is healthy: both go back, and train on."""
    trainer = made(Spoiled, "healing", steps=70)

    def break_parameter(trainer: Spoiled) -> None:
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(trainer.model_parts[0].parameters()).to_local().view(-1)[0] = NAN
        trainer.acts = {}

    trainer.acts = {60: break_parameter}
    attached = attach(trainer, mode="heal")
    back: list[int] = []
    attached.when_rolled_back(back.append)
    trainer.train()
    (schedule,) = trainer.lr_schedulers
    params = [p.to_local() for p in trainer.model_parts[0].parameters()]
    return summary(
        trainer, attached, back=back, last=trainer.step, rate_at=schedule.last_epoch,
        finite=all(bool(p.isfinite().all()) for p in params),
    )  # fmt: skip


def off() -> dict[str, Any]:
    trainer = made(Spoiled, "off", steps=4, **KEEP)
    trainer.bad = (3,)
    before = set(vars(trainer))
    attached = attach(trainer, mode="off")
    (optimizer,) = trainer.optimizers
    untouched = set(vars(trainer)) == before and "stands_in_for" not in vars(optimizer.step)
    trainer.train()
    return summary(trainer, attached, untouched=untouched)


def resuming(name: str, **settings: Any) -> dict[str, Any]:
    """Train for 4 steps, then in a new trainer from its checkpoint for 4 more."""
    keep = {**KEEP, **settings}
    first = made(Spoiled, name, steps=4, **keep)
    attached = attach(first)
    saved: dict[str, Any] = {}
    real = attached.state_dict
    attached.state_dict = lambda: (saved.update(real()), real())[1]
    first.train()
    second = made(Spoiled, name, steps=8, **keep)
    second.bad = (7,)
    seen: dict[str, Any] = {}
    again = attach(second)
    second.acts = {5: lambda _: seen.update(again.state_dict())}
    second.train()
    kept = [word for word in saved if seen[word] == saved[word]]
    return summary(second, again, kept=kept, begins=seen["step"])


def adopting() -> dict[str, Any]:
    """Go on from a checkpoint without a state, with one, and without one again."""
    plain = made(Spoiled, "adopting", steps=2, **KEEP)
    plain.train()
    guarded = made(Spoiled, "adopting", steps=4, **KEEP)
    attached = attach(guarded)
    guarded.train()
    bare = made(Spoiled, "adopting", steps=6, **KEEP)
    bare.train()
    return summary(guarded, attached, after=bare.step)


def asserting() -> dict[str, Any]:
    """A gradient, and then a loss, that is not finite."""
    trainer = made(Asserting, "asserting", steps=8, training__global_batch_size=16)
    trainer.bad = (4,)
    real = trainer.loss_fn
    trainer.loss_fn = lambda pred, labels: (
        real(pred, labels) * (NAN if trainer.step == 6 and dist.get_rank() == 1 else 1.0)
    )
    attached = attach(trainer)
    trainer.train()
    return summary(trainer, attached)


def asserting_observed() -> dict[str, Any]:
    trainer = made(Asserting, "asserting-observed", steps=8)
    trainer.bad = (4,)
    attached = attach(trainer, mode="observe")
    said = ""
    try:
        trainer.train()
    except RuntimeError as error:
        said = str(error)
    return summary(trainer, attached, said=said)


def more_calls_than_said() -> dict[str, Any]:
    trainer = made(Spoiled, "more-calls", steps=6)
    batch = {}
    inner = trainer.forward_backward_step
    trainer.forward_backward_step = lambda **given: (batch.update(given), inner(**given))[1]
    attached = attach(trainer)
    once_more = trainer.forward_backward_step
    said = ""

    def twice(**given: Any) -> torch.Tensor:
        once_more(**given)
        return once_more(**given)

    trainer.forward_backward_step = twice
    try:
        trainer.train()
    except UsageError as error:
        said = str(error)
    return {"said": said, "step": attached.step_index}


def more_calls_later() -> dict[str, Any]:
    """One step calls twice, with a NaN in what the second call adds."""
    trainer = made(Spoiled, "more-calls-later", steps=6)
    attached = attach(trainer)
    once = trainer.forward_backward_step

    def sometimes_twice(**given: Any) -> torch.Tensor:
        loss = once(**given)
        if trainer.step == 4:
            trainer.bad = (4,)
            once(**given)
            trainer.bad = ()
        return loss

    trainer.forward_backward_step = sometimes_twice
    trainer.train()
    return summary(trainer, attached)


def in_backward() -> dict[str, Any]:
    trainer = made(Spoiled, "in-backward", steps=1, optimizer__early_step_in_backward=True)
    try:
        attach(trainer)
    except UsageError as error:
        return {"said": str(error)}
    return {"said": ""}


def llama(name: str, **settings: Any) -> dict[str, Any]:
    """Train torchtitan's own Llama 3 as it parallelizes it; part of the labels do not count."""
    trainer = made(
        Spoiled,
        name,
        steps=6,
        model__name="llama",
        model__flavor="tiny",
        training__seq_len=32,
        parallelism__data_parallel_shard_degree=1,
        **settings,
    )
    trainer.bad = (4,)
    attached = attach(trainer)
    trainer.train()
    return summary(trainer, attached)


def pipeline(name: str, schedule: str) -> dict[str, Any]:
    """Train Llama 3 in torchtitan's own pipeline."""
    settings = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule}
    return llama(name, **{f"parallelism__{key}": value for key, value in settings.items()})


CASES = {
    "ddp": ddp,
    "failing": failing,
    "halting": halting,
    "healing": healing,
    "off": off,
    "resuming": lambda: resuming("resuming"),
    "resuming, async": lambda: resuming("resuming-async", checkpoint__async_mode="async"),
    "adopting": adopting,
    "asserting": asserting,
    "asserting, observed": asserting_observed,
    "more calls than said": more_calls_than_said,
    "more calls later": more_calls_later,
    "in backward": in_backward,
    "tensor parallel": lambda: llama("tensor-parallel", parallelism__tensor_parallel_degree=2),
    "pipeline": lambda: pipeline("pipeline", "1F1B"),
    "pipeline, interleaved": lambda: pipeline("pipeline-interleaved", "Interleaved1F1B"),
}


def main(folder: Path) -> None:
    """Play every case."""
    global HERE
    HERE = folder
    torch.set_num_threads(1)
    os.environ["VITALS_AGENT"] = "off"
    dist.init_process_group("gloo")
    results = {}
    only = os.environ.get("ONLY_CASE")
    for name, play in CASES.items():
        if only and name != only:
            continue
        try:
            results[name] = play()
        except Exception as error:
            error.add_note(f"in {name!r} on rank {dist.get_rank()}")
            raise
        gc.collect()  # torchtitan turned it off
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
