"""Comparison of state that ranks must hold equal: one value per step, and a vote if they differ.

In each step, a rank computes a value from the parameters due in this step, less often from
optimizer state and averages, from the step's settings, and from a snapshot if one was taken: equal
values mean equal ranks. The value is sent in the step's all-reduce. If values differ, all ranks
know it at the same step. They compare every tensor by its fingerprint (collectively), find the
elements that differ, and take a vote.

With two ranks there is no majority. After a rollback the steps are trained again, and the rank
whose elements were further from the repeated result was wrong.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_hooks.exchange.emit import Emitter
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.state import TrainingState
from trainer_hooks.tensors.copying import fingerprint_of, word_of
from trainer_hooks.tensors.optimizer_state import true_elements
from trainvitals.auto_clip import MaxNorm
from trainvitals.detect.replicas import (
    EVERY,
    FingerprintVote,
    find_farthest_rank,
    format_ranks,
    vote_on_fingerprints,
)
from trainvitals.errors import UsageError

ROUND = EVERY
"""Steps in which every parameter is compared once."""
STATE_EVERY = 10
"""Optimizer state and averages are compared this many times less often than parameters."""
_SETTINGS = (
    "lr", "weight_decay", "momentum", "dampening", "nesterov", "betas", "eps", "alpha", "amsgrad",
    "maximize",
)  # fmt: skip
"""Settings of a parameter group that must be equal on all ranks."""
_NAMED = 3
_CHUNK = 4096
"""Bytes compared by one number in the search for differences."""
_MAX_CHUNKS = 8
_MAX_BYTES = 1 << 28
"""Larger tensors are named, but not searched."""
NO_ORDER = (-1, -1)
"""Value without a sampler that distributes the data between ranks."""
_MAX_TOLD = 64
"""Maximum number of elements in a capsule."""
_MAX_RANKS = 64
"""With more ranks, the elements are not exchanged."""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Result of the ranks' comparison after their values differed; equal on all of them.

    ``state``: parameters, optimizer state or averages; ``settings``: of the step; ``snapshot``:
    only the copies; ``untied``: they were never equal, and are no longer compared.
    """

    kind: Literal["state", "settings", "snapshot", "untied"]
    vote: FingerprintVote
    text: str
    is_again: bool = False
    """Whether it equals the difference before the rollback bit for bit: not due to hardware."""


class ReplicaDiagnosis(NamedTuple):
    """Result of a replay about an earlier difference."""

    rank: int
    text: str


class _RankInfo(NamedTuple):
    """Information of a rank about itself at the start."""

    group: tuple[int, ...]
    digest: int
    """Digest of the names that it compares with its group."""
    trains_one_model: bool
    failure: str
    location: str
    """Node and device of the rank."""


class _FingerprintInputs(NamedTuple):
    """Inputs of a step's value."""

    step: int
    settings: bytes
    snapshot: Tensor | None
    looks_again: bool
    """Whether state that is known to differ is included again."""


@dataclass(frozen=True, slots=True)
class _Evidence:
    """The differing state, kept across a rollback."""

    step: int
    """The step that was trained next from the compared state."""
    states: tuple[bytes | None, ...]
    """All fingerprints, by rank."""
    key: str
    elements: list[int]
    values: dict[int, list[float]]
    vote: FingerprintVote


