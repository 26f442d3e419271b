"""Finds the cause of a bad step: replays it unchanged, in higher precision, and in parts."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from trainer_hooks.repro.capsule import (
    AutocastSetting,
    Capsule,
    is_second_moment,
    map_tensors,
    rows_in,
    take_rows,
    tensors_in,
    versions,
)
from trainvitals.io.capsules import VERDICT
from trainvitals.io.private import replace_file
from vitals_plugins.lab import selftest
from vitals_plugins.lab.repro.play import (
    LossOf,
    NonfiniteOrigin,
    NonfiniteTrace,
    ReplayLimits,
    ReplayResult,
    ReplaySetup,
)
from vitals_plugins.lab.repro.weights import LoadedWeights

Cause = Literal["data", "arithmetic", "optimizer_state", "hardware", "not_reproduced"]
IN_WORDS: dict[Cause, str] = {
    "data": "Data",
    "arithmetic": "Arithmetic",
    "optimizer_state": "Optimizer state",
    "hardware": "Hardware",
    "not_reproduced": "Not reproduced",
}
_MOST_PLAYS = 256
"""Maximum number of replays of parts of a batch."""
_MOST_ROWS = 8
"""Bad samples that are searched one by one."""
_OUT_OF_RANGE = 100.0
"""Times the largest value of all other samples."""
_WRONG_WEIGHT, _LARGE = 1e3, 1e2
"""Factor over a tensor's earlier largest value, and minimum value, that count as wrong."""
_BLOCK_WORDS = 8 << 20
_SHOWN = 4


class ReplayVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a replay; stored next to the capsule."""

    verdict: Cause
    sentence: str
    """Displayed cause and origin."""
    module: str = ""
    operator: str = ""
    direction: str = ""
    """``forward`` or ``backward``; empty if no operator is the cause."""
    rows: tuple[int, ...] = ()
    """Samples of the batch without which it is fine."""
    loss: float | None = None
    """Value in the run; None if it was non-finite or unknown."""
    played_loss: float | None = None
    is_bit_equal: bool | None = None
    """Whether the loss is equal, bit for bit; None if the run's was non-finite."""
    weights: str = ""
    details: tuple[str, ...] = ()
    time_unix_ns: int = 0


@dataclass(kw_only=True)
class _ReplayCase:
    """A capsule with a model to replay it, and the results so far."""

    capsule: Capsule
    scene: ReplaySetup
    weights: LoadedWeights
    batches: Sequence[Any]
    details: list[str] = field(default_factory=list)
    num_plays: int = 0
    lowest: torch.dtype | None = None
    """The least precise type that an operation of the forward gave."""

    @property
    def limits(self) -> ReplayLimits:
        """Return limits that made a finite step bad; for the norm only if Vitals computed it."""
        facts = self.capsule.facts
        loss, limit = self.capsule.loss, facts.get("loss_limit")
        has_loss = limit is not None and math.isfinite(loss) and loss > limit
        norm, most = facts.get("grad_norm"), facts.get("grad_norm_limit")
        is_own = facts["world_size"] == 1 and len(self.batches) == 1
        has_norm = is_own and norm is not None and most is not None and most < norm < math.inf
        return ReplayLimits(limit if has_loss else None, most if has_norm else None)

    def replay(self, batches: Sequence[Any], *, dtype: torch.dtype | None = None) -> ReplayResult:
        """Replay batches of the capsule's step, and count it."""
        self.num_plays += 1
        return self.scene.replay(batches, self.capsule.rng, dtype=dtype)

    def is_bad(self, batches: Sequence[Any]) -> bool:
        """Return whether a replay of these batches is bad."""
        return self.replay(batches).is_bad(self.limits)


