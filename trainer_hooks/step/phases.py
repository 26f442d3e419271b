"""The parts of a guarded step; ``monitor`` and ``attached`` call them in order.

prepare (fails open) -> exchange (one collective) -> verdict and update, on the device -> the host
handles the step from ``lag`` steps ago (``trainer_hooks.step.run``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from trainer_hooks.data.loader import BatchPosition
from trainer_hooks.exchange.device import DeviceParts
from trainer_hooks.exchange.reduce_vector import (
    SHORT_FROM,
    Rank0Values,
    RankContribution,
    ReducedNumbers,
    Verdict,
    judge_on_host,
)
from trainer_hooks.exchange.verdict_graph import VerdictGraphs
from trainer_hooks.guard.optimizers import OptimizerGuard, overflow_flag
from trainer_hooks.guard.schedules import is_scheduled
from trainer_hooks.measures.host import (
    NO_MEMORY,
    Elapsed,
    GroupSettings,
    HostMeasurements,
    SettingChange,
    device_memory,
    group_sizes,
    learning_rates,
    weight_decay,
)
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import OutgoingStep
from trainer_hooks.step.micro import MicroLosses
from trainer_hooks.tensors.gradients import local_tensor, no_gradient_error, reads_are_free, scale
from trainvitals.auto_clip import MaxNorm, refuse_max_norm
from trainvitals.detect.outliers import Limits
from trainvitals.errors import UsageError
from trainvitals.printable import name_type
from trainvitals.records import OVERFLOW

_NO_CLIP = 10.0
"""Multiple of the norm's limit from which a clip has no effect on an outlier."""
MAX_LOSSES = 20
"""Losses without a step after which we check whether the loop steps something else."""
MIN_WINDOWS = 3
"""Minimum number of times that gradients were created again in these losses."""


class Prepared(NamedTuple):
    """Result of a rank's local part before the exchange."""

    grads: list[Tensor]
    weighted: bool
    """Whether the weights of the losses are numbers of tokens."""
    failed: bool


class StepLoss(NamedTuple):
    """A step's loss on this rank."""

    loss: Tensor | float | None = None
    """A plain number if the host judges."""
    weight: Tensor | float = 1.0
    weighted: bool = False
    """Whether the weight is a number of tokens."""


class Orders(NamedTuple):
    """Verdict of one step in the form that every optimizer carries out."""

    bad: Tensor
    skip_on_host: bool | None
    divisor: Tensor | None
    lr_factor: float


