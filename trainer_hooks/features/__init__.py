"""Capabilities that take part in every step. To add one: a module here and its line in FEATURES."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_hooks.features.agreement import AgreementFeature
from trainer_hooks.features.attempts import AttemptsFeature
from trainer_hooks.features.auto_clip import AutoClipFeature
from trainer_hooks.features.commands import CommandsFeature
from trainer_hooks.features.early_stopping import EarlyStoppingFeature
from trainer_hooks.features.expected_change import ExpectedChangeFeature
from trainer_hooks.features.probe import ProbeFeature
from trainer_hooks.features.profiling import ProfilingFeature
from trainer_hooks.features.schedule import ScheduleFeature
from trainer_hooks.features.sigterm import SigtermFeature
from trainer_hooks.features.user_alerts import UserAlertsFeature
from trainer_hooks.step.feature import StepFeature
from trainer_hooks.step.reduce_vector import Slots, VectorFields

FEATURES: list[type[StepFeature]] = [
    ProfilingFeature,
    CommandsFeature,
    AttemptsFeature,
    ExpectedChangeFeature,
    AgreementFeature,
    SigtermFeature,
    EarlyStoppingFeature,
    ProbeFeature,
    UserAlertsFeature,
    ScheduleFeature,
    AutoClipFeature,
]
"""All features, in the order in which a step calls them."""

_OTHER_SLOTS = (
    CommandsFeature.slots,
    AttemptsFeature.slots,
    ExpectedChangeFeature.slots,
    Slots(
        rank0=(
            "saved_step",  # step and attempt of the latest complete checkpoint on disk
            "saved_attempt",  # 0: none yet
            "save_due",  # the time between two checkpoints on disk is over
            "saving",  # a checkpoint is being written: the next one waits for it
        ),
        rank=(
            "nonfinite_state",  # non-finite tensors of the training state, if it was checked
            "snapshot_missed",  # the rank could not take the snapshot that was due
        ),
    ),
    AgreementFeature.slots,
    SigtermFeature.slots,
    EarlyStoppingFeature.slots,
    ProbeFeature.slots,
    ScheduleFeature.slots,
    AutoClipFeature.slots,
    Slots(rank=("replicas",), exact=("replicas",)),  # 52-bit checksum; 0: no comparison
)
"""Slots in the order of the vector, with those of parts that are not features yet."""


def vector_fields() -> VectorFields:
    """Return the layout of the vector. A feature keeps its slots in runs that do not use it."""
    added = (feature.slots for feature in FEATURES if feature.slots not in _OTHER_SLOTS)
    return VectorFields.of((*_OTHER_SLOTS, *added))


def check_resumable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features' parts of a loop's state, by key; None without one.

    Raises:
        Exception: a feature could not continue from its part.
    """
    checked: dict[str, Any] = {}
    for feature in FEATURES:
        if feature.is_resumable:
            checked[feature.state_key] = part = state.get(feature.state_key)
            if part is not None:
                feature.check_state(part)
    return checked
