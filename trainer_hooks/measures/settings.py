"""Which signals a run asks for beside those that cost nothing."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from trainvitals.config import AtLeastOne, Settings


class SignalSettings(Settings, frozen=True, kw_only=True):
    """What ``watch(signals=...)`` opts in to; equal on all ranks. The defaults cost nothing.

    Attributes:
        every: steps between two samples of what is opted in below.
        weight_norm: norm of the parameters, in total and by layer. One pass over them in each
            sampled step.
        update_norm: norm of an update, and its ratio to the weights' norm, in total and by layer.
            Keeps one copy of this rank's parameters, and makes three passes over them in each
            sampled step. Turns ``weight_norm`` on.
        outside_writes: how far parameters, and the optimizer's state, changed between the end of an
            update and the next step's, by layer: anything but 0 was written by something else. Two
            passes over both in each sampled step; ``every=1`` sees every write. Not where the
            optimizer is stepped by a framework's engine.
        activations: modules whose output's magnitude and dead features are measured, of rank 0's
            part of the batch, and on all ranks whether it is finite: names or patterns such as
            ``layers.*.mlp``; ``*`` is every module. A forward hook each: two passes over the output
            in a sampled step, a call of Python else; it breaks the graph of ``torch.compile``
            there.
        noise_scale: gradient noise scale, the critical batch size, and the norm of each rank's own
            gradients. DDP without a communication hook
            only: it takes the hook's place. One pass over the gradients in each sampled step.
        reduction: whether the averaged gradients are what the ranks put in, of one of DDP's buckets
            in each sampled step: a faulty link or reduction is named. DDP without a communication
            hook only, as ``noise_scale``. Two passes over the bucket.
        flops_per_token: model FLOPs of one trained token, for utilization: from
            ``trainvitals.flops.transformer_flops_per_token``, or your own. None is 6 per parameter.
        profile_slowdowns: whether three steps of the slowest rank and a typical one are profiled
            with ``torch.profiler`` where the run gets slower than it was: at most once an hour, and
            three times in a run; not in ``observe``. Off by itself: a profiler that was not asked
            for may disturb CUDA graphs and profilers of others, and this was not tried on GPUs.
        peak_flops: dense FLOP/s of one device at most, for utilization: for a device or a type that
            ``trainvitals.flops`` does not know. None is its bf16 peak from there.
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
        """Refuse what cannot be.

        Raises:
            ConfigError: a value cannot work.
        """
        patterns: object = self.activations
        if isinstance(patterns, str):
            raise self.refusal(
                "activations", "a tuple of names", hint=f"activations=({patterns!r},)"
            )
        super().__post_init__()

    @property
    def measures(self) -> bool:
        """Whether anything is opted in that has to be measured."""
        norms = self.weight_norm or self.update_norm or self.outside_writes
        own_gradients = self.noise_scale or self.reduction
        return norms or own_gradients or bool(self.activations)

    def due(self, step: int) -> bool:
        """Return whether the step is a sampled one."""
        return step % self.every == 0