def judge(
    capsule: Capsule,
    model: torch.nn.Module,
    loss_of: LossOf,
    weights: LoadedWeights,
    batches: Sequence[Any],
    *,
    try_machine: Callable[[torch.device], str] | None = None,
) -> ReplayVerdict:
    """Replay the bad step of a capsule, and return its cause.

    Args:
        capsule: of the step.
        model: with the weights of the step.
        loss_of: the loss of a batch.
        weights: source of those weights.
        batches: the step's.
        try_machine: returns the fault of a device; empty: none was found.

    Raises:
        PlayError: the loss function could not compute.
    """
    autocast = capsule.facts.get("autocast")
    scene = ReplaySetup(
        model=model,
        loss_of=loss_of,
        autocast=None if autocast is None else AutocastSetting(*autocast),
        loss_scale=capsule.facts.get("loss_scale") or 1.0,
    )
    case = _ReplayCase(capsule=capsule, scene=scene, weights=weights, batches=batches)
    with _use_run_precision(capsule.facts["versions"]):
        return _build_verdict(case, try_machine or _try_machine)


_MOST_THREADS = 1024
"""More than any machine has: each is really started."""


@contextmanager
def _use_run_precision(there: dict[str, str]) -> Iterator[None]:
    """Replay with the run's order and precision of sums: its threads, its choice for float32."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        if there.get("threads", "").isdigit():
            torch.set_num_threads(min(int(there["threads"]), _MOST_THREADS))
        torch.set_float32_matmul_precision(there.get("float32_matmul", precision))
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def _build_verdict(case: _ReplayCase, try_machine: Callable[[torch.device], str]) -> ReplayVerdict:
    """Replay the capsule's step, and return its cause as a verdict."""
    capsule, weights = case.capsule, case.weights
    played = case.replay(case.batches)
    if played.error:
        raise PlayError(played.error)
    origin = _trace_origin(case) if played.is_bad(case.limits) else None
    cause, why, module, rows = _find_cause(case, played, try_machine)
    if module:
        origin = None
    return ReplayVerdict(
        verdict=cause,
        sentence=" ".join(
            (
                f"{IN_WORDS[cause]}: {why}",
                *_origin_sentence(origin),
                _loss_equality_sentence(case, played),
            )
        ),
        module=module or ("" if origin is None else origin.module),
        operator="" if origin is None else origin.operator,
        direction="" if origin is None else origin.direction,
        rows=rows,
        loss=_finite_or_none(capsule.loss),
        played_loss=_finite_or_none(played.loss),
        is_bit_equal=_is_bit_equal(capsule, played),
        weights=weights.text,
        details=tuple(case.details),
        time_unix_ns=time.time_ns(),
    )


class PlayError(Exception):
    """The user's loss function raised."""


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _trace_origin(case: _ReplayCase) -> NonfiniteOrigin | None:
    """Replay the step with a trace; return the first non-finite value's origin."""
    trace = NonfiniteTrace()
    case.scene.replay(case.batches, case.capsule.rng, trace=trace)
    case.lowest = trace.lowest
    return trace.origin


# --------------------------------------------------------------------------------- the cause


_Found = tuple[Cause, str, str, tuple[int, ...]]
"""Cause, reason, the module if no operator is the cause, and the samples."""


def _find_cause(
    case: _ReplayCase, played: ReplayResult, try_machine: Callable[[torch.device], str]
) -> _Found:
    """Return a replay's cause: state evidence first, because a bad state affects every replay."""
    if (state := _find_state_fault(case)) is not None:
        return state
    if not played.is_bad(case.limits):
        return _explain_good_replay(case, played, try_machine)
    rows, num_rows = _bad_rows(case)
    if rows and (description := _outlying_value_sentence(case, rows)):
        return "data", description, "", rows
    if cured := _precision_sentence(case):
        return "arithmetic", cured, "", rows
    if not rows and (description := _not_finite(case)):
        return "data", description, "", ()
    if rows:
        verb, pronoun = ("makes", "it") if len(rows) == 1 else ("make", "them")
        description = (
            f"{_samples(rows)} of {num_rows} {verb} the batch bad in every precision; without "
            f"{pronoun} the batch is fine."
        )
        return "data", description, "", rows
    good = case.capsule.good
    if good is not None and not case.is_bad([good]):
        description = (
            "the batch is bad in every precision; one of an earlier step is fine with the same "
            "weights."
        )
        return "data", description, "", ()
    description = "the step is bad in every precision, so an operation has no finite result here"
    if good is not None:
        description += "; a batch of an earlier step is bad as well"
    return "arithmetic", f"{description}.", "", ()


