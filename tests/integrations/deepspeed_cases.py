"""What each of two real ranks does in ``test_deepspeed``; results go to a file by rank."""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.integrations.script import SETTINGS, Script
from tests.integrations.trainings.deepspeed import (
    BFLOAT16,
    FLOAT16,
    WIDE,
    gradients,
    is_stage_3,
    make_engine,
    stage,
    state,
)
from tests.support.inside import probe_of, run_of
from tests.trainer_hooks.probing import ask
from trainer_hooks import SignalSettings
from trainer_hooks.integrations.deepspeed import attach
from trainvitals.errors import TrainingHalted, UsageError

NAN = float("nan")
HEALED, DAMAGED_AT = 75, 60
"""Steps of a run that goes back, and the step of the damage: snapshots at 0 and about 30."""
SAVED_AT, LOADED_AT = 20, 45
"""Step of a checkpoint, and of loading it again in mid-run."""
WARM = 18
"""Steps after which the finite rules know the run."""

LOW = FLOAT16 | {"initial_scale_power": 8}
"""Low enough for a spike that is no overflow."""

KINDS = {
    "no ZeRO": {},
    "no ZeRO, bfloat16": BFLOAT16,
    "no ZeRO, float16": {"fp16": LOW},
    "ZeRO 1": stage(1),
    "ZeRO 1, bfloat16": stage(1, **BFLOAT16),
    "ZeRO 1, bfloat16, wide gradients": stage(1, **BFLOAT16, **WIDE),
    "ZeRO 2": stage(2),
    "ZeRO 2, float16": stage(2, fp16=LOW),
    "ZeRO 3": stage(3),
    "ZeRO 3, float16": stage(3, fp16=LOW),
}

WARM_UP_RATES = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 90}}
SGD = {"type": "SGD", "params": {"lr": 1e-4, "momentum": 0.9, "dampening": 0.5}}
"""Its state does not start from zeros."""
HEALED_KINDS: dict[str, dict[str, Any]] = {
    **{name: {"config": config} for name, config in KINDS.items()},
    "no ZeRO, warm-up": {"config": {"scheduler": WARM_UP_RATES}},
    "ZeRO 2, warm-up": {"config": stage(2, scheduler=WARM_UP_RATES)},
    "no ZeRO, early": {"config": {}, "at": 5},
    "ZeRO 2, early": {"config": stage(2), "at": 5},
    "ZeRO 3, SGD, early": {
        "config": stage(3, optimizer=SGD, zero_allow_untested_optimizer=True),
        "at": 5,
    },
    "ZeRO 3, groups, early": {"config": stage(3), "groups": 3, "at": 5},
    "ZeRO 2, float16, model": {"config": stage(2, fp16=LOW), "masters": False},
}
"""Also DeepSpeed's own schedules, early damage, and damage of the model's weights alone."""

LOADED_KINDS = ("no ZeRO", "ZeRO 1, bfloat16", "ZeRO 2", "ZeRO 3")

Fault = Callable[[Mapping[str, Tensor]], None]
Seen = dict[str, Any]


def first_is(value: float) -> Fault:
    """Return what puts a value into one element."""

    def write(grads: Mapping[str, Tensor]) -> None:
        next(grad for grad in grads.values() if grad.numel()).view(-1)[0] = value

    return write


def times(factor: float) -> Fault:
    """Return what makes all gradients larger."""

    def write(grads: Mapping[str, Tensor]) -> None:
        for grad in grads.values():
            grad.mul_(factor)

    return write


def learned(engine: Any) -> list[Tensor]:
    """Return a copy of all that only an update may change."""
    buffers = {id(buffer) for buffer in engine.module.buffers()}
    return [t.detach().clone() for t in state(engine) if id(t) not in buffers]


def steps(script: Script, engine: Any, number: int, faults: Mapping[int, Fault]) -> Seen:
    """Train; the faults are in rank 1's gradients. Say what each step did."""
    dtype = next(engine.module.parameters()).dtype
    batch = {name: tensor.to(dtype) for name, tensor in script.batch().items()}
    seen: Seen = {"trained": [], "buffers": [], "norms": [], "scales": []}
    for step in range(number):
        before = learned(engine)
        buffers = [buffer.clone() for buffer in engine.module.buffers()]
        engine.backward(engine(**batch)["loss"])
        if step in faults and script.rank == 1:
            with torch.no_grad():
                faults[step](gradients(engine))
        engine.step()
        after = learned(engine)
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        seen["trained"].append(not same)
        kept = all(map(torch.equal, buffers, engine.module.buffers()))
        seen["buffers"].append(not kept)
        seen["norms"].append(float(engine.get_global_grad_norm() or NAN))
        seen["scales"].append(loss_scale(engine))
    seen["skipped_steps"] = engine.skipped_steps
    return seen


