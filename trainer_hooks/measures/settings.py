"""Settings of optional signals."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from trainvitals.config import AtLeastOne, Settings


class SignalSettings(Settings, frozen=True, kw_only=True):
    """Optional signals, for ``watch(signals=...)``; equal on all ranks. All are off by default.

    Attributes:
        every: steps between two samples of the signals below.
        weight_norm: norm of the parameters, in total and per layer. One pass over them in each
            sampled step.
        update_norm: norm of an update, and its ratio to the weight norm, in total and per layer.
            Keeps one copy of this rank's parameters, and makes three passes over them in each
            sampled step. Turns ``weight_norm`` on.
        outside_writes: change of the parameters and of the optimizer state between the end of an
            update and the next step, per layer: a value other than 0 was written by other code. Two
            passes over both in each sampled step; ``every=1`` detects every write. Not available if
            the engine of a framework steps the optimizer.
        activations: modules whose output magnitude and dead features are measured on rank 0, and
            whose output is checked for NaN and Inf on all ranks: names or patterns such as
            ``layers.*.mlp``; ``*`` is every module. One forward hook each, with two passes over the
            output in a sampled step, and a graph break under ``torch.compile``.
        noise_scale: gradient noise scale, critical batch size, and the norm of each rank's own
            gradients. Only for DDP without a communication hook, because it uses that hook. One
            pass over the gradients in each sampled step.
        reduction: check that the averaged gradients are the sum of what the ranks sent, for one
            bucket of DDP in each sampled step: finds a faulty link or reduction. Only for DDP
            without a communication hook. Two passes over the bucket.
        flops_per_token: model FLOPs of one trained token, for utilization: from
            ``trainvitals.flops.transformer_flops_per_token``, or your own. None: 6 per parameter.
        profile_slowdowns: profile three steps of the slowest rank and of a typical one with
            ``torch.profiler`` if the run becomes slower: at most once per hour and three times per
            run; not in ``observe``. A profiler can disturb CUDA graphs and other profilers; this
            was not tested on GPUs.
        peak_flops: peak dense FLOP/s of one device, for utilization, if ``trainvitals.flops`` does
            not know the device. None: its bf16 peak from there.
    """

    section = "SignalSettings"

    every: AtLeastOne = 10
    weight_norm: bool = False
    update_norm: bool = False
    outside_writes: bool = False
    activations: tuple[str, ...] = ()
    noise_scale: bool = False
    reduction: bool = False
    profile_slowdowns: bool = False
    flops_per_token: Annotated[float, Meta(gt=0.0, le=1e30)] | None = None
    peak_flops: Annotated[float, Meta(gt=0.0, le=1e30)] | None = None

    def __post_init__(self) -> None:
        """Refuse invalid values, and a string of ``activations``."""
        patterns: object = self.activations
        if isinstance(patterns, str):
            raise self.refusal(
                "activations", "a tuple of names", hint=f"activations=({patterns!r},)"
            )
        super().__post_init__()

    @property
    def measures(self) -> bool:
        """Return whether any of the signals is measured."""
        norms = self.weight_norm or self.update_norm or self.outside_writes
        own_gradients = self.noise_scale or self.reduction
        return norms or own_gradients or bool(self.activations)

    def due(self, step: int) -> bool:
        """Return whether the step is sampled."""
        return step % self.every == 0