def _find_state_fault(case: _ReplayCase) -> _Found | None:
    """Return a fault of the replayed weights or optimizer state, of the run or as loaded."""
    facts = case.capsule.facts
    if facts.get("replica") is not None:
        return _find_replica_fault(case, facts["replica"])
    bad = list(facts["state"]["bad"]) if not facts["applied"] else []
    where = "in the run's own state after the step, which changed nothing"
    if not bad and (bad := case.weights.bad):
        where = f"in {case.weights.text}"
    if bad:
        first = bad[0]
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        of = ", a second moment below 0 included," if any(map(is_second_moment, bad)) else ""
        description = f"{first}{more}{of} {'is' if len(bad) == 1 else 'are'} not finite {where}."
        return "optimizer_state", description, _owner(first), ()
    largest_now = {} if facts["applied"] else facts["state"]["largest"]
    for name, largest in largest_now.items():
        usual = case.weights.largest(name)
        if usual is not None and largest > max(_LARGE, _WRONG_WEIGHT * usual):
            description = (
                f"{name} held {largest:.3g} in the run; {usual:.3g} in {case.weights.text}."
            )
            return "optimizer_state", description, _owner(name), ()
    return None


def _find_replica_fault(case: _ReplayCase, replica: dict[str, Any]) -> _Found:
    """Return a replayed replica's difference, and the first module whose output it changes."""
    name, first = replica["tensor"], replica["elements"][0]
    kind, _, rest = name.partition(".")
    live = dict(case.scene.model.named_parameters()).get(rest) if kind == "model" else None
    module = ""
    if live is not None and max(replica["elements"]) < live.numel():
        values = replica["own"], replica["replica"]
        module = case.scene.first_different_module(
            case.batches, case.capsule.rng, live, replica["elements"], *values
        )
    rank_value, other = replica["own"][0], replica["replica"][0]
    text = f"{name} was not as on a replica: element {first} was {rank_value:.6g} here, "
    text += f"{other:.6g} there"
    if module:
        text += f"; the first module whose output differs for that is `{module}`"
    return "optimizer_state", f"{text}.", module or _owner(name), ()


def _owner(name: str) -> str:
    """Return the module of a replayed parameter, buffer or optimizer state, by its name."""
    kind, _, rest = name.partition(".")
    if kind == "optim":
        rest = rest.partition(".")[2].rpartition(".")[0]
    return rest.rpartition(".")[0] or rest


def _explain_good_replay(
    case: _ReplayCase, played: ReplayResult, try_machine: Callable[[torch.device], str]
) -> _Found:
    """Return the cause for a step that replays well and was bad in the run."""
    device = next((p.device for p in case.scene.model.parameters()), torch.device("cpu"))
    again = case.replay(case.batches)
    repeats = again == played
    if wrong := try_machine(device):
        description = f"the step is fine when re-run, and this machine computes wrongly: {wrong}."
        return "hardware", description, "", ()
    case.details.append(f"self-test of {device}: all answers right")
    why = [] if repeats else ["two re-runs differ in their bits, so it is not deterministic"]
    equal = _is_bit_equal(case.capsule, played)
    if equal is not True and not case.weights.is_exact:
        why.append("it was not played with its own weights")
    elif equal is False:
        why.append("its loss is not the run's, bit for bit")
    if equal is not None and case.capsule.facts["world_size"] > 1:
        # Its own loss was finite: the bad value may come from the reduction.
        why.append("another rank may have caused it: re-run theirs with --rank")
    why += _differences(case.capsule, device)
    if why:
        return "not_reproduced", f"the step is fine here; {'; '.join(why)}.", "", ()
    description = (
        "with the same weights, batch and random state the step is fine, twice bit-equal. Code of "
        "the loop outside loss_of is not re-run; if it is not the cause, test the node where it "
        "ran: `vitals doctor --burn-in 60`."
    )
    return "hardware", description, "", ()