def guarded(
    script: Script, config: Any, number: int = 3, *, faults: Any = None, **options: Any
) -> Seen:
    """Train under guard."""
    engine = make_engine(script, config)
    with attach(engine, **options):
        seen = steps(script, engine, number, faults or {})
    finite = all(bool(torch.isfinite(p).all()) for p in engine.module.parameters() if p.numel())
    return seen | {"finite": finite, "digest": digest(engine)}


def bare(script: Script, config: Any, number: int = 3, *, faults: Any = None) -> Seen:
    """Train without a guard."""
    engine = make_engine(script, config)
    seen = steps(script, engine, number, faults or {})
    finite = all(bool(torch.isfinite(p).all()) for p in engine.module.parameters() if p.numel())
    return seen | {"finite": finite, "digest": digest(engine)}


def digest(engine: Any) -> float:
    """Return one number that any changed bit would move."""
    return float(sum(tensor.double().sum() for tensor in learned(engine)))


def places(engine: Any) -> list[str]:
    """Return which methods lie on the objects themselves."""
    outer = engine.optimizer
    owners = {"engine": engine, "zero": outer, "monitor": engine.monitor}
    owners["plain"] = getattr(outer, "optimizer", outer)
    owners["checker"] = getattr(outer, "overflow_checker", outer)
    names = (
        "step",
        "backward",
        "_take_model_step",
        "clip_fp32_gradients",
        "_update_scale",
        "has_overflow",
        "write_events",
        "add_param_group",
    )
    return [f"{owner}.{n}" for owner, one in owners.items() for n in names if n in vars(one)]


def put_back(script: Script, config: Any) -> Seen:
    engine = make_engine(script, config)
    found = places(engine)
    attached = attach(engine)
    hooked = places(engine)
    attached.close()
    left = places(engine)
    return {"found": found, "hooked": hooked, "left": left} | steps(script, engine, 2, {})


def off(script: Script, config: Any) -> Seen:
    engine = make_engine(script, config)
    found = places(engine)
    attached = attach(engine, mode="off")
    attached.load_state_dict({"kept": 1})
    left = {"found": found, "left": places(engine), "state": attached.state_dict()}
    return left | steps(script, engine, 2, {})


def resumed(script: Script, config: Any) -> Seen:
    """Train, save with the engine, and go on in another engine with two spikes at once."""
    folder = str(script.folder / "saved")
    engine = make_engine(script, config)
    with attach(engine) as attached:
        steps(script, engine, WARM, {})
        engine.save_checkpoint(folder, client_state={"vitals": attached.state_dict()})
    engine = make_engine(script, config)
    with attach(engine) as attached:
        _, kept = engine.load_checkpoint(folder)
        attached.load_state_dict(kept["vitals"])
        began = attached.step_index
        seen = steps(script, engine, 3, dict.fromkeys((0, 1), times(100.0)))
    return {"began": began, **seen}


def divided(script: Script) -> Seen:
    """Give backward losses that are divided already."""
    engine = make_engine(script, stage(2, gradient_accumulation_steps=2))
    with attach(engine):
        for _ in range(4):
            loss = engine(**script.batch())["loss"]
            engine.backward(loss / 2, scale_wrt_gas=False)
            engine.step()
    return {"loss": loss.item(), "steps": engine.global_steps}


def logged(script: Script) -> Seen:
    """Let the engine log what it logs."""
    csv = {"enabled": True, "output_path": str(script.folder / "csv"), "job_name": "it"}
    engine = make_engine(script, stage(1, csv_monitor=csv))
    with attach(engine):
        return steps(script, engine, 2, {})


def halted(script: Script) -> Seen:
    """Have a fault in every step until the ladder stops the run."""
    engine = make_engine(script, stage(2))
    try:
        with attach(engine):
            for _ in range(400):
                steps(script, engine, 1, {0: first_is(NAN)})
    except TrainingHalted as error:
        return {"at": engine.global_steps, "said": str(error), "left": places(engine)}
    return {"at": None}


