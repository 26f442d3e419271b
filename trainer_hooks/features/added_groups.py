"""Parameter groups that some ranks have added and others have not: an error on all ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import Self

from trainer_hooks.exchange.reduce_vector import Slots
from trainer_hooks.step.context import RunContext
from trainer_hooks.step.feature import ReturnedStep, StepFeature
from trainvitals.detect.replicas import format_ranks
from trainvitals.errors import UsageError


class AddedGroupsFeature(StepFeature):
    """Refuses, on all ranks, parameter groups that the ranks have not added together.

    Its slot is 0 in every other step: if all ranks have added the same groups, they repeat the
    exchange with the new layout.
    """

    slots = Slots(rank=("groups",), exact=("groups",))  # digest of the groups that a rank proposes

    _is_refused = False

    @classmethod
    def make(cls, run: RunContext) -> Self | None:
        """Return the feature; None if no other rank could disagree, or no group can be added."""
        return cls(run) if run.ranks.world_size > 1 and run.given.takes_groups else None

    def complete(self, step: ReturnedStep) -> None:
        """Refuse a step before which not all ranks added the same parameter groups.

        Raises:
            UsageError: there are such ranks.
        """
        if self._is_refused or not step.reduced.ranks_where("groups"):
            return
        self._is_refused = True  # the steps in flight repeat it
        ranks_by_digest: dict[float, list[int]] = defaultdict(list)
        for rank, digest in enumerate(step.reduced.by_rank("groups")):
            ranks_by_digest[digest].append(rank)
        unchanged = ranks_by_digest.pop(0.0, [])
        added = ", ".join(format_ranks(tuple(ranks)) for ranks in ranks_by_digest.values())
        if unchanged:
            text = f"{added} added parameter groups before step {step.step}, and "
            text += f"{format_ranks(tuple(unchanged))} did not"
        else:
            text = f"different parameter groups were added before step {step.step} on {added}"
        raise UsageError(
            text,
            hint="add the same groups on all ranks between the same two steps; decide it from "
            "step_index, or from a number that all ranks share",
        )
