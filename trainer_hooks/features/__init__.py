"""Capabilities that take part in every step. To add one: a module here and its line in FEATURES."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_hooks.exchange.reduce_vector import VectorFields
from trainer_hooks.features.adapters import AdaptersFeature
from trainer_hooks.features.added_groups import AddedGroupsFeature
from trainer_hooks.features.agreement import AgreementFeature
from trainer_hooks.features.attempts import AttemptsFeature
from trainer_hooks.features.auto_clip import AutoClipFeature
from trainer_hooks.features.commands import CommandsFeature
from trainer_hooks.features.damage import DamageFeature
from trainer_hooks.features.early_stopping import EarlyStoppingFeature
from trainer_hooks.features.expected_change import ExpectedChangeFeature
from trainer_hooks.features.first_steps import FirstStepsFeature
from trainer_hooks.features.optimizer_state import OptimizerStateFeature
from trainer_hooks.features.pipeline import PipelineFeature
from trainer_hooks.features.post_training import PostTrainingFeature
from trainer_hooks.features.probe import ProbeFeature
from trainer_hooks.features.profiling import ProfilingFeature
from trainer_hooks.features.replicas import ReplicasFeature
from trainer_hooks.features.schedule import ScheduleFeature
from trainer_hooks.features.sigterm import SigtermFeature
from trainer_hooks.features.snapshots import SnapshotsFeature
from trainer_hooks.features.user_alerts import UserAlertsFeature
from trainer_hooks.features.weights import WeightsFeature
from trainer_hooks.step.feature import StepFeature

FEATURES: list[type[StepFeature]] = [
    AddedGroupsFeature,
    PipelineFeature,
    FirstStepsFeature,
    ProfilingFeature,
    CommandsFeature,
    AttemptsFeature,
    ExpectedChangeFeature,
    SnapshotsFeature,
    DamageFeature,
    AgreementFeature,
    SigtermFeature,
    EarlyStoppingFeature,
    ProbeFeature,
    UserAlertsFeature,
    ScheduleFeature,
    AutoClipFeature,
    ReplicasFeature,
    PostTrainingFeature,
    AdaptersFeature,
    OptimizerStateFeature,
    WeightsFeature,
]
"""All features, in the order in which a step calls them; also the order of their slots."""


def vector_fields() -> VectorFields:
    """Return the fields of the core and of each ``StepFeature``, used or not, in the vector."""
    return VectorFields.of(feature.slots for feature in FEATURES)


def check_resumable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return each ``StepFeature``'s part of a loop's state, by key; None without one."""
    checked: dict[str, Any] = {}
    for feature in FEATURES:
        if feature.is_resumable:
            checked[feature.state_key] = part = state.get(feature.state_key)
            if part is not None:
                feature.check_state(part)
    return checked
