"""Every detector and every kind of finding: its subject, and the alert that it raises.

Alerts, the grouping of incidents, the Ranks page, the levels that an operator may accept, and
docs/DETECTORS.md are made from these rows; CONTRIBUTING.md lists what a new detector needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from trainvitals.records import Level

Domain = Literal["numbers", "speed", "gpu", "memory", "storage"]
"""Subject of a problem: findings of one domain that are close together are one incident."""
Subject = Literal["training", "layer", "machine"]
"""Object of a finding: ``machine`` is a rank, a GPU, a node or its disks."""
Where = Literal["rank", "collector", "agent"]
"""Place where it runs: in every rank, over the merged steps, or over the samples of nodes."""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of finding."""

    name: str
    alert: str = ""
    """The alert it raises by itself; none if the alert of the resulting decision covers it."""
    alerts: Mapping[str, str] = {}
    """Alerts of single causes, if these differ."""
    causes: tuple[str, ...] = ()
    """Further causes that represent this kind in decisions and in the grouping of incidents."""
    domain: Domain = "numbers"
    subject: Subject = "training"
    has_one_alert: bool = False
    """All causes raise the same alert, because the cause may change while the problem lasts."""
    is_of_the_level: bool = False
    """Whether it judges the level of the loss: only logged if the level has little meaning."""
    may_be_accepted: bool = False
    """Whether it is about finite numbers, which an operator may accept as healthy."""

    @property
    def all_causes(self) -> tuple[str, ...]:
        """Name of the kind, and the causes that represent the kind in decisions."""
        return (self.name, *self.alerts, *self.causes)


class DetectorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A detector, or a part of the policy with findings of its own."""

    name: str
    """Name in the field ``detector`` of its findings."""
    where: Where
    kinds: Mapping[str, Level]
    section: str = ""
    """Its section of the settings."""


def _acceptable_kind(name: str, alert: str = "", *, level: bool = False) -> Kind:
    """Return a kind of finding that an operator may accept as healthy."""
    return Kind(name=name, alert=alert, is_of_the_level=level, may_be_accepted=True)


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="nonfinite"),
        Kind(name="nonfinite_params"),
        Kind(name="nonfinite_state", alert="NonFiniteState"),
        # In the same domain as the GPU's own reports: an Xid at the same time is the same incident.
        Kind(name="replica_corrupted", alert="ReplicaCorrupted", domain="gpu", subject="machine"),
        Kind(name="replica_named", domain="gpu", subject="machine"),
        Kind(name="settings_differ", alert="SettingsDiffer", subject="machine"),
        Kind(name="nonfinite_streak", alert="NonFiniteStreak"),
        Kind(name="snapshot_missed", alert="SnapshotMissed", domain="storage"),
        Kind(name="approval_needed", alert="ApprovalNeeded"),
        Kind(name="rank_failed", subject="machine"),
        Kind(name="unguarded", alert="Unguarded", subject="machine"),
        Kind(name="zero_gradient", alert="ZeroGradient"),
        _acceptable_kind("spike", "SpikeSeen"),
        _acceptable_kind("level_shift"),
        _acceptable_kind("grad_explosion", "GradientExplosion"),
        _acceptable_kind("divergence", "LossDiverged", level=True),
        _acceptable_kind("plateau", "LossPlateau", level=True),
        _acceptable_kind("collapse", "LossCollapsed", level=True),
        _acceptable_kind("lost_progress", "ProgressLost", level=True),
        _acceptable_kind("state_damaged", "StateDamaged"),
        _acceptable_kind("lr_jump", "LearningRateAnomaly"),
        Kind(name="learning_rate", alert="LearningRateAnomaly"),
        Kind(name="schedule", alert="LearningRateAnomaly"),
        Kind(
            name="loss_scale",
            alert="LossScaleCollapsed",
            alerts={"overflow_rate": "LossScaleOverflows"},
        ),
        Kind(name="layer_gradient", alert="LayerOutlier", subject="layer"),
        Kind(name="update_ratio", alert="LayerOutlier", subject="layer"),
        Kind(name="weight_norm", alert="WeightNormMoved"),
        Kind(name="activation", alert="ActivationsGrew", subject="layer"),
        Kind(name="activation_collapse", alert="ActivationsCollapsed", subject="layer"),
        Kind(name="policy_collapse", alert="PolicyCollapsed"),
        Kind(name="dead_reward", alert="RewardDead"),
        Kind(name="kl_runaway", alert="PolicyDiverged"),
        Kind(name="truncation", alert="CompletionsCut"),
        Kind(name="reward_hacking", alert="RewardHacked"),
        Kind(name="policy_ratio", alert="PolicyUpdateTooLarge", causes=("clip_saturated",)),
        Kind(name="sampler_gap", alert="SamplerDiffers"),
        Kind(
            name="preference",
            alert="ChosenImprobable",
            alerts={"preference_leak": "PreferenceLeaked"},
        ),
        Kind(name="throughput", alert="ThroughputFell", domain="speed"),
        Kind(
            name="data_bound",
            alert="DataBound",
            causes=("data_bound_rank", "loader_stall"),
            domain="speed",
            subject="machine",
        ),
        Kind(
            name="straggler",
            alert="StragglerRank",
            causes=(
                "straggler_data",
                "straggler_host",
                "straggler_forward",
                "straggler_backward",
                "straggler_link",
                "straggler_optimizer",
                "straggler_checkpoint",
                "straggler_gpu",
            ),
            domain="speed",
            subject="machine",
        ),
        Kind(name="stalled", alert="TrainingStalled", domain="speed", subject="machine"),
        Kind(name="waiting", domain="speed", subject="machine"),
        Kind(name="hang", alert="RankHung", has_one_alert=True, domain="speed", subject="machine"),
        Kind(name="memory_creep", alert="MemoryCreep", domain="memory", subject="machine"),
        Kind(name="rank_loss", alert="RankLossApart", subject="machine"),
        Kind(name="reduction", alert="ReductionWrong", subject="machine"),
        Kind(
            name="checkpoint_overdue",
            alert="CheckpointOverdue",
            domain="storage",
            subject="machine",
        ),
        Kind(
            name="gpu_throttle",
            alert="GpuThrottled",
            alerts={"gpu_power_cap": "GpuPowerCapped"},
            domain="speed",
            subject="machine",
        ),
        Kind(
            name="gpu_xid",
            alert="GpuErrors",
            alerts={"xid_fatal": "GpuFault"},
            domain="gpu",
            subject="machine",
        ),
        Kind(
            name="gpu_ecc",
            alert="GpuErrors",
            alerts={"ecc_uncorrected": "GpuFault"},
            domain="gpu",
            subject="machine",
        ),
        Kind(name="stream_stopped", alert="StreamStopped", domain="storage", subject="machine"),
        Kind(name="user_alert", alert="UserAlert"),
        Kind(
            name="gpu_lost",
            alert="GpuLost",
            causes=("gpu_hung",),
            domain="gpu",
            subject="machine",
        ),
    )
}

ACTED_CAUSES = (
    "nonfinite_loss",
    "nonfinite_gradient",
    "nonfinite_params",
    "nonfinite_state",
    "replica_corrupted",
    "loss_outlier",
    "grad_norm_outlier",
    "state_damaged",
    "lr_jump",
    "rank_failed",
    "evaluation",
    "device",
    "command",
    "other",
)
"""The causes of skips and rollbacks: counters by cause start at 0 for each of them."""


def countable_cause(cause: str) -> str:
    """Return the cause for counting; an unlisted one becomes "other", which started at 0."""
    return cause if cause in ACTED_CAUSES else "other"


DETECTORS: Mapping[str, DetectorSpec] = {
    spec.name: spec
    for spec in (
        # In every rank, in the order in which they run.
        DetectorSpec(
            name="nonfinite",
            where="rank",
            kinds={
                "nonfinite": "actionable",
                "nonfinite_params": "actionable",
                "nonfinite_streak": "advisory",
                "rank_failed": "advisory",
            },
        ),
        DetectorSpec(
            name="guard",
            where="rank",
            kinds={"unguarded": "advisory", "zero_gradient": "advisory"},
        ),
        DetectorSpec(
            name="loss_spike",
            where="rank",
            kinds={"spike": "advisory", "level_shift": "advisory"},
            section="loss",
        ),
        DetectorSpec(
            name="grad_norm_spike",
            where="rank",
            kinds={"spike": "advisory", "level_shift": "advisory"},
            section="grad_norm",
        ),
        DetectorSpec(
            name="grad_norm_burst",
            where="rank",
            kinds={"grad_explosion": "advisory"},
            section="burst",
        ),
        DetectorSpec(
            name="loss_level",
            where="rank",
            kinds={"divergence": "advisory", "plateau": "advisory"},
            section="level",
        ),
        DetectorSpec(
            name="loss_drift", where="rank", kinds={"divergence": "advisory"}, section="drift"
        ),
        DetectorSpec(
            name="loss_progress",
            where="rank",
            kinds={"lost_progress": "advisory", "plateau": "advisory", "collapse": "advisory"},
            section="progress",
        ),
        # Inputs of the policy's decisions.
        DetectorSpec(
            name="outlier",
            where="rank",
            kinds={"spike": "actionable"},
            section="outlier",
        ),
        DetectorSpec(
            name="probe", where="rank", kinds={"state_damaged": "actionable"}, section="ladder"
        ),
        DetectorSpec(
            name="evaluation", where="rank", kinds={"state_damaged": "actionable"}, section="ladder"
        ),
        DetectorSpec(
            name="snapshots",
            where="rank",
            kinds={"nonfinite_state": "actionable", "snapshot_missed": "advisory"},
            section="ladder",
        ),
        DetectorSpec(
            name="replicas",
            where="rank",
            kinds={
                "replica_corrupted": "actionable",
                "settings_differ": "advisory",
                "replica_named": "advisory",
            },
            section="ladder",
        ),
        DetectorSpec(
            name="policy", where="rank", kinds={"approval_needed": "advisory"}, section="ladder"
        ),
        # Custom alerts: rules of the settings file, and `monitor.alert`.
        DetectorSpec(name="rule", where="rank", kinds={"user_alert": "advisory"}),
        DetectorSpec(name="loop", where="rank", kinds={"user_alert": "advisory"}),
        # Compared with the schedule that the run declared.
        DetectorSpec(name="schedule", where="rank", kinds={"schedule": "advisory"}),
        # Over the merged steps of all ranks; each rank reports its own rate.
        DetectorSpec(
            name="learning_rate",
            where="collector",
            kinds={"learning_rate": "advisory", "lr_jump": "advisory"},
        ),
        DetectorSpec(name="loss_scale", where="collector", kinds={"loss_scale": "advisory"}),
        DetectorSpec(
            name="layer_gradient", where="collector", kinds={"layer_gradient": "advisory"}
        ),
        DetectorSpec(name="update_ratio", where="collector", kinds={"update_ratio": "advisory"}),
        DetectorSpec(
            name="activation",
            where="collector",
            kinds={"activation": "advisory", "activation_collapse": "advisory"},
        ),
        DetectorSpec(name="weight_norm", where="collector", kinds={"weight_norm": "advisory"}),
        DetectorSpec(name="throughput", where="collector", kinds={"throughput": "advisory"}),
        DetectorSpec(name="data_bound", where="collector", kinds={"data_bound": "advisory"}),
        DetectorSpec(name="straggler", where="collector", kinds={"straggler": "advisory"}),
        DetectorSpec(name="memory_creep", where="collector", kinds={"memory_creep": "advisory"}),
        DetectorSpec(name="rank_loss", where="collector", kinds={"rank_loss": "advisory"}),
        DetectorSpec(name="reduction", where="collector", kinds={"reduction": "advisory"}),
        DetectorSpec(name="stalled", where="collector", kinds={"stalled": "advisory"}),
        DetectorSpec(
            name="checkpoint_overdue", where="collector", kinds={"checkpoint_overdue": "advisory"}
        ),
        # Over the scalars of a post-training run, if it declared its kind.
        DetectorSpec(
            name="policy_collapse", where="collector", kinds={"policy_collapse": "advisory"}
        ),
        DetectorSpec(name="dead_reward", where="collector", kinds={"dead_reward": "advisory"}),
        DetectorSpec(name="kl_runaway", where="collector", kinds={"kl_runaway": "advisory"}),
        DetectorSpec(name="truncation", where="collector", kinds={"truncation": "advisory"}),
        DetectorSpec(
            name="reward_hacking", where="collector", kinds={"reward_hacking": "advisory"}
        ),
        DetectorSpec(name="policy_ratio", where="collector", kinds={"policy_ratio": "advisory"}),
        DetectorSpec(name="sampler_gap", where="collector", kinds={"sampler_gap": "advisory"}),
        DetectorSpec(name="preference", where="collector", kinds={"preference": "advisory"}),
        # Over the heartbeats of the ranks; in the collector for a job on several nodes.
        DetectorSpec(
            name="hang",
            where="agent",
            kinds={"waiting": "advisory", "hang": "advisory"},
        ),
        # Over the samples of a node's GPUs.
        DetectorSpec(name="gpu_throttle", where="agent", kinds={"gpu_throttle": "advisory"}),
        DetectorSpec(
            name="gpu_error", where="agent", kinds={"gpu_ecc": "advisory", "gpu_xid": "advisory"}
        ),
        DetectorSpec(name="gpu_lost", where="agent", kinds={"gpu_lost": "advisory"}),
        # Over the collector's replies to what a node sends.
        DetectorSpec(name="shipper", where="agent", kinds={"stream_stopped": "advisory"}),
    )
}

DOMAINS: Mapping[str, Domain] = {
    cause: kind.domain for kind in KINDS.values() for cause in kind.all_causes
}
"""By kind of finding, or a cause that represents it."""


def kinds_about(subject: Subject) -> frozenset[str]:
    """Return the kinds of findings about a subject, such as machines."""
    return frozenset(kind.name for kind in KINDS.values() if kind.subject == subject)


def finding_alert_name(kind: str, cause: str) -> str:
    """Return the name of the alert that such a finding raises by itself; empty: none."""
    row = KINDS.get(kind)
    return "" if row is None else row.alerts.get(cause, row.alert)