def _differences(capsule: Capsule, device: torch.device) -> list[str]:
    """Return differences between the replay's machine and the run's."""
    here, there = versions(device), capsule.facts["versions"]
    names = ("torch", "cuda", "device", "float32_matmul")
    return [
        f"the run had {name} {there.get(name) or 'none'}, this is {here[name] or 'none'}"
        for name in names
        if there.get(name) != here[name]
    ]


def _try_machine(device: torch.device) -> str:
    """Return the replay machine's first wrong result of the burn-in's kernels; empty if none."""
    wrong, dtypes = None, [torch.float32, torch.float64]
    if device.type != "cuda" or torch.cuda.is_bf16_supported():
        dtypes.append(torch.bfloat16)
    for seed in range(4):
        for dtype in dtypes:
            wrong = wrong or selftest.gemm(device, dtype, seed, seconds=0.1)
        block = torch.empty(_BLOCK_WORDS, dtype=torch.int64, device=device)
        wrong = wrong or selftest.memory(block, seed)
    return "" if wrong is None else str(wrong)


# -------------------------------------------------------------------------------- precision


def _precision_sentence(case: _ReplayCase) -> str:
    """Return a sentence that higher precision fixes the step; empty if not, or unknown."""
    lowest = _lowest(case)
    tried = (torch.float32, torch.float64) if lowest != "float32" else (torch.float64,)
    for dtype in tried if lowest != "float64" else ():
        name = str(dtype).removeprefix("torch.")
        played = case.replay(case.batches, dtype=dtype)
        if played.error:
            case.details.append(f"could not be re-run in {name}: {played.error}")
        elif not played.is_bad(case.limits):
            scale = case.scene.loss_scale
            scaled = f" with a loss scale of {scale:g}" if scale != 1.0 else ""
            return f"the step is fine in {name}, and bad in the run's {lowest}{scaled}."
    return ""


def _lowest(case: _ReplayCase) -> str:
    """Return the least precise type that the replayed step computes in."""
    autocast = case.scene.autocast
    if autocast is not None and autocast.dtype:
        return autocast.dtype
    # Autocast may start within the model, where the run did not see it.
    dtypes = [p.dtype for p in case.scene.model.parameters() if p.is_floating_point()]
    dtypes += [] if case.lowest is None else [case.lowest]
    if not dtypes:
        return "float32"
    return str(min(dtypes, key=lambda dtype: torch.finfo(dtype).bits)).removeprefix("torch.")


# -------------------------------------------------------------------------------------- rows


def _bad_rows(case: _ReplayCase) -> tuple[tuple[int, ...], int]:
    """Return samples that are bad in a replay on their own, if the rest is fine; their number.

    With several micro-batches, in the first that is bad on its own.
    """
    number = 0
    if len(case.batches) > 1:
        alone = (i for i, batch in enumerate(case.batches) if case.is_bad([batch]))
        number = next(alone, -1)
        if number < 0:
            return (), 0
        case.details.append(f"micro-batch {number} of {len(case.batches)} is bad alone")
    batch = case.batches[number]
    count = rows_in(batch)
    bad = _bisect_bad_samples(case, batch, list(range(count))) if count > 1 else []
    rest = [row for row in range(count) if row not in set(bad)]
    if not bad or not rest or case.replay([take_rows(batch, rest)]).error:
        return (), count
    if case.is_bad([take_rows(batch, rest)]):
        return (), count
    for row in list(bad) if len(bad) > 1 else ():
        # On its own it may be bad for another reason: all its labels are ignored, for example.
        others = [each for each in bad if each != row]
        if not case.is_bad([take_rows(batch, sorted({*rest, row}))]):
            bad, rest = others, sorted({*rest, row})
    return tuple(bad), count


def _bisect_bad_samples(case: _ReplayCase, batch: Any, rows: list[int]) -> list[int]:
    """Return bad samples of a replayed batch, by bisection; none if that is too slow."""
    bad: list[int] = []
    waiting = [rows]
    while waiting and case.num_plays < _MOST_PLAYS and len(bad) < _MOST_ROWS:
        part = waiting.pop(0)
        if len(part) < len(rows) and not case.is_bad([take_rows(batch, part)]):
            continue
        if len(part) == 1:
            bad += part
        else:
            half = len(part) // 2
            waiting += [part[:half], part[half:]]
    return sorted(bad)


