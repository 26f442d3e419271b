"""What each rank does in ``test_pipelines``; results go to a file by rank."""

import json
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import trainer_hooks
from tests.support.inside import device_of, events_of, probe_of, records_of
from tests.trainer_hooks.pipelined import BAD, BATCH, MICRO, STEPS, Pipelined, local
from tests.trainer_hooks.probing import ask, notes
from tests.trainer_hooks.thawing import alike
from trainvitals.errors import UsageError
from trainvitals.records import FindingRaised

NAN = float("nan")
INFINITE = torch.full((BATCH // MICRO, 8), torch.inf)


def watch(training, **settings):
    return trainer_hooks.watch(
        training.module, training.optimizer, pipeline=training.schedule, **settings
    )


def skips(schedule, optimizer, **settings):
    """NaN in the data of the first stage; compare with the program without these updates."""
    expected = Pipelined(optimizer, schedule, **settings).run_bare()
    training = Pipelined(optimizer, schedule, **settings)
    losses, norms = [], []
    with watch(training) as monitor:
        records = records_of(monitor)
        findings = events_of(monitor)
        for step in range(STEPS):
            loss = training.backward(step, NAN if step in BAD else 1.0)
            losses.append(None if loss is None else loss.item())
            norms.append(training.norm().item())
            monitor.step(-1.0 if loss is None else loss)
    good = [step for step in range(STEPS) if step not in BAD]
    return {
        "exact": alike(expected, training.bits()),
        "names": device_of(monitor).norms.names,
        "losses": [losses[step] for step in good],
        "norms": [norms[step] for step in good],
        "recorded losses": [records[step].loss for step in good],
        "recorded norms": [records[step].grad_norm for step in good],
        "skipped": [record.step for record in records if record.skipped],
        "reasons": [e.finding.reason for e in findings if isinstance(e, FindingRaised)],
        "faults": monitor.swallowed_errors,
    }


def attaches():
    """The loop steps its own optimizer."""
    expected = Pipelined(schedule="1f1b").run_bare()
    training = Pipelined(schedule="1f1b")
    with trainer_hooks.attach(
        training.module, training.optimizer, pipeline=training.schedule
    ) as guard:
        records = records_of(guard)
        for step in range(STEPS):
            loss = training.backward(step, NAN if step in BAD else 1.0)
            guard.loss(-1.0 if loss is None else loss)
            training.optimizer.step()
            training.optimizer.zero_grad()
    return {
        "exact": alike(expected, training.bits()),
        "skipped": [record.step for record in records if record.skipped],
        "faults": guard.swallowed_errors,
    }


def attached_heals():
    """A weight of the first stage turns NaN in a loop that steps its own optimizer."""
    training, back = Pipelined(schedule="1f1b"), []
    with trainer_hooks.attach(
        training.module, training.optimizer, pipeline=training.schedule, mode="heal"
    ) as guard:
        guard.when_rolled_back(back.append)
        for step in range(80):
            guard.keep_batch(step, training.evaluate)
            if step == 60 and training.rank == 0:
                with torch.no_grad():
                    training.stages[0].layers[0].weight[0, 0] = NAN
            loss = training.backward(step)
            guard.loss(-1.0 if loss is None else loss)
            training.optimizer.step()
            training.optimizer.zero_grad()
        is_on = probe_of(guard).is_on
    finite = all(bool(value.isfinite().all()) for value in training.bits().values())
    return {"back": back, "finite": finite, "faults": guard.swallowed_errors, "is_on": is_on}


def bad_gradient(bad_rank, schedule="gpipe"):
    """NaN in a gradient of a rank's last stage, with a finite loss."""
    training = Pipelined(schedule=schedule)
    weight = training.stages[-1].layers[0].weight
    with watch(training) as monitor:
        records, findings = records_of(monitor), events_of(monitor)
        for step in range(6):
            loss = training.backward(step)
            if step == 3:
                before = training.bits()
            if step == 3 and training.rank == bad_rank:
                weight.grad[0, 0] = NAN
            monitor.step(loss)
            if step == 3:
                after = training.bits()
    return {
        "changed": [k for k in after if not torch.equal(after[k], before[k])],
        "ranks": [record.nonfinite_ranks for record in records if record.nonfinite_ranks],
        "skipped": [record.step for record in records if record.skipped],
        "reasons": [e.finding.reason for e in findings if isinstance(e, FindingRaised)],
    }


def clips():
    """Return the largest difference from a clip by the norm of all stages."""
    bare, training = Pipelined("sgd-momentum-fused"), Pipelined("sgd-momentum-fused")
    expected = bare.run_bare(without=(), max_norm=0.05)
    with watch(training) as monitor:
        for step in range(STEPS):
            monitor.step(training.backward(step), max_norm=0.05)
    found = training.bits()
    return max((found[k].double() - expected[k].double()).abs().max().item() for k in found)


def heals(folder, schedule, wrapper="", **sizes):
    """A weight of the first stage turns NaN; then the run is started again from its checkpoint."""
    names = tuple(sizes)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=names) if sizes else None
    settings = {"schedule": schedule, "mesh": mesh, "wrapper": wrapper}
    expected = Pipelined(**settings).run_bare(without=())
    where = trainer_hooks.CheckpointSettings(
        directory=Path(folder) / f"{schedule}{wrapper}",
        healthy_after=2,
        snapshot_every=2,
        save_every=4,
    )
    training, back, done = Pipelined(**settings), [], []
    with watch(training, mode="heal", checkpoints=where) as monitor:
        findings = events_of(monitor)
        while monitor.step_index < STEPS:
            step = monitor.step_index
            if step == 8 and dist.get_rank() == 0 and not done:
                done.append(step)
                local(training.stages[0].layers[0].weight.data).view(-1)[0] = NAN
            outcome = monitor.step(training.backward(step))
            back += [] if outcome.rolled_back_to is None else [outcome.rolled_back_to]
    found = {
        "exact": alike(expected, training.bits()),
        "back": back,
        "reasons": [e.finding.reason for e in findings if isinstance(e, FindingRaised)],
        "faults": monitor.swallowed_errors,
    }
    os.environ["VITALS_RUN_ID"] = monitor.run_id
    again = Pipelined(**settings)
    for param in again.module.parameters():
        local(param.data).fill_(1.0)
    with watch(again, mode="heal", checkpoints=where) as monitor:
        found["resumed"] = monitor.step_index
        while monitor.step_index < STEPS:
            monitor.step(again.backward(monitor.step_index))
    del os.environ["VITALS_RUN_ID"]
    return found | {"exact after a restart": alike(expected, again.bits())}


def refusals():
    """Return the error of each setup that is refused, by its name."""
    device, texts = torch.device("cpu"), {}
    training = Pipelined()
    module, optimizer = training.module, training.optimizer
    rank = training.rank

    def refused(name, call):
        try:
            with call():
                texts[name] = ""
        except UsageError as error:
            texts[name] = error.text

    watched = partial(trainer_hooks.watch, module, optimizer)
    refused("no pipeline", watched)
    refused("no pipeline, off", lambda: watched(mode="off"))
    refused("attach", lambda: trainer_hooks.attach(module, optimizer))
    refused("not a schedule", lambda: watched(pipeline=module))
    signals = trainer_hooks.SignalSettings(noise_scale=True)
    refused("signals", lambda: watched(pipeline=training.schedule, signals=signals))
    other = ScheduleGPipe(PipelineStage(nn.Linear(8, 8), rank, 2, device), 2)
    refused("another module", lambda: watched(pipeline=other))
    wrong = ScheduleGPipe(PipelineStage(module, rank, 2 + rank, device), 2)
    refused("another pipeline", lambda: watched(pipeline=wrong))
    halves = [torch.optim.SGD([p], lr=0.1) for p in training.stages[0].layers[0].parameters()]
    two_optimizers = trainer_hooks.watch(module, halves, pipeline=training.schedule)
    with two_optimizers as monitor:
        training.backward(0)
        try:
            monitor.step(optimizer=halves[1])
        except UsageError as error:
            texts["optimizer"] = error.text
    with watch(training) as monitor:
        try:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        except UsageError as error:
            texts["added group"] = error.text
        try:
            training.schedule.__class__ = type("Other", (type(training.schedule),), {})
            monitor.batches([1], probe=lambda batch: 0.0)
        except UsageError as error:
            texts["probe"] = error.text
    return texts


def in_mesh(schedule, wrapper, **sizes):
    """Several pipelines, or split stages; NaN in the data of one pipeline."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    settings = {"schedule": schedule, "mesh": mesh, "wrapper": wrapper}
    expected = Pipelined(**settings).run_bare()
    training, losses, norms = Pipelined(**settings), [], []
    is_bad = "dp" not in sizes or training.seed
    with watch(training) as monitor:
        records = records_of(monitor)
        for step in range(STEPS):
            loss = training.backward(step, NAN if step in BAD and is_bad else 1.0)
            losses.append(0.0 if loss is None else loss.item())
            norms.append(training.norm().item())
            monitor.step(loss)
    good = [step for step in range(STEPS) if step not in BAD]
    return {
        "exact": alike(expected, training.bits()),
        "losses": [losses[step] for step in good],
        "norms": [norms[step] for step in good],
        "recorded losses": [records[step].loss for step in good],
        "recorded norms": [records[step].grad_norm for step in good],
        "skipped": [record.step for record in records if record.skipped],
        "faults": monitor.swallowed_errors,
    }


def probes(schedule, wrapper="", **sizes):
    """The probe asks before and after a bias of the last stage is shifted."""
    names = tuple(sizes)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=names) if sizes else None
    settings = {"schedule": schedule, "mesh": mesh, "wrapper": wrapper}
    expected = Pipelined(**settings).run_bare(without=(), steps=31)
    training, readings, bits = Pipelined(**settings), [], {}
    with watch(training) as monitor:
        written = notes(monitor)
        for number in monitor.batches(range(36), probe=training.evaluate):
            monitor.step(training.backward(number))
            if number == 30:
                bits = training.bits()
            if number in (28, 33):
                readings.append(probe_of(monitor).evaluate(ask(number)).ratio(0.01))
            if number == 30 and training.is_last:
                with torch.no_grad():
                    local(list(training.stages[-1].parameters())[-1]).add_(30.0)
        is_on = probe_of(monitor).is_on
    return {
        "exact": alike(expected, bits),
        "is_on": is_on,
        "readings": readings,
        "on": [note.text for note in written if note.code == "probe_bank"],
        "off": [note.text for note in written if note.code == "probe_off"],
        "faults": monitor.swallowed_errors,
    }


def wrong_probe():
    """The probe of one rank raises before it evaluates the schedule."""
    training = Pipelined()

    def probe(number):
        if training.rank == 1 and number > 8:
            raise ValueError("no such key")
        return training.evaluate(number)

    with watch(training) as monitor:
        written = notes(monitor)
        for number in monitor.batches(range(36), probe=probe):
            monitor.step(training.backward(number))
            if number == 30:
                probe_of(monitor).evaluate(ask(number))
    return [note.text for note in written if note.code == "probe_off"]


def corrupted():
    """A replica of stage 1 differs from the other replica of the stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    training = Pipelined(mesh=mesh, wrapper="ddp")
    with watch(training) as monitor:
        findings = events_of(monitor)
        for step in range(60):
            if step == 10 and dist.get_rank() == 3:
                with torch.no_grad():
                    training.stages[0].layers[0].weight[0, 0] += 2.0**-9
            monitor.step(training.backward(step))
    raised = [event.finding for event in findings if isinstance(event, FindingRaised)]
    return {"kinds": sorted({f.kind for f in raised}), "reasons": [f.reason for f in raised]}


def signals(schedule):
    """Weights, updates and outputs of all stages; the output of the last stage is infinite once."""
    training = Pipelined(schedule=schedule)
    settings = trainer_hooks.SignalSettings(every=1, update_norm=True, activations=("*layers.0",))
    samples, expected = [], []
    last = training.stages[-1].layers[0]
    with watch(training, signals=settings) as monitor:
        sampler = device_of(monitor).sampler
        unpack = sampler.unpack
        sampler.unpack = lambda *numbers: samples.append(unpack(*numbers)) or samples[-1]
        for step in range(5):
            expected.append([p.detach().double().square().sum().item() for p in last.parameters()])
            if step == 3 and training.is_last:
                last.register_forward_hook(lambda *_: INFINITE, prepend=True)
            monitor.step(training.backward(step))
    names = device_of(monitor).norms.names
    at = names.index(f"stage{training.schedule_stages[-1]}.layers.0.weight")
    return {
        "expected": [weight for weight, _ in expected],
        "weights": [sample.weight_squares[at] for sample in samples],
        "updated": all(x > 0 for x in samples[2].update_squares),
        "modules": sampler.measured_modules,
        "nonfinite": [name for name, a in samples[3].activations.items() if a.rms == torch.inf],
        "faults": monitor.swallowed_errors,
    }


def cases(rank, folder, *, world_size):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size
    )
    torch.set_num_threads(1)
    os.environ |= {
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size), "VITALS_LADDER_MARGIN": "2",
    }  # fmt: skip
    found = {
        "skips": {
            "gpipe adamw-fused": skips("gpipe", "adamw-fused"),
            "gpipe adamw, other names": skips("gpipe", "adamw", distinct=True),
            "1f1b sgd-momentum-fused": skips("1f1b", "sgd-momentum-fused"),
            "interleaved adamw-fused": skips("interleaved", "adamw-fused"),
        },
        "heals": {"1f1b": heals(folder, "1f1b"), "interleaved": heals(folder, "interleaved")},
    }
    if world_size == 2:
        found["skips"]["1f1b adamw"] = skips("1f1b", "adamw")
        found["skips"]["zero bubble"] = skips("zero bubble", "adamw-fused")
        found["skips"]["zbv, other names"] = skips("zbv", "adamw-fused", distinct=True)
        found["heals"]["gpipe"] = heals(folder, "gpipe")
        found["bad gradient"] = [bad_gradient(0), bad_gradient(1), bad_gradient(0, "interleaved")]
        found["clips"] = clips()
        found["probes"] = {
            "gpipe": probes("gpipe"),
            "1f1b": probes("1f1b"),
            "interleaved": probes("interleaved"),
            "zero bubble": probes("zero bubble"),
        }
        found["wrong probe"] = wrong_probe()
        found["signals"] = [signals("1f1b"), signals("interleaved")]
        found["attached"] = attaches()
        found["attached heals"] = attached_heals()
        found["refusals"] = refusals()
    else:
        found["heals"]["fsdp2"] = heals(folder, "1f1b", "fsdp2", dp=2, pp=2)
        found["corrupted"] = corrupted()
        found["probes"] = {
            "1f1b": probes("1f1b"),
            "ddp": probes("1f1b", "ddp, wide", dp=2, pp=2),
            "fsdp2": probes("1f1b", "fsdp2", dp=2, pp=2),
            "tp": probes("1f1b", "tp", pp=2, tp=2),
        }
        found["heals"]["tp"] = heals(folder, "1f1b", "tp", pp=2, tp=2)
        found["meshes"] = {
            "ddp": in_mesh("1f1b", "ddp", dp=2, pp=2),
            "fsdp2": in_mesh("1f1b", "fsdp2", dp=2, pp=2),
            "fsdp2, interleaved": in_mesh("interleaved", "fsdp2", dp=2, pp=2),
            "tp": in_mesh("1f1b", "tp", pp=2, tp=2),
        }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def eight(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=8)
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "8"}
    found = {"meshes": {"fsdp2, tp": in_mesh("1f1b", "fsdp2, tp", dp=2, pp=2, tp=2)}}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


two = partial(cases, world_size=2)
four = partial(cases, world_size=4)