def measured(script: Script, config: Any) -> Seen:
    """Measure weights and updates, and say what they are."""
    engine = make_engine(script, config)
    settings = SignalSettings(weight_norm=True, update_norm=True, every=1)
    with attach(engine, signals=settings):
        before = full_weights(engine)
        seen = steps(script, engine, 1, {})
        after = full_weights(engine)
        steps(script, engine, 1, {})
    pairs = list(zip(before, after, strict=True))
    update = math.sqrt(sum((b - a).double().square().sum().item() for b, a in pairs))
    weight = math.sqrt(sum(b.double().square().sum().item() for b in before))
    return seen | {"weight": weight, "update": update}


def full_weights(engine: Any) -> list[Tensor]:
    """Return every weight as a whole, in the precision that the optimizer updates."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = []
    for param in engine.module.parameters():
        whole = safe_get_full_fp32_param(param)
        found.append((param if whole is None else whole).detach().clone())
    return found


def slowed(script: Script, config: Any) -> Seen:
    """Have the ladder put the learning rate down to nothing."""
    engine = make_engine(script, config)
    with attach(engine) as attached:
        run_of(attached).judge.lr_factor_at = lambda step, rate: 0.0
        before = full_weights(engine)
        seen = steps(script, engine, 1, {})
        still = all(map(torch.equal, before, full_weights(engine)))
    return seen | {"still": still, "rates": engine.get_lr()}


def refused(script: Script) -> Seen:
    """Offload to the CPU."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    engine = make_engine(script, config)
    found = places(engine)
    try:
        attach(engine)
    except UsageError as error:
        return {"said": str(error), "found": found, "left": places(engine)}
    return {"said": ""}


def twice(script: Script) -> Seen:
    """Attach two times."""
    engine = make_engine(script, stage(1))
    with attach(engine):
        try:
            attach(engine)
        except UsageError as error:
            return {"said": str(error)}
    return {"said": ""}


def probed(script: Script, config: Any, *, gives: bool) -> Seen:
    """Train on other batches in each step, and give them to the probe or not."""
    engine = make_engine(script, config)
    made = torch.Generator().manual_seed(script.rank)
    loss_of = lambda batch: engine(**batch)["loss"]  # noqa: E731
    with attach(engine, loss_kind="rl") as attached:
        for _ in range(25):
            batch = {n: torch.randn(t.shape, generator=made) for n, t in script.batch().items()}
            if gives:
                attached.keep_batch(batch, loss_of)
            engine.backward(loss_of(batch))
            engine.step()
        probe = probe_of(attached)
        num_batches = probe.evaluate(ask(30)).num_batches if gives else 0
        kind = run_of(attached).judge.config.loss_kind
        found = {"digest": digest(engine), "is_on": probe.is_on, "num_batches": num_batches}
        return found | {"kind": kind}


def healed(
    script: Script,
    config: Any,
    *,
    at: int = DAMAGED_AT,
    masters: bool = True,
    groups: int = 1,
    loads: bool = False,
) -> Seen:
    """Write a NaN over a weight of rank 1, and compare what follows with a bare run's steps.

    With ``loads`` the engine loads a checkpoint of an earlier step before that.
    """
    engine = make_engine(script, config, groups=groups)
    bare = [position(engine)]
    for _ in range(HEALED):
        steps(script, engine, 1, {})
        bare.append(position(engine))
    engine, rewound, loaded = make_engine(script, config, groups=groups), [], []
    folder = str(script.folder / "saved")
    with attach(engine, mode="heal") as attached:
        attached.when_rolled_back(rewound.append)
        for step in range(HEALED):
            if loads and step == SAVED_AT:
                engine.save_checkpoint(folder, client_state={"vitals": attached.state_dict()})
            if loads and step == LOADED_AT:
                engine.load_checkpoint(folder)
                loaded = [attached.step_index, engine.global_steps]
            if step == at and script.rank == 1:
                damage(engine, masters=masters)
            steps(script, engine, 1, {})
        end = attached.step_index
    seen = {"rewound": rewound, "at": end, "bare": bare[engine.global_steps]}
    return seen | {"healed": position(engine), "loaded": loaded}


def damage(engine: Any, *, masters: bool) -> None:
    """Write a NaN into the weights that forwards use, and those that this rank updates."""
    outer = engine.optimizer
    if is_stage_3(engine):  # whose other elements may be padding
        largest = max(engine.module.parameters(), key=lambda param: param.ds_numel)
        group, at, _ = outer.grad_position[largest.ds_id]
        held = outer.fp32_partitioned_groups_flat[group][at:]
    else:
        held = getattr(outer, "optimizer", outer).param_groups[0]["params"][0]
    with torch.no_grad():
        if masters:
            held.view(-1)[0] = NAN
        for param in engine.module.parameters():
            getattr(param, "ds_tensor", param).view(-1)[:1] = NAN