class Replicas:
    """One rank's part. ``word`` in each step; ``diagnose`` on all ranks if values differ."""

    def __init__(
        self,
        state: TrainingState,
        ranks: Ranks,
        *,
        keys: Sequence[str],
        groups: Groups,
        places: Sequence[str],
        optimizers: Sequence[Optimizer],
        faults: FaultCounter,
        every: int,
    ) -> None:
        """``keys`` are parameters, by the names of the state; empty: only settings are compared.

        ``groups`` are ranks that must be equal.
        """
        self.groups = groups
        self.every = every
        self._state = state
        self._ranks = ranks
        self._places = places
        self._optimizers = optimizers
        self._faults = faults
        self._is_member = any(ranks.rank in group for group in groups)
        self._params = list(keys)
        self._dropped: set[str] = set()
        self._split = state.split_optimizers
        self._apart: tuple[str, ...] = ()
        """Tensors that were found to differ, compared again once per round."""
        self.unresolved: tuple[int, ...] = ()
        """Ranks that currently differ: no state is kept until this is resolved."""
        self._settings_differ = False
        self._recent: deque[_FingerprintInputs] = deque(maxlen=4)
        self._first = -1
        self._is_again = False
        self._last_named = -1
        self._evidence: _Evidence | None = None
        self._went_back = False
        self._replayed: tuple[int, ReplicaDiagnosis] | None = None
        self._may_meet = True
        self._lay_out()

    @classmethod
    def make(
        cls,
        state: TrainingState | None,
        *,
        ranks: Ranks,
        optimizers: Sequence[Optimizer],
        node: str,
        emitter: Emitter,
        faults: FaultCounter,
    ) -> Replicas | None:
        """Agree on the compared state; None if there is nothing to compare. Collective."""
        if ranks.world_size == 1:
            return None
        keys: list[str] = []
        group: tuple[int, ...] = ()
        failure, together, node_name = "", False, node
        try:
            if state is None:
                raise LookupError("the state of this training cannot be read")
            group, keys = _own_group(state.holders(ranks.world_size))
            together = state.trains_one_model(ranks.world_size)
            node_name = f"{node}, {_rank_device_text(state.device)}"
        except Exception as error:  # noqa: BLE001 - sent to all ranks, which then compare nothing
            failure = f"{type(error).__name__}: {error}"
        digest = zlib.crc32("\n".join(keys).encode())
        offers = ranks.gather(_RankInfo(group, digest, together, failure, node_name))
        groups, why = _agree_on_groups(offers)
        emitter.note("replicas", why, step=0, attempt=0)
        if not groups or state is None:
            if state is not None and not any(offer.failure for offer in offers):
                _note_differing(state, ranks, emitter, faults)
            return None
        compared = keys if group in groups else []
        return cls(
            state, ranks, keys=compared, groups=groups, places=[offer.location for offer in offers],
            optimizers=optimizers, faults=faults, every=ROUND,
        )  # fmt: skip

    # ---------------------------------------------------------------------- compared state

    def _lay_out(self) -> None:
        """Compute the steps of each tensor; again when a tensor is no longer compared."""
        params, state = self._state.parameters, self._state
        self._params = [key for key in self._params if key not in self._dropped]
        self._compared = frozenset(self._params)
        self._weights = [params[key] for key in self._params]
        self._moments = [
            (f"optim.{i}.{name}", param, of)
            for i, name, param, of in state.optimizer_states()
            if f"model.{name}" in self._compared
        ]
        averages = state.averages()
        live = state.tensors() if averages else {}
        # An average on the host is written by copies without synchronization.
        self._averages = {
            key: live[key]
            for key, weight in averages.items()
            if weight in self._compared
            and key not in self._dropped
            and live[key].device == state.device
        }

    def follow_groups(self, added: Mapping[str, Tensor]) -> None:
        """Compare the parameters of added groups too; ``added`` by their names. Collective.

        Call with the gradients of a step.

        Raises:
            UsageError: the gradients of one differ between ranks that must be equal.
        """
        self._state.follow_groups()
        if self._params:
            self._params = _own_group(self._state.holders(self._ranks.world_size))[1]
        self._lay_out()
        sums = {
            name: _gradient_checksum(param)
            for name, param in added.items()
            if f"model.{name}" in self._compared and not hasattr(param, "to_local")
        }
        everyone = self._ranks.gather(sums)
        for name in sums:
            vote = vote_on_fingerprints(
                [rank_sums.get(name, 0) for rank_sums in everyone], self.groups
            )
            if vote.apart:
                raise UsageError(
                    f"the gradient of {name}, which was added to an optimizer, differs between "
                    f"ranks ({format_ranks(vote.apart)}): DDP does not average it, because it did "
                    "not require a gradient when DDP was created",
                    hint="wrap the model in DDP before freezing it, with "
                    "find_unused_parameters=True; or wrap it again, and call watch() again",
                )

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the parameters that ranks compare."""
        return tuple(self._params)

    def compares(self, key: str) -> bool:
        """Return whether the ranks of the group must hold the tensor of that name equal."""
        if key in self._dropped:
            return False
        if key.startswith("optim."):
            _, number, rest = key.split(".", 2)
            name = rest.rpartition(".")[0]
            return int(number) not in self._split and f"model.{name}" in self._compared
        return key in self._compared or key in self._averages

    def exclude_differing(self, step: int, attempt: int, emitter: Emitter) -> bool:
        """Exclude tensors that differ before the first step, and report them once. Collective.

        Returns whether there are any.
        """
        self._first = step
        fingerprints = self._fingerprints(("model.", "extra."))
        everyone = self._ranks.gather(fingerprints)
        differing = _differing_tensors(everyone, self.groups)[0]
        if not differing:
            return False
        self._exclude_keys(differing)
        text = (
            f"{_format_keys(differing)} differ between ranks before the first step, so they are "
            "not compared: each rank is taken to train its own"
        )
        emitter.note("replicas_not_alike", text, "warning", step=step, attempt=attempt)
        return True

    def _exclude_keys(self, keys: Sequence[str]) -> None:
        """Exclude these tensors from the comparison of replicas."""
        self._dropped |= set(keys)
        self._lay_out()

    # ---------------------------------------------------------------------- each step

    @torch.no_grad()
    def word(
        self,
        step: int,
        *,
        max_norm: MaxNorm | None,
        turn: int = 0,
        order: tuple[int, int] = NO_ORDER,
        snapshot: Tensor | None = None,
    ) -> Tensor | float | None:
        """Return 52 bits that are equal on two equal ranks; None if there is no comparison.

        On the device, without waiting for it. Call before the update of ``step``. ``order`` is seed
        and epoch by which the sampler distributes the data between ranks, ``snapshot`` the
        fingerprint of one that was taken before this step.
        """
        if not self._is_member:
            return None
        settings = _settings_bytes(self._optimizers, max_norm, step, turn, order)
        if self._apart:
            snapshot = None  # it cannot be a rollback target anyway
        looks_again = step % self.every == 0 and (bool(self._apart) or self._settings_differ)
        self._recent.append(_FingerprintInputs(step, settings, snapshot, looks_again))
        if self._went_back and self._evidence is not None and self._evidence.step == step:
            self._compare_replay(self._evidence)
        settings_checksum = zlib.crc32(settings)
        if self._settings_differ and step % self.every:
            settings_checksum = 0
        tensors = self._due_tensors(step)
        if not tensors and snapshot is None:
            return float(settings_checksum + 1)
        device = self._state.device
        total = fingerprint_of(tensors, device) if tensors else None
        if snapshot is not None:
            snapshot = snapshot.to(device)
            total = snapshot if total is None else total * 3 + snapshot
        assert total is not None, "something is compared"
        return word_of(total + settings_checksum)

    def _due_tensors(self, step: int) -> list[Tensor]:
        """Return this rank's part of the replica's tensors that are due."""
        often, rarely = self.every, self.every * STATE_EVERY
        tensors = [true_elements(p) for p in self._weights[step % often :: often]]
        keys = self._params[step % often :: often]
        for key, param, states in self._moments[step % rarely :: rarely]:
            state = states.get(param)
            for name, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, Tensor) and self.compares(f"{key}.{name}"):
                    tensors.append(true_elements(value))
                    keys.append(f"{key}.{name}")
        averages = list(self._averages)[step % rarely :: rarely]
        tensors += [self._averages[key] for key in averages]
        keys += averages
        if self._apart:
            # All of them once per round: separately they would cause a comparison in every step.
            apart = set(self._apart)
            tensors = [t for k, t in zip(keys, tensors, strict=True) if k not in apart]
            if step % often == 0:
                live = self._state.tensors()
                tensors += [live[key] for key in self._apart if key in live]
        return tensors

    # ---------------------------------------------------------------------- differing values

    def votes(self, fingerprints: Sequence[float]) -> FingerprintVote:
        """Return the vote over the ranks' values of a step; the same on all ranks."""
        if not fingerprints:
            return FingerprintVote()
        return vote_on_fingerprints(fingerprints, self.groups)

    def agreed(self, step: int) -> None:
        """Note that all values of a step were equal, including differing state once per round."""
        made_of = self._inputs_of(step)
        if made_of is not None and made_of.looks_again:
            self._apart, self.unresolved, self._is_again = (), (), False
            self._settings_differ = False

    def _inputs_of(self, step: int) -> _FingerprintInputs | None:
        """Return the inputs of a step's compared value; None if they are no longer kept."""
        return next((inputs for inputs in reversed(self._recent) if inputs.step == step), None)

    def close(self) -> None:
        """Allow no further comparisons: this rank may end before the others."""
        self._may_meet = False

    def diagnose(self, step: int, by_words: FingerprintVote, *, at: int) -> Difference:
        """Return the difference and the ranks with it. Collective: on all ranks of the step.

        ``by_words`` is the vote over the step's values; ``at`` is trained next from the live state.
        """
        if not self._may_meet:
            suspects = self._suspects_text(by_words)
            text = f"{suspects} differed in the last step, and the loop has ended"
            return Difference(kind="state", vote=by_words, text=text)
        made_of = self._inputs_of(step)
        settings = snapshot = None
        if made_of is not None:
            settings = made_of.settings
            snapshot = None if made_of.snapshot is None else int(made_of.snapshot)
        everyone = self._ranks.gather((settings, snapshot))
        by_settings = vote_on_fingerprints([s for s, _ in everyone], self.groups)
        was_told = self._settings_differ and not (made_of is not None and made_of.looks_again)
        self._settings_differ = bool(by_settings.apart)
        if by_settings.apart and not was_told:
            text = self._describe_settings([s for s, _ in everyone], by_settings)
            return Difference(kind="settings", vote=by_settings, text=text)
        return self._compare_state(step, by_words, [s for _, s in everyone], at)

    def _compare_state(
        self, step: int, by_words: FingerprintVote, snapshots: Sequence[int | None], at: int
    ) -> Difference:
        """Compare each tensor of the replicas, and keep the difference as evidence."""
        everyone = self._ranks.gather(self._fingerprints())
        differing, by_state = _differing_tensors(everyone, self.groups)
        was_apart, self._apart = bool(self._apart), tuple(differing)
        self.unresolved = by_state.apart or by_words.apart if differing else ()
        if not differing:
            words = [0 if s is None else s or 1 for s in snapshots]
            by_copy = vote_on_fingerprints(words, self.groups)
            if by_copy.apart:
                text = f"the copies of {format_ranks(by_copy.suspects)} differ, the state does not"
                return Difference(kind="snapshot", vote=by_copy, text=text)
            text = f"{self._suspects_text(by_words)} differed in one step, and does so no longer"
            return Difference(kind="state", vote=by_words, text=text)
        untied = self._never_equal(differing, step)
        if untied:
            self._exclude_keys(untied)
            self._apart = tuple(key for key in differing if self.compares(key))
            if not self._apart:
                self.unresolved = ()
                text = (
                    f"{_format_keys(differing)} differ between ranks since the first steps, so "
                    "they are not compared: each rank is taken to train its own"
                )
                return Difference(kind="untied", vote=by_state, text=text)
            differing = list(self._apart)
        key = differing[0]
        group = next((g for g in self.groups if set(g) & set(by_state.apart)), ())
        elements, values = self._find_differing_elements(key, group)
        before, states = self._evidence, tuple(data for _, data in everyone)
        is_same = before is not None and (before.step, before.states) == (at, states)
        is_again = self._is_again = (self._went_back and is_same) or (was_apart and self._is_again)
        self._evidence = _Evidence(at, states, key, elements, values, by_state)
        self._went_back, self._replayed = False, None
        text = f"{_format_keys(differing)} on {self._suspects_text(by_state)}"
        text += _describe_elements(key, elements, values)
        return Difference(kind="state", vote=by_state, text=text, is_again=is_again)

    def _suspects_text(self, by_words: FingerprintVote) -> str:
        """Return the ranks whose replica may be wrong as text, with their places."""
        ranks = by_words.suspects
        if len(ranks) == 1:
            return f"rank {ranks[0]} ({self._places[ranks[0]]})"
        if len(ranks) == 2:
            named = " or ".join(f"rank {rank} ({self._places[rank]})" for rank in ranks)
            text = f"{named} (two replicas have no majority)"
            if self._last_named in ranks:
                text += f"; a replay found rank {self._last_named} wrong before"
            return text
        return format_ranks(ranks)

    def _never_equal(self, differing: Sequence[str], step: int) -> list[str]:
        """Return tensors that were never equal: most of a kind, and since the first round.

        If settings differ, that is the reason, so the tensors do not count as intended to differ.
        """
        if self._settings_differ:
            return []
        kinds = Counter(_state_kind(k) for k in self._state.tensors() if self.compares(k))
        apart = Counter(map(_state_kind, differing))
        most = {kind for kind, num in apart.items() if num > 1 and 2 * num > kinds[kind]}
        rounds = {kind: self.every * (1 if kind == "model" else STATE_EVERY) for kind in most}
        untied = {kind for kind in most if step - self._first < rounds[kind]}
        return [key for key in differing if _state_kind(key) in untied]

    @torch.no_grad()
    def _fingerprints(self, prefix: tuple[str, ...] = ("",)) -> tuple[str, bytes | None]:
        """Return the names of the compared tensors and one int64 for each; None if impossible."""
        try:
            if not self._is_member or not self._params:
                return "", b""
            live = self._state.tensors()
            keys = [key for key in live if key.startswith(prefix) and self.compares(key)]
            device = self._state.device
            each = [fingerprint_of([live[key]], device) for key in keys]
            data = torch.stack(each).cpu().numpy().tobytes() if each else b""
            is_first = any(group[0] == self._ranks.rank for group in self.groups)
            return "\n".join(keys) if is_first else "", data
        except Exception as error:  # noqa: BLE001 - the others must not wait
            self._faults.count("replicas", error)
            return "", None

    # ---------------------------------------------------------------------- differing elements

    def _find_differing_elements(
        self, key: str, group: Sequence[int]
    ) -> tuple[list[int], dict[int, list[float]]]:
        """Return the first elements of a group's tensor that differ, and its ranks' values."""
        raw: bytes = b""
        tensor: Tensor | None = None
        try:
            tensor = self._state.tensors().get(key)
            is_small = tensor is not None and tensor.nbytes <= _MAX_BYTES
            if self._ranks.world_size <= _MAX_RANKS and tensor is not None and is_small:
                plain = tensor.detach().cpu().contiguous().view(-1)
                raw = plain.view(torch.uint8).numpy().tobytes()
        except Exception as error:  # noqa: BLE001 - the others must not wait
            self._faults.count("replicas", error)
        chunks = range(0, len(raw), _CHUNK)
        sums = np.array([zlib.crc32(raw[i : i + _CHUNK]) for i in chunks], dtype=np.uint32)
        everyone = self._ranks.gather(sums.tobytes())
        apart = _first_apart(everyone, (tuple(group),))
        pieces = self._ranks.gather([raw[i * _CHUNK : (i + 1) * _CHUNK] for i in apart])
        if not apart or tensor is None or not all(pieces):
            return [], {}
        dtype = tensor.dtype
        read = {
            rank: torch.frombuffer(bytearray(b"".join(pieces[rank])), dtype=dtype)
            for rank in group
            if len(pieces[rank]) == len(apart) and all(pieces[rank])
        }
        return _differing_elements(read, apart, tensor.element_size())

    def bad_elements(self) -> dict[str, Any] | None:
        """Return the first elements that differ, with the values of this rank and of a replica.

        The replica is a correct one if that is known; with two replicas, the other one. The values
        are exact up to float64. None if nothing differs, or the elements were not compared.
        """
        evidence, rank = self._evidence, self._ranks.rank
        if evidence is None or rank not in evidence.values or not self._apart:
            return None
        others = [other for other in evidence.values if other != rank]
        trusted = [other for other in others if other not in evidence.vote.suspects]
        return {
            "tensor": evidence.key,
            "elements": evidence.elements[:_MAX_TOLD],
            "own": evidence.values[rank][:_MAX_TOLD],
            "replica": evidence.values[(trusted or others)[0]][:_MAX_TOLD],
        }

    # ---------------------------------------------------------------------- rollback and replay

    def rolled_back(self, step: int) -> None:
        """Start again from an equal state; compare an earlier difference with the replay."""
        self._apart, self.unresolved, self._is_again = (), (), False
        self._settings_differ = False
        if not self._recent:  # not a rollback: the loop starts here, from its own state
            self._first = step
        self._recent.clear()
        self._replayed = None
        self._went_back = self._evidence is not None and step < self._evidence.step
        if not self._went_back:
            self._evidence = None

    def _compare_replay(self, evidence: _Evidence) -> None:
        """Compare the difference with the state after the same steps; reads a few numbers."""
        with self._faults.fail_open("replicas"):
            live = self._state.tensors().get(evidence.key)
            if live is None or self._ranks.rank not in evidence.values:
                return  # another group of replicas differed, or the elements are unknown
            now = live.view(-1)[torch.tensor(evidence.elements, device=live.device)]
            values = now.to(torch.float64).tolist()
            distances = {r: _l1_distance(was, values) for r, was in evidence.values.items()}
            rank, how = evidence.vote.rank, "the others agreed"
            if rank < 0:
                rank = find_farthest_rank(distances)
                how = "its values were further from those of the replay"
            if rank < 0:
                either = f"either of {format_ranks(evidence.vote.suspects)}"
                text = f"{either} was wrong: the replay is as far from both"
            else:
                text = f"rank {rank} ({self._places[rank]}) was wrong ({how})"
            text = (
                f"transient fault, healed: after the same steps {evidence.key} is equal on all "
                f"ranks; {text}"
            )
            self._replayed = (evidence.step + self.every, ReplicaDiagnosis(rank, text))

    def pop_diagnosis(self, step: int) -> ReplicaDiagnosis | None:
        """Return the diagnosis of a difference between replicas whose steps were replayed, once.

        It is returned one full comparison of all parameters after the replay, and None before.
        """
        if self._replayed is None or step < self._replayed[0]:
            return None
        named, self._replayed, self._evidence = self._replayed[1], None, None
        self._went_back, self._last_named = False, named.rank
        return named

    def _describe_settings(
        self, settings: Sequence[bytes | None], by_words: FingerprintVote
    ) -> str:
        """Return the settings that differ between replicas as text, with both values."""
        read = [None if s is None else np.frombuffer(s, dtype=np.float64) for s in settings]
        first = by_words.apart[0]
        group = next(group for group in self.groups if first in group)
        usual = next(r for r in group if settings[r] and settings[r] != settings[first])
        here, there = read[first], read[usual]
        assert here is not None and there is not None, "they voted"
        if len(here) != len(there):
            return f"{format_ranks(by_words.suspects)} have other parameter groups"
        names = _setting_names(self._optimizers)
        apart = [i for i in range(len(here)) if here[i] != there[i]]
        parts = [
            f"{names[i] if i < len(names) else 'a setting'} is {_format_setting(here[i])} on rank "
            f"{first} and {_format_setting(there[i])} on rank {usual}"
            for i in apart[:_NAMED]
        ]
        return "; ".join(parts)