def _outlying_value_sentence(case: _ReplayCase, rows: Sequence[int]) -> str:
    """Return a sentence about a bad step's samples with invalid values; empty: none."""
    without = "it" if len(rows) == 1 else _samples(rows)
    for batch in case.batches:
        for tensor in tensors_in(batch):
            if not tensor.is_floating_point() or not tensor.dim() or len(tensor) <= max(rows):
                continue
            largest = tensor.detach().double().abs().reshape(len(tensor), -1)
            if not largest.shape[1]:
                continue
            largest = largest.amax(dim=1)
            others = largest[[row for row in range(len(tensor)) if row not in set(rows)]]
            usual = others[torch.isfinite(others)]
            for row in rows:
                value = float(largest[row])
                which = f"sample {row} of the batch"
                if not math.isfinite(value):
                    kind = "NaN" if math.isnan(value) else "an infinity"
                    return f"{which} holds {kind}; without {without} the batch is fine."
                if len(usual) and value > _OUT_OF_RANGE * max(float(usual.max()), 1e-30):
                    return (
                        f"{which} holds {value:.3g}, and all others at most "
                        f"{float(usual.max()):.3g}; without {without} the batch is fine."
                    )
    return ""


def _not_finite(case: _ReplayCase) -> str:
    """Return a sentence that NaN or Inf in the replayed batch is the cause; empty: it is not.

    For samples that cannot be left out. An infinity below 0 may be a mask, so it stays.
    """

    def wrong(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.isnan() | tensor.isposinf()

    def cleaned(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(wrong(tensor), torch.zeros_like(tensor), tensor)

    if not any(bool(wrong(tensor).any()) for tensor in tensors_in(list(case.batches))):
        return ""
    if case.is_bad([map_tensors(batch, cleaned) for batch in case.batches]):
        return ""
    return "the batch holds NaN or an infinity; with 0 in its place the step is fine."


def _samples(rows: Sequence[int]) -> str:
    """Return the bad samples of a replayed batch as text, counted from 0."""
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"sample{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:_SHOWN]))}{more}"


# ------------------------------------------------------------------------------------ words


def _origin_sentence(origin: NonfiniteOrigin | None) -> list[str]:
    """Return a sentence about the first non-finite value of a replay; empty without one."""
    if origin is None:
        return []
    where = origin.module if origin.module.startswith("the ") else f"`{origin.module}`"
    return [f"First not finite: {where}, {origin.operator} ({origin.direction})."]


def _is_bit_equal(capsule: Capsule, played: ReplayResult) -> bool | None:
    """Return whether the replayed loss has the run's bits; None if unknown."""
    return played.loss == capsule.loss if math.isfinite(capsule.loss) else None


def _loss_equality_sentence(case: _ReplayCase, played: ReplayResult) -> str:
    """Return whether the replayed loss is the run's, and with which weights, as a sentence."""
    equal = _is_bit_equal(case.capsule, played)
    loss = case.capsule.facts.get("loss")
    if loss is None:
        return f"Played with {case.weights.text}."
    if equal is None:
        same = "as in the run" if not math.isfinite(played.loss) else f"{loss} in the run"
        return f"The loss came out {played.loss:.6g} ({same}), with {case.weights.text}."
    equality = "bit-equal" if equal else f"not bit-equal to {loss!r}"
    return f"The loss came out {played.loss!r}, {equality}, with {case.weights.text}."


# ------------------------------------------------------------------------------------- files


def write_verdict(verdict: ReplayVerdict, capsule: Path) -> Path:
    """Write a replay's verdict next to its capsule; return its path."""
    path = capsule.with_suffix(VERDICT)
    raw = json.dumps(msgspec.to_builtins(verdict), indent=2).encode() + b"\n"
    replace_file(path, raw, mode=0o600)
    return path