class StepPhases:
    """Measures, exchanges, clips and reports one step after another."""

    def __init__(
        self, device: DeviceParts, run: RunContext, *, tokens_per_step: int | None
    ) -> None:
        self._device = device
        self._run = run
        self.clock = run.times
        self.clock.sections = device.sections
        self._tokens_per_step = tokens_per_step
        self.micro = MicroLosses(device.optimizers)
        """Losses given for the current step."""
        self.follow_groups()
        self._rates: list[float | None] = [None] * self._num_groups
        self._lr_factor = 1.0
        self._weight_decay: float | None = None
        self._changes: list[SettingChange] = []
        self._exchange: Elapsed | None = None
        self._flops: float | None = None
        self._read: list[float] | None = None
        """The vector and the verdict's figures, if an optimizer needs the verdict on the host."""
        self._judges_on_host = run.ranks.world_size == 1 and reads_are_free(device.norms.device)
        """Whether the host judges by plain numbers: on a device it would wait for them."""
        self._numbers: list[float] = []
        """The vector of this step, if the host judges."""
        self._divisor: Tensor | None = None
        """That of this step's clip, if the device judged and the optimizers take one."""
        self.turn = device.turns[0]
        """Optimizers that the current step moves."""
        self._no_scale = torch.full((1,), math.nan, dtype=torch.float64, device=device.norms.device)
        self.forget_row()

    def follow_groups(self) -> None:
        """Read the settings of the current parameter groups from the next step on."""
        optimizers = self._device.optimizers
        self._settings, self._group_sizes = GroupSettings(optimizers), group_sizes(optimizers)
        self._num_groups = len(self._group_sizes)
        self._graphs = VerdictGraphs(self._device.packer, self._run.faults)

    @property
    def has_new_groups(self) -> bool:
        """Whether the loop has changed the parameter groups since the last step, where it may."""
        sizes = group_sizes(self._device.optimizers)
        return sizes != self._group_sizes and self._run.given.takes_groups

    def forget_row(self) -> None:
        """Start a new row of steps: count earlier withheld updates no longer."""
        self._no_row = torch.zeros((), dtype=torch.float64, device=self._device.norms.device)
        self._rows: dict[int, Tensor | float] = {}

    # -------------------------------------------------------------------------- the losses

    def add_loss(self, loss: Tensor | float, weight: Tensor | float | None) -> None:
        """Add one micro-batch's loss to the step."""
        if not self._device.norms.has_loss:
            return
        # Added to 0.0 to get a copy: the loop may keep counting in its tensor.
        share = 0.0 + self._weight_or_one(weight)
        part = self.number("loss", loss) * share
        self.micro.add(loss, part, share, is_weighted=weight is not None)

    @property
    def is_never_stepped(self) -> bool:
        """Whether the loop trains, according to its losses, without any step through Vitals.

        A loop that accumulates gives many losses too, but does not create its gradients again.
        """
        return self.micro.num_given >= MAX_LOSSES and self.micro.num_windows >= MIN_WINDOWS

    def number(self, what: str, value: Tensor | float) -> Tensor:
        """Return a number without its graph; a kernel writes a plain one, so nothing waits.

        Raises:
            UsageError: ``value`` is not a number.
        """
        return self._scalar(what, value).to(torch.float64)

    def _scalar(self, what: str, value: Tensor | float) -> Tensor:
        """Return a number given to a step without its graph, in its own type."""
        if not isinstance(value, Tensor):
            if not hasattr(value, "__float__"):
                hint = f"pass the {what} as a tensor or a number"
                if isinstance(value, Mapping):
                    hint = f"with several losses, pass the sum: {what} = sum({what}es.values())"
                text = f"the {what} is {name_type(value)}; it must be one number"
                raise UsageError(text, hint=hint)
            return torch.full((), value, dtype=torch.float64, device=self._device.norms.device)
        whole = all(p.is_replicate() for p in getattr(value, "placements", ()))
        if value.numel() != 1 or not whole:
            raise UsageError(
                f"the {what} is {name_type(value)} of shape {tuple(value.shape)}; it must be "
                "one number, not sharded",
                hint=f"{what}.mean(), or for a DTensor {what}.full_tensor()",
            )
        return local_tensor(value.detach()).reshape(())

    def plain(self, what: str, value: Tensor | float) -> Tensor | float:
        """Return a step's number: a tensor on a device unchanged, otherwise a Python number.

        Raises:
            UsageError: ``value`` is not a number.
        """
        if isinstance(value, Tensor):
            number = self.number(what, value)
            return number if number.is_cuda else number.item()
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(
                f"the {what} is {value!r:.80}; it must be one number", hint="give a number"
            ) from None

    def _weight_or_one(self, weight: Tensor | float | None) -> Tensor | float:
        """Return the weight of a step's loss as a number; 1 if none was passed."""
        if isinstance(weight, Tensor):
            return self.number("weight", weight)
        return 1.0 if weight is None else float(weight)

    def _take_losses(self, loss: Tensor | float | None, weight: Tensor | float | None) -> StepLoss:
        """Return the step's loss; ``loss`` counts in addition to earlier ones, unless repeated."""
        taken = self.micro.take()
        if not self._device.norms.has_loss:
            return StepLoss()  # loops often pass 0 or -1 there
        if taken is None:
            if loss is None:
                return StepLoss()
            own: Tensor | float
            if self._judges_on_host and _is_on_host(loss):
                own = loss.item()
            else:
                own = self._scalar("loss", loss)
            return StepLoss(own, self._weight_or_one(weight), weight is not None)
        total, weights, weighted = taken
        if loss is not None and not self.micro.is_last(loss):
            share = self._weight_or_one(weight)
            total = total + self.number("loss", loss) * share
            weights, weighted = weights + share, weighted and weight is not None
        # With a total weight of 0, such as a batch with all tokens masked, there is no mean.
        return StepLoss(total / (weights + (weights == 0)), weights, weighted)

    # --------------------------------------------------------------------- before the exchange

    def prepare(
        self,
        step: int,
        loss: Tensor | float | None,
        weight: Tensor | float | None,
        *,
        first: bool,
        max_norm: MaxNorm | None = None,
        norm: Tensor | None = None,
    ) -> Prepared:
        """Fill the reduce vector. An internal error only sets this rank's failure flag in it.

        An invalid loss is counted and omitted: the gradients are still judged.

        Raises:
            UsageError: the weights are currently replaced by the averages of an EMA.
        """
        device, run = self._device, self._run
        if device.averages is not None:
            device.averages.refuse_swapped()
        self._look_at_groups()
        turn, device.norms.part = self.turn, self.turn.part
        is_set = is_scheduled(device.schedulers, device.optimizers[0], self._rates)
        outgoing = OutgoingStep(step, run.attempt, turn.number, max_norm, self._rates, is_set)
        run.features.before_measure(outgoing)
        root = _rank0_values(run, outgoing)
        device.norms.align()
        if turn.number:
            overflow = overflow_flag(device.scaler, turn.optimizers, device.norms.device)
        else:
            overflow = device.engine.overflow()
        grads: list[Tensor] | None = None
        failed, given = True, StepLoss()
        fill = device.packer.fill_on_host if self._judges_on_host else device.packer.fill
        with run.faults.fail_open("loss"):
            given = self._take_losses(loss, weight)
        with run.faults.fail_open("prepare"):
            where, grads = device.norms.gradients()
            device.norms.squares_into(device.packer.squares, where, grads)
            fill(self._local_contribution(outgoing, given, len(grads), overflow, norm), root)
            if device.sampler is not None:
                with run.faults.fail_open("signals"):
                    scale = device.engine.loss_scale()
                    device.sampler.fill(step, device.packer.sampled, scale)
            failed = False
        if failed:
            # Without its numbers, this rank still unscales, clips and steps like the others.
            local = RankContribution(
                loss=None,
                weight=0.0,
                overflow=overflow,
                failed=True,
                values=run.features.contribute_always(outgoing),
            )
            device.packer.clear()
            fill(local, root)
        elif not grads and first and run.ranks.world_size == 1:
            raise no_gradient_error(turn.name)
        return Prepared(
            device.norms.clip_fallback_gradients() if grads is None else grads,
            given.weighted,
            failed,
        )

    def _look_at_groups(self) -> None:
        """Read the groups' settings of this step, before a scheduler changes them."""
        optimizers = self._device.optimizers
        with self._run.faults.fail_open("signals"):
            self._rates = learning_rates(optimizers)
            if self._run.is_rank0:
                self._weight_decay = weight_decay(optimizers)
            self._changes = self._settings.take_changes() if self._run.is_rank0 else []
        if len(self._rates) != self._num_groups:
            error = _added_group_error(len(self._rates), self._num_groups)
            self._run.faults.count("param_groups", error)

    def add_flops(self, flops: float) -> None:
        """Add counted FLOPs of the current step."""
        self._flops = (self._flops or 0.0) + flops

    def _local_contribution(
        self,
        outgoing: OutgoingStep,
        given: StepLoss,
        num_gradients: int,
        overflow: Tensor | None,
        norm: Tensor | None,
    ) -> RankContribution:
        """Return this rank's part of the step's exchange."""
        norms, run = self._device.norms, self._run
        return RankContribution(
            loss=given.loss,
            weight=given.weight,
            overflow=overflow,
            nonfinite_params=norms.nonfinite_parameters() if run.checks_parameters else None,
            num_gradients=num_gradients,
            norm_before_clip=norm,
            values=run.features.contribute(outgoing),
        )

    def propose_groups(self, digest: int) -> tuple[Prepared, Verdict] | None:
        """Compare the parameter groups that this rank has with the other ranks. Collective.

        Call before a step's own exchange, on a rank with new groups. The exchange has the old
        layout, because a rank without new groups makes its step's one meanwhile: it gets the digest
        of the groups in its place and NaN as the gradients, so it skips its update.

        Returns:
            None if all ranks have the same new groups. Otherwise the step's outcome: a skip, after
            which ``AddedGroupsFeature`` raises on all ranks.
        """
        packer = self._device.packer
        packer.clear()
        packer.squares.fill_(math.nan)
        packer.fill(RankContribution(loss=None, weight=0.0, values={"groups": float(digest)}), None)
        verdict = self.exchange()
        numbers = ReducedNumbers(packer.layout, packer.pack.tolist())
        if set(numbers.by_rank("groups")) == {float(digest)}:
            return None
        return Prepared([], False, False), verdict

    # ----------------------------------------------------------------------- from the exchange on

    def exchange(self, max_norm: MaxNorm | None = None) -> Verdict:
        """Sum the vector over the ranks, the only collective of a step, and judge it."""
        packer, ranks = self._device.packer, self._run.ranks
        if ranks.world_size > 1:
            pack = packer.pack
            took = self.clock.exchange(pack.device, lambda: ranks.reduce(pack))
            # The stages of a pipeline end backward one after the other: the others' wait for the
            # first stage would make its rank a straggler.
            self._exchange = took if self._run.given.pipeline is None else None
        if not self._run.given.owns_clip:
            packer.undo_clip()
        verdict = self._judge(max_norm)
        self._rows[self.turn.number] = verdict.row
        return verdict

    def _judge(self, max_norm: MaxNorm | None) -> Verdict:
        """Return the verdict on the reduce vector, computed on device or host."""
        packer, row = self._device.packer, self._rows.get(self.turn.number)
        if not self._judges_on_host:
            row = self._no_row if row is None else row
            assert isinstance(row, Tensor), "all earlier steps were judged on the device"
            # Optimizers that need the verdict on the host take no divisor.
            takes_divisor = packer.pack.is_cuda and not self._device.engine.reads_verdict
            limit = max_norm if takes_divisor else None
            verdict, self._divisor = self._graphs.judge(row, self.turn.number, limit)
            return verdict
        self._numbers = packer.pack.tolist()
        if not self._run.given.owns_clip:  # the squares have changed since
            packer.measure_norm()
        return judge_on_host(packer.layout, self._numbers, packer.norm, float(row or 0.0))

    def own_loss(self) -> float | None:
        """Return this rank's loss of the last exchanged step; waits for the device."""
        packer = self._device.packer
        return ReducedNumbers(packer.layout, packer.pack.tolist()).losses()[packer.layout.rank]

    def orders(
        self, verdict: Verdict, prepared: Prepared, step: int, max_norm: MaxNorm | None
    ) -> Orders:
        """Clip, prepare the update, and return the orders of the verdict for each optimizer."""
        device = self._device
        # Observe mode changes nothing in the loop, including the scaler's own skip.
        bad = verdict.bad if self._run.mode != "observe" else verdict.overflow
        skip_on_host = None
        if device.engine.reads_verdict:
            skip_on_host = self._read_verdict(verdict, bad)
        divisor = None
        if max_norm is not None and prepared.grads and not skip_on_host:
            divisor = self._clip(verdict, prepared, max_norm)
        self._run.features.before_update()
        if device.sampler is not None:
            device.sampler.before_update(step)
        if device.averages is not None:
            with self._run.faults.fail_open("averages"):
                device.averages.apply_verdict(bad, self.turn.optimizers)
        # The first optimizer's rate is the one that is judged.
        rate = self._rates[0] if self.turn.is_headline else None
        self._lr_factor = self._run.judge.lr_factor_at(step, rate)
        return Orders(bad, skip_on_host, divisor, self._lr_factor)

    def _read_verdict(self, verdict: Verdict, bad: Tensor) -> bool:
        """Read the verdict for the decision and the row; return whether it is bad.

        At once and before the update: a second read would wait for the update.
        """
        if self._judges_on_host:
            self._read = self._host_figures(verdict)
            return bool(bad)
        pack = self._device.packer.pack
        is_bad, *self._read = torch.cat((bad[None], pack, *verdict.derived())).tolist()
        return bool(is_bad)

    def as_overflow(self, verdict: Verdict) -> Verdict:
        """Return the verdict, also in the row, of a step that an engine skips as an overflow."""
        bad = torch.ones_like(verdict.bad)
        verdict = verdict._replace(bad=bad, overflow=bad, bits=verdict.bits + OVERFLOW)
        if self._read is not None:
            *vector, _, loss, norm = self._read
            self._read = [*vector, float(verdict.bits), loss, norm]
        return verdict

    def _host_figures(self, verdict: Verdict) -> list[float]:
        """Return the vector and the figures of a verdict of the host, as they are read back."""
        bits, loss, norm = verdict.bits, verdict.loss, verdict.grad_norm
        return [*self._numbers, float(bits), float(loss), float(norm)]

    def apply(self, guards: Sequence[OptimizerGuard], orders: Orders) -> None:
        """Step the optimizers as ordered; their time counts as the loop's."""
        with self.clock.optimizer_time():
            for guard in guards:
                guard.apply(
                    orders.bad,
                    skip_on_host=orders.skip_on_host,
                    lr_factor=orders.lr_factor,
                    divisor=orders.divisor,
                )
        if (averages := self._device.averages) is not None:
            for guard in guards:
                with self._run.faults.fail_open("ema"):
                    averages.average_after_step(guard.optimizer)
        # Optimizers that are stepped one after another by the loop are not all done here.
        if (sampler := self._device.sampler) is not None and len(guards) == len(self.turn.guards):
            sampler.after_update()

    def usable(self, max_norm: MaxNorm | None, *, first: bool) -> MaxNorm | None:
        """Return the norm to clip to; refuse an invalid one, after the first step only count it."""
        if first:
            refuse_max_norm(max_norm)
        if max_norm is None or (type(max_norm) is float and 0.0 < max_norm < math.inf):
            return max_norm
        with self._run.faults.fail_open("max_norm"):
            refuse_max_norm(max_norm)
            return None if max_norm == math.inf else max_norm
        return None

    def settle(self, orders: Orders) -> None:
        """Restore what forward wrote in a bad step, and copy the state for the next step."""
        if self._run.mode != "observe":
            self._device.shadow.settle(orders.bad)
        else:
            self._device.shadow.keep()

    def _clip(self, verdict: Verdict, prepared: Prepared, max_norm: MaxNorm) -> Tensor | None:
        """Clip the gradients to ``max_norm``, or return the divisor for the optimizers.

        An optimizer that takes the verdict on the device takes the divisor as well, which saves a
        pass over all gradients. The norm is the global one. If no rank could measure, it is this
        rank's own, which is equal on all replicas; sharded ranks have no common norm then and do
        not clip.
        """
        packer, norm = self._device.packer, verdict.grad_norm
        if prepared.failed and self._device.norms.replicated:
            with self._run.faults.fail_open("clip"):
                own, num_failed = torch.nn.utils.get_total_norm(prepared.grads), verdict.num_failed
                if isinstance(norm, Tensor) and isinstance(num_failed, Tensor):
                    measured = num_failed != self._run.ranks.world_size
                    norm = torch.where(measured, norm, own.to(norm))
                else:  # there is only one rank
                    norm = own.item()
        if self._divisor is not None and norm is verdict.grad_norm:
            return self._divisor
        # Most steps do not clip: a norm that the host knows saves a pass over the gradients.
        known: float | None = None
        if not isinstance(norm, Tensor):
            known = norm
        elif self._read is not None and norm is verdict.grad_norm:
            known = self._read[-1]
        elif reads_are_free(norm.device):
            known = norm.item()
        if max_norm == "auto":
            limit = packer.auto_max_norm
            if known is not None and reads_are_free(limit.device) and not known > limit.item():
                return None
        elif known is not None and known + 1e-6 <= min(max_norm, SHORT_FROM):
            return None
        divisor = packer.clip_divisor(self._on_device(norm), max_norm)
        if not self._device.engine.reads_verdict:
            return divisor
        scale(prepared.grads, divisor.reciprocal())
        return None

    def _on_device(self, number: Tensor | float) -> Tensor:
        """Return a step's number as a float64 tensor on the device."""
        return torch.as_tensor(number, dtype=torch.float64, device=self._device.norms.device)

    def report(
        self,
        verdict: Verdict,
        prepared: Prepared,
        *,
        step: int,
        max_norm: MaxNorm | None,
        position: BatchPosition | None,
        samples: int | None = None,
        before_clip: bool = False,
    ) -> tuple[list[float], HostMeasurements] | None:
        """Start the copy of the step's numbers to the host; return those of ``lag`` steps ago."""
        device = self._device
        own = () if device.sampler is None else device.sampler.own_numbers()
        host_step = self._host_step(step, max_norm, prepared.weighted, position, samples)
        host_step.before_clip = before_clip
        host_step.clip_unknown = before_clip and max_norm is None
        agent, now = self._run.agent, host_step.monotonic_ns
        if agent is not None and now >= agent.next_look_ns:
            agent.restart_if_ended(now, step=step, attempt=host_step.attempt)
        read, self._read = self._read, None
        if read is not None and not own and device.engine.loss_scale() is None:
            return [*read, math.nan], host_step
        if self._judges_on_host:
            own_numbers = (number for part in own for number in part.tolist())
            scaled = device.engine.loss_scale() is not None
            scale = self._loss_scale().item() if scaled else math.nan
            numbers = [*self._host_figures(verdict), scale, *own_numbers]
            return device.readback.push(numbers, host_step)
        figures = (*verdict.derived(), self._loss_scale())
        return device.readback.push(torch.cat((device.packer.pack, *figures, *own)), host_step)

    def pop_urgent_numbers(self) -> tuple[list[float], HostMeasurements] | None:
        """Return the numbers of a step that cannot wait; None if there is none.

        During a row of outliers, each one is judged before the next update.
        """
        return self._device.readback.pop() if self._run.judge.is_suspicious else None

    def _loss_scale(self) -> Tensor:
        """Return the scaler's scale on the device; NaN without a scaler."""
        loss_scale = self._device.engine.loss_scale()
        if loss_scale is None:
            return self._no_scale
        scale = loss_scale.detach().to(self._device.norms.device, torch.float64)
        return scale.reshape(1)

    def _host_step(
        self,
        step: int,
        max_norm: MaxNorm | None,
        weighted: bool,
        position: BatchPosition | None,
        samples: int | None,
    ) -> HostMeasurements:
        """Return this rank's host measurements, and start the times of the next step."""
        clock = self._run.clock
        times = self.clock.finish()
        self.clock.step = step + 1
        memory, estimate = NO_MEMORY, None
        with self._run.faults.fail_open("signals"):
            memory = device_memory(self._device.norms.device)
            estimate = self._device.memory.count_step()
        flops, self._flops = self._flops, None
        return HostMeasurements(
            step=step,
            attempt=self._run.attempt,
            time_unix_ns=clock.time_ns(),
            monotonic_ns=clock.monotonic_ns(),
            times=times,
            exchange=self._exchange,
            learning_rates=self._rates,
            weight_decay=self._weight_decay,
            changes=self._changes,
            lr_factor=self._lr_factor,
            max_norm=None if max_norm == "auto" else max_norm,
            clips_automatically=max_norm == "auto",
            tokens=self._tokens_per_step if self.turn.is_headline else None,
            weighted=weighted,
            samples=samples,
            flops=flops,
            memory=memory,
            memory_estimate_bytes=estimate,
            epoch=None if position is None else position.epoch,
            batch_index=None if position is None else position.batch,
            num_batches=None if position is None else position.num_batches,
            turn=self.turn.number,
        )