# ------------------------------------------------------------------------------ pure functions


def _own_group(holders: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, ...], list[str]]:
    """Return the ranks with replicas of everything this one shares with others, and its names.

    A norm's weight may be stored on more ranks than the matrices of the same layer: it is compared
    among the ranks that share the matrices too.
    """
    if not holders:
        return (), []
    kinds = Counter(holders.values())
    group = set.intersection(*map(set, kinds))
    if len(group) < 2:
        group = set(kinds.most_common(1)[0][0])
    return tuple(sorted(group)), [key for key, ranks in holders.items() if group <= set(ranks)]


def _agree_on_groups(offers: Sequence[_RankInfo]) -> tuple[Groups, str]:
    """Return the groups of replicas that all members agree on, and a sentence about them."""
    failed = [(rank, offer.failure) for rank, offer in enumerate(offers) if offer.failure]
    if failed:
        rank, failure = failed[0]
        return (), f"replicas are not compared: rank {rank}: {failure}"
    claimed = {offer.group for offer in offers if len(offer.group) > 1}
    groups = [
        group
        for group in sorted(claimed)
        if len({offers[rank].digest for rank in group}) == 1
        and all(offers[rank].group == group for rank in group)
    ]
    if groups:
        size = len(groups[0])
        return tuple(groups), (
            f"replicas are compared among {size} ranks: each parameter every {ROUND} steps, "
            f"optimizer state every {ROUND * STATE_EVERY}"
        )
    if all(offer.trains_one_model for offer in offers):
        why = "each rank holds another part of them, so there is no replica"
        if claimed:
            why = "the ranks that hold replicas have other names for them"
        return (tuple(range(len(offers))),), f"parameters are not compared: {why}; settings are"
    return (
        (),
        "replicas are not compared: neither DDP, FSDP nor tensor parallelism keeps them equal",
    )


