"""Every detector and every kind of finding: its subject, and the alert that it raises.

Alerts, the grouping of incidents, the Ranks page, the levels that an operator may accept, and
docs/DETECTORS.md are made from these rows; CONTRIBUTING.md lists what a new detector needs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from trainvitals.records import Level

Domain = Literal["numbers", "speed", "gpu", "memory", "storage"]
"""Subject of a problem: findings of one domain that are close together are one incident."""
Subject = Literal["training", "layer", "machine"]
"""Object of a finding: ``machine`` is a rank, a GPU, a node or its disks."""
Where = Literal["rank", "collector", "agent"]
"""Place where it runs: in every rank, over the merged steps, or over the samples of nodes."""


class Kind(msgspec.Struct, frozen=True):
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
    return Kind(name, alert, is_of_the_level=level, may_be_accepted=True)


def _machine_kind(name: str, alert: str = "", domain: Domain = "numbers", **fields: Any) -> Kind:
    """Return a kind of finding about a rank, a GPU, a node or its disks."""
    return Kind(name, alert, domain=domain, subject="machine", **fields)


_STRAGGLER_PARTS = (
    *("data", "host", "forward", "backward", "link", "optimizer", "checkpoint", "gpu"),
)
_KINDS = (
    Kind("nonfinite"),
    Kind("nonfinite_params"),
    Kind("nonfinite_state", "NonFiniteState"),
    # In the same domain as the GPU's own reports: an Xid at the same time is the same incident.
    _machine_kind("replica_corrupted", "ReplicaCorrupted", "gpu"),
    _machine_kind("replica_named", domain="gpu"),
    _machine_kind("settings_differ", "SettingsDiffer"),
    Kind("nonfinite_streak", "NonFiniteStreak"),
    Kind("snapshot_missed", "SnapshotMissed", domain="storage"),
    Kind("approval_needed", "ApprovalNeeded"),
    _machine_kind("rank_failed"),
    _machine_kind("unguarded", "Unguarded"),
    Kind("zero_gradient", "ZeroGradient"),
    _acceptable_kind("spike", "SpikeSeen"),
    _acceptable_kind("level_shift"),
    _acceptable_kind("grad_explosion", "GradientExplosion"),
    _acceptable_kind("divergence", "LossDiverged", level=True),
    _acceptable_kind("plateau", "LossPlateau", level=True),
    _acceptable_kind("collapse", "LossCollapsed", level=True),
    _acceptable_kind("lost_progress", "ProgressLost", level=True),
    _acceptable_kind("state_damaged", "StateDamaged"),
    _acceptable_kind("lr_jump", "LearningRateAnomaly"),
    Kind("learning_rate", "LearningRateAnomaly"),
    Kind("schedule", "LearningRateAnomaly"),
    Kind("loss_scale", "LossScaleCollapsed", {"overflow_rate": "LossScaleOverflows"}),
    Kind("layer_gradient", "LayerOutlier", subject="layer"),
    Kind("update_ratio", "LayerOutlier", subject="layer"),
    Kind("weight_norm", "WeightNormMoved"),
    Kind("activation", "ActivationsGrew", subject="layer"),
    Kind("activation_collapse", "ActivationsCollapsed", subject="layer"),
    Kind("policy_collapse", "PolicyCollapsed"),
    Kind("dead_reward", "RewardDead"),
    Kind("kl_runaway", "PolicyDiverged"),
    Kind("truncation", "CompletionsCut"),
    Kind("reward_hacking", "RewardHacked"),
    Kind("policy_ratio", "PolicyUpdateTooLarge", causes=("clip_saturated",)),
    Kind("sampler_gap", "SamplerDiffers"),
    Kind("preference", "ChosenImprobable", {"preference_leak": "PreferenceLeaked"}),
    Kind("throughput", "ThroughputFell", domain="speed"),
    _machine_kind("data_bound", "DataBound", "speed", causes=("data_bound_rank", "loader_stall")),
    _machine_kind(
        "straggler",
        "StragglerRank",
        "speed",
        causes=tuple(f"straggler_{part}" for part in _STRAGGLER_PARTS),
    ),
    _machine_kind("stalled", "TrainingStalled", "speed"),
    _machine_kind("waiting", domain="speed"),
    _machine_kind("hang", "RankHung", "speed", has_one_alert=True),
    _machine_kind("memory_creep", "MemoryCreep", "memory"),
    _machine_kind("rank_loss", "RankLossApart"),
    _machine_kind("reduction", "ReductionWrong"),
    _machine_kind("checkpoint_overdue", "CheckpointOverdue", "storage"),
    _machine_kind(
        "gpu_throttle", "GpuThrottled", "speed", alerts={"gpu_power_cap": "GpuPowerCapped"}
    ),
    _machine_kind("gpu_xid", "GpuErrors", "gpu", alerts={"xid_fatal": "GpuFault"}),
    _machine_kind("gpu_ecc", "GpuErrors", "gpu", alerts={"ecc_uncorrected": "GpuFault"}),
    _machine_kind("stream_stopped", "StreamStopped", "storage"),
    Kind("user_alert", "UserAlert"),
    _machine_kind("gpu_lost", "GpuLost", "gpu", causes=("gpu_hung",)),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}

ACTED_CAUSES = (
    *("nonfinite_loss", "nonfinite_gradient", "nonfinite_params", "nonfinite_state"),
    *("replica_corrupted", "loss_outlier", "grad_norm_outlier", "state_damaged", "lr_jump"),
    *("rank_failed", "evaluation", "device", "command", "other"),
)
"""The causes of skips and rollbacks: counters by cause start at 0 for each of them."""


def countable_cause(cause: str) -> str:
    """Return the cause for counting; an unlisted one becomes "other", which started at 0."""
    return cause if cause in ACTED_CAUSES else "other"


def _detector(
    where: Where, name: str, *advisory: str, acts: Sequence[str] = (), section: str = ""
) -> DetectorSpec:
    """Return a detector and the kinds of its findings; without any, its name is the kind.

    Args:
        where: place where it runs.
        name: its name.
        advisory: kinds that are only reported.
        acts: kinds that lead to an action.
        section: its section of the settings.
    """
    kinds: dict[str, Level] = {
        **dict.fromkeys(acts, "actionable"),
        **dict.fromkeys(advisory or (() if acts else (name,)), "advisory"),
    }
    return DetectorSpec(name=name, where=where, kinds=kinds, section=section)


_STEP_DETECTORS = ("loss_scale", "layer_gradient", "update_ratio")
_RUN_DETECTORS = (
    *("weight_norm", "throughput", "data_bound", "straggler", "memory_creep", "rank_loss"),
    *("reduction", "stalled", "checkpoint_overdue"),
)
_POST_TRAINING_DETECTORS = (
    *("policy_collapse", "dead_reward", "kl_runaway", "truncation", "reward_hacking"),
    *("policy_ratio", "sampler_gap", "preference"),
)
_DETECTORS = (
    # In every rank, in the order in which they run.
    _detector(
        "rank",
        "nonfinite",
        "nonfinite_streak",
        "rank_failed",
        acts=("nonfinite", "nonfinite_params"),
    ),
    _detector("rank", "guard", "unguarded", "zero_gradient"),
    _detector("rank", "loss_spike", "spike", "level_shift", section="loss"),
    _detector("rank", "grad_norm_spike", "spike", "level_shift", section="grad_norm"),
    _detector("rank", "grad_norm_burst", "grad_explosion", section="burst"),
    _detector("rank", "loss_level", "divergence", "plateau", section="level"),
    _detector("rank", "loss_drift", "divergence", section="drift"),
    _detector("rank", "loss_progress", "lost_progress", "plateau", "collapse", section="progress"),
    # Inputs of the policy's decisions.
    _detector("rank", "outlier", acts=("spike",), section="outlier"),
    _detector("rank", "probe", acts=("state_damaged",), section="ladder"),
    _detector("rank", "evaluation", acts=("state_damaged",), section="ladder"),
    _detector("rank", "snapshots", "snapshot_missed", acts=("nonfinite_state",), section="ladder"),
    _detector(
        "rank",
        "replicas",
        "settings_differ",
        "replica_named",
        acts=("replica_corrupted",),
        section="ladder",
    ),
    _detector("rank", "policy", "approval_needed", section="ladder"),
    # Custom alerts: rules of the settings file, and `monitor.alert`.
    _detector("rank", "rule", "user_alert"),
    _detector("rank", "loop", "user_alert"),
    # Compared with the schedule that the run declared.
    _detector("rank", "schedule"),
    # Over the merged steps of all ranks; each rank reports its own rate.
    _detector("collector", "learning_rate", "learning_rate", "lr_jump"),
    *(_detector("collector", name) for name in _STEP_DETECTORS),
    _detector("collector", "activation", "activation", "activation_collapse"),
    *(_detector("collector", name) for name in _RUN_DETECTORS),
    # Over the scalars of a post-training run, if it declared its kind.
    *(_detector("collector", name) for name in _POST_TRAINING_DETECTORS),
    # Over the heartbeats of the ranks; in the collector for a job on several nodes.
    _detector("agent", "hang", "waiting", "hang"),
    # Over the samples of a node's GPUs.
    _detector("agent", "gpu_throttle"),
    _detector("agent", "gpu_error", "gpu_ecc", "gpu_xid"),
    _detector("agent", "gpu_lost"),
    # Over the collector's replies to what a node sends.
    _detector("agent", "shipper", "stream_stopped"),
)
DETECTORS: Mapping[str, DetectorSpec] = {spec.name: spec for spec in _DETECTORS}

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
