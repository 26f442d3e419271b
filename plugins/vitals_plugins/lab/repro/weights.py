"""The weights that a bad step is played with: the nearest checkpoint's before it, or the user's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer_hooks.recovery.state import TensorSpec
from trainer_hooks.repro.capsule import Capsule, is_second_moment
from trainer_hooks.tensors.gradients import clean_name
from trainvitals.errors import UsageError, VitalsError
from trainvitals.io.rundir import RunDir
from trainvitals.policy.plan import read_plan


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """Source of the model's weights, and their known properties."""

    text: str
    """Displayed text: ``the weights of step 300, 40 steps earlier``."""
    is_exact: bool
    """Whether the step started with them."""
    bad: list[str] = field(default_factory=list)
    """Tensors that are not finite, optimizer state included."""
    absolute: Mapping[str, float] = field(default_factory=dict)
    """Largest magnitude by name."""

    def largest(self, name: str) -> float | None:
        """Return a tensor's largest magnitude before the replay; None if it is unknown."""
        return self.absolute.get(name)


def load_step_weights(capsule: Capsule, run_dir: RunDir, model: nn.Module) -> LoadedWeights:
    """Load the latest checkpoint at or before a capsule's step into the model, in place.

    Without a checkpoint, the model keeps its weights.

    Raises:
        UsageError: the checkpoint belongs to another model.
        VitalsError: it is damaged, or not to be trusted.
    """
    from trainer_hooks.recovery.checkpoints.folder import CheckpointFolder
    from trainer_hooks.recovery.checkpoints.manifest import parse_id

    directory = Path(capsule.facts.get("checkpoint_dir") or run_dir.path / "checkpoints")
    key = b""
    with suppress(VitalsError, OSError):  # no key was ever created: then nothing is signed
        key = run_dir.file_key()
    folder = CheckpointFolder(directory, run_id=run_dir.run_id, key=key)
    plan = read_plan(run_dir.read_plan())
    names = []
    for ref in folder.loadable_refs() if directory.is_dir() else ():
        step, attempt = parse_id(ref.id)
        on_way = attempt == capsule.attempt or (
            attempt < capsule.attempt and plan.is_in_lineage(step, attempt)
        )
        if step <= capsule.step and on_way:
            names.append((step, attempt, ref.id))
    if not names:
        live_tensors = _model_tensors(model)
        bad, absolute = _summarize_tensors(live_tensors)
        text = "the weights that the entry built (the run has no checkpoint before this step)"
        return LoadedWeights(text=text, is_exact=False, bad=bad, absolute=absolute)
    step, _, name = max(names)
    folder.check(name)
    return _load_weights(folder.path / name, step, capsule, model)


def read_into(model: nn.Module, folder: Path, *, rank: int = 0) -> dict[str, Tensor]:
    """Read a checkpoint's parameters and buffers for a replay, in place; return them by name.

    Raises:
        UsageError: the checkpoint belongs to another model.
    """
    from trainer_hooks.recovery.checkpoints import payload
    from trainer_hooks.recovery.checkpoints.planner import TensorBox

    stored = payload.specs(folder)
    live, boxes, missing = _model_tensors(model), [], []
    for name, tensor in live.items():
        # A buffer is stored per rank.
        for key in (name, f"rank.{rank}.{name}", f"rank.0.{name}"):
            if key in stored:
                if stored[key] != TensorSpec.of(tensor):
                    raise UsageError(
                        f"{name} is {TensorSpec.of(tensor)} in the entry's model, and "
                        f"{stored[key]} in checkpoint {folder.name}",
                        hint="the entry must build the model that the run trained",
                    )
                boxes.append(TensorBox.all_of(key, tensor))
                break
        else:
            missing += [name] if name.startswith("model.") else []
    if missing:
        raise UsageError(
            f"checkpoint {folder.name} holds no {missing[0]}"
            + (f", nor {len(missing) - 1} more" if len(missing) > 1 else ""),
            hint="the entry must build the model that the run trained",
        )
    payload.read(folder, boxes)
    return live


def _load_weights(folder: Path, step: int, capsule: Capsule, model: nn.Module) -> LoadedWeights:
    """Load a checkpoint's weights for a replay, and note non-finite and largest values."""
    from trainer_hooks.recovery.checkpoints import payload
    from trainer_hooks.recovery.checkpoints.planner import TensorBox

    live = read_into(model, folder, rank=capsule.rank)
    moments = {
        name: torch.empty(spec.shape, dtype=spec.dtype)
        for name, spec in payload.specs(folder).items()
        if name.startswith("optim.") and spec.dtype.is_floating_point
    }
    payload.read(folder, [TensorBox.all_of(name, tensor) for name, tensor in moments.items()])
    bad, absolute = _summarize_tensors(live | moments)
    away = capsule.step - step
    text = f"the weights of step {step}"
    text += "" if not away else f", {away} step{'' if away == 1 else 's'} earlier"
    return LoadedWeights(text=text, is_exact=not away, bad=bad, absolute=absolute)


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the replayed model's parameters and buffers by their names in checkpoints."""
    params = {f"model.{clean_name(n)}": p.detach() for n, p in model.named_parameters()}
    return params | {f"buffer.{clean_name(n)}": b for n, b in model.named_buffers()}


def _summarize_tensors(tensors: Mapping[str, Tensor]) -> tuple[list[str], dict[str, float]]:
    """Return which loaded tensors are not finite, and the others' largest magnitude."""
    bad, largest = [], {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = (float(each) for each in torch.aminmax(tensor))
        greatest = max(abs(low), abs(high))
        is_wrong = greatest != greatest or greatest == float("inf")
        is_wrong = is_wrong or (is_second_moment(name) and low < 0)
        if not is_wrong:
            largest[name] = greatest
        elif not name.startswith("buffer."):  # a mask of -inf is one
            bad.append(name)
    return bad, largest