def _is_on_host(loss: Tensor | float) -> TypeGuard[Tensor]:
    """Return whether a step's loss is an ordinary number in host memory, like most on the CPU."""
    return (
        type(loss) is Tensor
        and loss.is_cpu
        and loss.dtype in (torch.float32, torch.float64)
        and loss.numel() == 1
    )


def _rank0_values(run: RunContext, outgoing: OutgoingStep) -> Rank0Values | None:
    """Return rank 0's limits and its features' values for a step; None on the other ranks."""
    if not run.is_rank0:
        return None
    turn, values = outgoing.turn, run.features.rank0_values(outgoing)
    limits = run.judge.limits(turn) if not values["expect_steps"] else Limits()
    # A clip at a thousand times the usual norm does not reduce any outlier.
    usual, clip = limits.grad_norm, outgoing.max_norm
    if clip == "auto":
        clip = values["auto_max_norm"]
    return Rank0Values(
        loss_limit=limits.loss,
        grad_norm_limit=limits.grad_norm,
        clips=clip is not None and clip != math.inf and (usual is None or clip <= _NO_CLIP * usual),
        max_row=run.judge.max_row(turn),
        skips=run.judge.facts.is_skipped(outgoing.step),
        values=values,
    )


def _added_group_error(now: int, watched: int) -> UsageError:
    """Return the step's error about groups that a loop with a pipeline or an engine added."""
    return UsageError(
        f"the optimizers have {now} parameter groups, but had {watched} at the start: gradients of "
        "groups added since are neither measured nor clipped",
        hint="with a pipeline or an engine, add all groups before watch() or attach()",
    )