def _note_differing(
    state: TrainingState, ranks: Ranks, emitter: Emitter, faults: FaultCounter
) -> None:
    """Warn once about parameters that differ although they count as replicas. Collective."""
    fingerprints: dict[str, int] = {}
    with faults.fail_open("replicas"), torch.no_grad():
        params = state.plain_parameters()
        fingerprints = {
            key: int(fingerprint_of([p.detach()], p.device)) for key, p in params.items()
        }
    if len(set(ranks.gather(zlib.crc32(repr(fingerprints).encode())))) == 1:
        return
    everyone = ranks.gather(fingerprints)
    differing = [
        key
        for key, fingerprint in fingerprints.items()
        if any(r.get(key, fingerprint) != fingerprint for r in everyone)
    ]
    if differing:
        text = (
            f"{_format_keys(differing)} differ between ranks before the first step, but count as "
            "replicas in the gradient norm: broadcast them from rank 0; if each rank trains its "
            "own, as experts, set allreduce = False on them before watch()"
        )
        emitter.note("replicas_not_alike", text, "warning", step=0, attempt=0)


def _gradient_checksum(param: Tensor) -> int:
    """Return a checksum of a replica's gradient, at least 1; waits for the device."""
    if param.grad is None:
        return 1
    data = param.grad.detach().to_dense().cpu().contiguous().view(-1).view(torch.uint8)
    return 1 + zlib.crc32(data.numpy().tobytes())