def position(engine: Any) -> list[float]:
    """Return what all of the state comes to, the rates, the loss scale and the engine's numbers."""
    whole = float(sum(tensor.double().sum() for tensor in state(engine)))
    counted = [engine.global_steps, engine.skipped_steps]
    return [whole, *engine.get_lr(), loss_scale(engine), *counted]


def loss_scale(engine: Any) -> float:
    """Return the engine's loss scale; NaN without one."""
    return float(engine._get_optimizer_loss_scale() or NAN)


def asked_under_3(script: Script) -> Seen:
    """Give a batch to an engine that cannot be asked."""
    engine = make_engine(script, stage(3))
    with attach(engine) as attached:
        try:
            attached.keep_batch(script.batch(), lambda batch: engine(**batch)["loss"])
        except UsageError as error:
            return {"said": str(error)}
    return {"said": ""}


def failed(script: Script) -> Seen:
    """Raise out of the loop."""
    engine = make_engine(script, stage(1))
    try:
        with attach(engine):
            steps(script, engine, 2, {})
            raise ValueError("no such file")
    except ValueError:
        return {}


SPIKES = {1: first_is(NAN), WARM: times(100.0), WARM + 1: times(100.0)}
UNCHECKED = stage(2, bf16={"enabled": True, "check_grad_overflow": False})

PLAYS: dict[str, Callable[..., Seen]] = {
    "bare": bare,
    "guarded": guarded,
    "put back": put_back,
    "off": off,
    "faults": partial(guarded, number=WARM + 3, faults=SPIKES),
}

CASES: dict[str, Callable[[Script], Seen]] = {
    # Stage 3 comes last: it replaces torch's linear for the whole process.
    **{
        f"{what}: {name}": partial(play, config=config)
        for name, config in KINDS.items()
        for what, play in PLAYS.items()
    },
    **{
        f"resumed: {name}": partial(resumed, config=KINDS[name])
        for name in ("ZeRO 1", "ZeRO 2", "ZeRO 3", "no ZeRO", "ZeRO 1, bfloat16, wide gradients")
    },
    **{
        f"measured: {name}": partial(measured, config=KINDS[name])
        for name in ("ZeRO 1", "ZeRO 3", "no ZeRO", "no ZeRO, bfloat16")
    },
    **{f"slowed: {name}": partial(slowed, config=config) for name, config in KINDS.items()},
    **{
        f"NaN that nobody checks, {how}": partial(
            play, config=UNCHECKED, number=3, faults={1: first_is(NAN)}, **options
        )
        for how, play, options in (
            ("bare", bare, {}),
            ("observed", guarded, {"mode": "observe"}),
            ("guarded", guarded, {}),
        )
    },
    "beyond float32": partial(guarded, config=stage(2), number=3, faults={0: times(1e30)}),
    **{
        f"{what}: {name}": partial(probed, config=KINDS[name], gives=what == "probed")
        for name in ("no ZeRO", "ZeRO 2")
        for what in ("probed", "not probed")
    },
    **{f"healed: {name}": partial(healed, **how) for name, how in HEALED_KINDS.items()},
    **{
        f"{what}: {name}": partial(healed, config=KINDS[name], loads=True, at=at)
        for name in LOADED_KINDS
        for what, at in (("loaded", HEALED), ("loaded and healed", DAMAGED_AT))
    },
    "probe under ZeRO 3": asked_under_3,
    "divided": divided,
    "logged": logged,
    "halted": halted,
    "refused": refused,
    "twice": twice,
    "failed": failed,
}


def main(folder: Path) -> None:
    """Play all cases, one after another."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    results = {}
    for case, play in CASES.items():
        if os.environ.get("CASE", case) != case:
            continue
        here = folder / case.replace(": ", "-").replace(", ", "-").replace(" ", "-")
        (here / "shm").mkdir(parents=True, exist_ok=True)
        os.environ |= {
            "VITALS_DIR": str(here / "runs"),
            "VITALS_SHM": str(here / "shm"),
            "VITALS_AGENT": "off",
            **SETTINGS,
        }
        try:
            results[case] = play(Script(here))
        except Exception as error:
            error.add_note(f"in {case!r} on rank {rank}")
            raise
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # gloo aborts a process at its exit now and then; what was found is written


if __name__ == "__main__":
    main(Path(sys.argv[1]))