def refuse_probe(has_loss: bool) -> None:
    """Refuse a probe if optimizers alternate: each step's loss differs from the probe's loss."""
    if has_loss:
        raise UsageError(
            "monitor.step(optimizer=...) was called in a loop over batches(probe=...): a probe "
            "reads one loss, but optimizers that take turns have one each",
            hint="leave the probe out: monitor.batches(loader)",
        )


def refuse_at_step(loss: object, joinables: Sequence[Any]) -> None:
    """Refuse, before the ranks' exchange, setups that are only visible once the loop runs.

    Raises:
        UsageError: the loss is a closure, or the loop runs inside ``Join``.
    """
    if not isinstance(loss, Tensor) and callable(loss):
        name = getattr(loss, "__qualname__", type(loss).__name__)
        raise UsageError(
            f"monitor.step() was given the function {name} as the loss; it takes no closure",
            hint="run forward and backward first: loss.backward(); monitor.step(loss)",
        )
    if joinables and any(joinable._join_config.enable for joinable in joinables):
        raise UsageError(
            "the loop runs within Join (DDP.join), where ranks may run out of data at different "
            "times: the others would wait forever for their part of the verdict",
            hint="give all ranks the same number of batches (DistributedSampler does, or "
            "drop_last=True), and remove Join",
        )
