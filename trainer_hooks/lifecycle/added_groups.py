"""Parameter groups that the loop adds during training, for example thawed layers or adapters.

The next step notices them on its rank. The ranks compare them in an additional exchange. If all
ranks have added the same groups, the parts of the run that depend on the parameters are built
again; otherwise the step is skipped and the run ends with an error on all ranks.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence

from trainer_hooks.exchange.emit import LayerAggregator
from trainer_hooks.exchange.reduce_vector import Verdict
from trainer_hooks.features.expected_change import ExpectedChangeFeature
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.phases import Prepared, StepPhases
from trainer_hooks.tensors.experts import expert_groups
from trainer_hooks.tensors.gradients import named_parameters
from trainvitals.errors import UsageError
from trainvitals.units import humanize_count

_LOG = logging.getLogger("trainvitals")
_MAX_NAMES = 4


def adopt_groups(
    run: RunContext, parts: StepPhases, judge_unread_steps: Callable[..., None], *, step: int
) -> tuple[Prepared, Verdict] | None:
    """Measure, guard and keep parameter groups that the loop has added. Collective.

    Call before the exchange of ``step``, after its backward. States from before are no targets of
    a rollback: the loop would not add the groups again.

    Returns:
        None if the step continues with the new groups; otherwise its outcome, a skip, because the
        ranks disagree.

    Raises:
        UsageError: the groups cannot be guarded; raised on all ranks.
        TrainingHalted: an earlier step, which is judged only now, halts the run.
    """
    device, recovery = run.device, run.recovery
    earlier_names = device.norms.names
    if run.ranks.world_size > 1:
        outcome = parts.propose_groups(_digest_groups(run))
        if outcome is not None:
            return outcome
    if recovery is not None:
        recovery.drop_targets(step)
    judge_unread_steps(patience_seconds=None)
    device.adopt_groups(run.given.model, run.ranks, run.faults)
    parts.follow_groups()
    names, sampler = device.norms.names, device.sampler
    added, removed = _only_in(names, earlier_names), _only_in(earlier_names, names)
    if run.replicas is not None:
        params = zip(device.norms.local_names, device.norms.params, strict=True)
        run.replicas.follow_groups({name: param for name, param in params if name in added})
    if recovery is not None:
        after = step - run.judge.last_unhealthy_step
        recovery.follow_groups(trusted=after > recovery.settings.healthy_after)
    if sampler is not None:
        sampler.start_step(step)
    run.emitter.follow_layers(
        LayerAggregator(
            names,
            () if sampler is None else sampler.measured_modules,
            tuple(turn.part for turn in device.turns),
            first_layers=run.emitter.layer_names,
        )
    )
    run.log.count_parameters(device.norms.num_parameters)
    run.features[ExpectedChangeFeature].mark(range(step, step + 1))
    _report(run, added, removed, step=step)
    return None


def _only_in(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the parameters of groups in ``names`` that are not in ``others``."""
    return [name for name in names if name not in set(others)]


def _digest_groups(run: RunContext) -> int:
    """Return a digest of what must be equal in all ranks' parameter groups, never 0.

    Each rank may have other experts.
    """
    optimizers, experts = run.device.optimizers, expert_groups(run.given.model)
    sizes = [
        [sum(id(param) not in experts for param in group["params"]) for group in o.param_groups]
        for o in optimizers
    ]
    try:
        params = named_parameters(run.given.model, optimizers)
        names = [name for name, param in params.items() if id(param) not in experts]
    except UsageError as error:  # raised again, on all ranks, when the groups are adopted
        names = [error.text]
    return 1 + zlib.crc32(repr((sizes, names)).encode())


def _report(run: RunContext, added: list[str], removed: list[str], *, step: int) -> None:
    """Report changed parameter groups once, in rank 0's log and among the run's events."""
    if not run.is_rank0:
        return
    changes = [_format_names("added", added), _format_names("removed", removed)]
    text = (
        f"the optimizers' parameters changed before step {step}: "
        f"{'; '.join(filter(None, changes))}; "
        f"{humanize_count(len(run.device.norms.names), 'parameter')} are guarded now"
    )
    if run.recovery is not None:
        text += f"; no rollback uses a state from before step {step + 1}, which has other groups"
    _LOG.warning("vitals: %s", text)
    run.emitter.note("groups_changed", text, step=step, attempt=run.attempt)


def _format_names(verb: str, names: list[str]) -> str:
    """Return the first names of changed parameters as text; empty without any."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{verb} {', '.join(names[:_MAX_NAMES])}{more}" if names else ""
