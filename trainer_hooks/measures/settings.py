"""Which signals a run asks for beside those that cost nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainvitals.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSettings:
    """What ``watch(signals=...)`` opts in to; equal on all ranks. The defaults cost nothing.

    Attributes:
        every: steps between two samples of what is opted in below.
        weight_norm: norm of the parameters, in total and by layer. One pass over them in each
            sampled step.
        update_norm: norm of an update, and its ratio to the weights' norm, in total and by layer.
            Keeps one copy of this rank's parameters, and makes three passes over them in each
            sampled step. Turns ``weight_norm`` on.
        activations: modules whose output's magnitude and dead features are measured, on rank 0:
            names or patterns such as ``layers.*.mlp``; ``*`` is every module. A forward hook each:
            two passes over the output in a sampled step, a call of Python else; it breaks the graph
            of ``torch.compile`` there.
        noise_scale: gradient noise scale, the critical batch size. DDP without a communication hook
            only: it takes the hook's place. One pass over the gradients in each sampled step.
        flops_per_token: model FLOPs of one trained token, for utilization: from
            ``trainvitals.flops.transformer_flops_per_token``, or your own. None is 6 per parameter.
    """

    every: int = 10
    weight_norm: bool = False
    update_norm: bool = False
    activations: tuple[str, ...] = ()
    noise_scale: bool = False
    flops_per_token: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: a value cannot work.
        """
        if not isinstance(self.every, int) or self.every < 1:
            raise UsageError(
                f"SignalSettings.every is {self.every!r}; it must be a whole number from 1",
                hint="10 measures in every tenth step",
            )
        for name in ("weight_norm", "update_norm", "noise_scale"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise UsageError(
                    f"SignalSettings.{name} is {value!r}; it must be True or False",
                    hint="leave it out to measure nothing",
                )
        patterns: object = self.activations
        if isinstance(patterns, str):
            raise UsageError(
                f"SignalSettings.activations is {patterns!r}; it must be a tuple of names",
                hint=f"activations=({patterns!r},)",
            )
        flops = self.flops_per_token
        if flops is not None and not (math.isfinite(flops) and flops > 0):
            raise UsageError(
                f"SignalSettings.flops_per_token is {flops!r}; it must be a number above 0",
                hint="leave it out to count 6 per parameter",
            )

    @property
    def measures(self) -> bool:
        """Whether anything is opted in that has to be measured."""
        norms = self.weight_norm or self.update_norm or self.noise_scale
        return norms or bool(self.activations)

    def due(self, step: int) -> bool:
        """Return whether the step is a sampled one."""
        return step % self.every == 0