def _differing_tensors(
    everyone: Sequence[tuple[str, bytes | None]], groups: Groups
) -> tuple[list[str], FingerprintVote]:
    """Return the names of the replicas' differing tensors, and the vote over all of them."""
    differing: dict[str, None] = {}
    wholes: list[object] = [data for _, data in everyone]
    for group in groups:
        names = everyone[group[0]][0].split("\n") if everyone[group[0]][0] else []
        fingerprints = [everyone[rank][1] for rank in group]
        rows = [np.frombuffer(data, dtype=np.int64) for data in fingerprints if data]
        if len({len(row) for row in rows}) > 1:
            differing["optimizer state that some ranks alone have"] = None
            continue
        for i, name in enumerate(names if len(rows) > 1 else ()):
            if any(row[i] != rows[0][i] for row in rows):
                differing[name] = None
    return list(differing), vote_on_fingerprints(wholes, groups) if differing else FingerprintVote()


def _first_apart(everyone: Sequence[bytes], groups: Groups) -> list[int]:
    """Return the first chunks that differ between replicas of a group."""
    apart: set[int] = set()
    for group in groups:
        rows = [np.frombuffer(everyone[rank], dtype=np.uint32) for rank in group]
        length = min(map(len, rows))
        for row in rows[1:]:
            apart |= set(np.flatnonzero(row[:length] != rows[0][:length])[:_MAX_CHUNKS].tolist())
    return sorted(apart)[:_MAX_CHUNKS]


def _differing_elements(
    read: Mapping[int, Tensor], chunks: Sequence[int], itemsize: int
) -> tuple[list[int], dict[int, list[float]]]:
    """Return the elements that differ between replicas, and their values."""
    if len(read) < 2 or len({len(values) for values in read.values()}) > 1:
        return [], {}
    bits = {rank: v.view(torch.uint8).view(len(v), itemsize) for rank, v in read.items()}
    first = next(iter(bits.values()))
    differs = torch.zeros(len(first), dtype=torch.bool)
    for other in bits.values():
        differs |= (other != first).any(dim=1)
    where = differs.nonzero().view(-1)
    per_chunk = _CHUNK // itemsize
    elements = [chunks[i // per_chunk] * per_chunk + i % per_chunk for i in where.tolist()]
    return elements, {r: v[where].to(torch.float64).tolist() for r, v in read.items()}


def _l1_distance(before: Sequence[float], now: Sequence[float]) -> float:
    """Return the distance of a replica's elements from a replay's; Inf if it is not finite."""
    total = sum(abs(a - b) for a, b in zip(before, now, strict=True) if a != b)
    return total if math.isfinite(total) else math.inf


def _state_kind(key: str) -> str:
    """Return the kind of a replica's tensor: for optimizer state, the name of the state."""
    return key.rpartition(".")[2] if key.startswith("optim.") else key.partition(".")[0]


def _format_keys(keys: Sequence[str]) -> str:
    """Return the names of a replica's tensors as text, shortened."""
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(keys[:_NAMED]) + more


def _describe_elements(
    key: str, elements: Sequence[int], values: Mapping[int, Sequence[float]]
) -> str:
    """Return the first differing element of a replica on each rank, as text."""
    if not elements:
        return ""
    each = ", ".join(f"{values[rank][0]:.9g} on rank {rank}" for rank in sorted(values)[:4])
    count = f"{len(elements)} elements differ" if len(elements) > 1 else "one element differs"
    return f"; {count}: element {elements[0]} of {key} is {each}"


def _rank_device_text(device: torch.device) -> str:
    """Return a rank's device in messages about replicas, with its GPU's UUID."""
    if device.type != "cuda":
        return device.type.upper()
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", "")
    return f"GPU {device.index or 0} {uuid}".rstrip()


_NO_CLIP, _AUTO = -1.0, -2.0
"""Values of ``max_norm`` that are not numbers, in the settings that ranks compare."""


def _settings_bytes(
    optimizers: Sequence[Optimizer],
    max_norm: MaxNorm | None,
    step: int,
    turn: int,
    order: tuple[int, int],
) -> bytes:
    """Return one step's settings to compare as the optimizers apply them: to float32's digits."""
    values = [_NO_CLIP if max_norm is None else _AUTO if max_norm == "auto" else float(max_norm)]
    for _, value in _numeric_group_settings(optimizers):
        values.append(value)
    with np.errstate(over="ignore"):
        rounded = np.array(values).astype(np.float32).astype(np.float64)
    return np.array([step, turn, *order], np.float64).tobytes() + rounded.tobytes()


def _setting_names(optimizers: Sequence[Optimizer]) -> list[str]:
    """Return the names of the settings that ranks compare with replicas."""
    return [
        "the step",
        "the optimizer's turn",
        "the sampler's seed",
        "the sampler's epoch",
        "max_norm",
        *(n for n, _ in _numeric_group_settings(optimizers)),
    ]


def _numeric_group_settings(optimizers: Sequence[Optimizer]) -> list[tuple[str, float]]:
    """Return the settings of every parameter group that ranks compare: plain numbers."""
    settings: list[tuple[str, float]] = []
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    for number, group in enumerate(groups):
        for name in _SETTINGS:
            value = group.get(name)
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, Tensor) and part.is_cuda:
                    continue  # reading it would wait
                if isinstance(part, int | float | Tensor):
                    settings.append((f"{name} of group {number}", float(part)))
    return settings


def _format_setting(value: float) -> str:
    """Return a compared setting as text: a number, none, or "auto"."""
    if value in (_NO_CLIP, _AUTO):
        return "none" if value == _NO_CLIP else '"auto"'
    digits = 16 if value.is_integer() else 7
    return f"{value:.{digits}g}"
