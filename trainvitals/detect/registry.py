"""Every detector and every kind of finding: its subject, and the alert that it raises.

Alerts, the grouping of incidents, the Ranks page, the levels that an operator may accept, and
docs/DETECTORS.md are made from these rows; CONTRIBUTING.md lists what a new detector needs.
"""

from collections.abc import Mapping, Sequence
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
        """Return the kind of finding and its causes, by which decisions name what they act on."""
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
    """Return a row of the registry: a kind of finding that an operator may accept as healthy."""
    return Kind(name=name, alert=alert, is_of_the_level=level, may_be_accepted=True)


def _machine_kind(
    name: str,
    alert: str = "",
    domain: Domain = "numbers",
    *,
    alerts: Mapping[str, str] | None = None,
    causes: tuple[str, ...] = (),
    has_one_alert: bool = False,
) -> Kind:
    """Return a kind of finding about a rank, a GPU, a node or its disks."""
    return Kind(
        name=name,
        alert=alert,
        alerts=alerts or {},
        causes=causes,
        domain=domain,
        subject="machine",
        has_one_alert=has_one_alert,
    )


_KINDS = (
    Kind(name="nonfinite"),
    Kind(name="nonfinite_params"),
    Kind(name="nonfinite_state", alert="NonFiniteState"),
    # In the same domain as the GPU's own reports: an Xid at the same time is the same incident.
    _machine_kind("replica_corrupted", "ReplicaCorrupted", "gpu"),
    _machine_kind("replica_named", domain="gpu"),
    _machine_kind("settings_differ", "SettingsDiffer"),
    Kind(name="nonfinite_streak", alert="NonFiniteStreak"),
    Kind(name="snapshot_missed", alert="SnapshotMissed", domain="storage"),
    Kind(name="approval_needed", alert="ApprovalNeeded"),
    _machine_kind("rank_failed"),
    _machine_kind("unguarded", "Unguarded"),
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
    Kind(name="weight_decay", alert="WeightDecayJumped"),
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
    Kind(
        name="policy_collapse",
        alert="PolicyCollapsed",
        alerts={"repetition": "CompletionsRepeat"},
    ),
    Kind(name="dead_reward", alert="RewardDead"),
    Kind(name="kl_runaway", alert="PolicyDiverged"),
    Kind(name="truncation", alert="CompletionsCut"),
    Kind(name="reward_hacking", alert="RewardHacked"),
    Kind(name="reward_jump", alert="RewardJumped"),
    Kind(name="policy_ratio", alert="PolicyUpdateTooLarge", causes=("clip_saturated",)),
    Kind(name="sampler_gap", alert="SamplerDiffers"),
    Kind(
        name="preference",
        alert="ChosenImprobable",
        alerts={"preference_leak": "PreferenceLeaked"},
    ),
    Kind(name="overconfidence", alert="RewardOverconfident"),
    Kind(
        name="memorized",
        alert="RowsMemorized",
        alerts={"known_rows": "NothingToLearn"},
        causes=("epochs_repeated",),
    ),
    Kind(name="forgetting", alert="BaseModelDestroyed"),
    Kind(
        name="labels",
        alert="LabelsWrong",
        causes=("padding_labels", "no_end_label", "prompt_labels"),
    ),
    Kind(name="adapter", alert="AdapterNotTrained", alerts={"base_trained": "BaseNotFrozen"}),
    Kind(name="throughput", alert="ThroughputFell", domain="speed"),
    _machine_kind("data_bound", "DataBound", "speed", causes=("data_bound_rank", "loader_stall")),
    _machine_kind(
        "straggler",
        "StragglerRank",
        "speed",
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
    Kind(name="user_alert", alert="UserAlert"),
    _machine_kind("gpu_lost", "GpuLost", "gpu", causes=("gpu_hung",)),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}

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


def _detector(
    where: Where, name: str, *advisory: str, actionable: Sequence[str] = (), section: str = ""
) -> DetectorSpec:
    """Return a detector and the kinds of its findings; without any, its name is the kind.

    Args:
        where: place where it runs.
        name: its name.
        advisory: kinds that are only reported.
        actionable: kinds that lead to an action.
        section: its section of the settings.
    """
    if not advisory and not actionable:
        advisory = (name,)
    kinds: dict[str, Level] = {
        **dict.fromkeys(actionable, "actionable"),
        **dict.fromkeys(advisory, "advisory"),
    }
    return DetectorSpec(name=name, where=where, kinds=kinds, section=section)


_DETECTORS = (
    # In every rank, in the order in which they run.
    _detector(
        "rank",
        "nonfinite",
        "nonfinite_streak",
        "rank_failed",
        actionable=("nonfinite", "nonfinite_params"),
    ),
    _detector("rank", "guard", "unguarded", "zero_gradient"),
    _detector("rank", "loss_spike", "spike", "level_shift", section="loss"),
    _detector("rank", "grad_norm_spike", "spike", "level_shift", section="grad_norm"),
    _detector("rank", "grad_norm_burst", "grad_explosion", section="burst"),
    _detector("rank", "loss_level", "divergence", "plateau", section="level"),
    _detector("rank", "loss_drift", "divergence", section="drift"),
    _detector(
        "rank",
        "loss_progress",
        "lost_progress",
        "divergence",
        "plateau",
        "collapse",
        section="progress",
    ),
    # Inputs of the policy's decisions.
    _detector("rank", "outlier", actionable=("spike",), section="outlier"),
    _detector("rank", "probe", actionable=("state_damaged",), section="ladder"),
    _detector("rank", "evaluation", actionable=("state_damaged",), section="ladder"),
    _detector(
        "rank", "snapshots", "snapshot_missed", actionable=("nonfinite_state",), section="ladder"
    ),
    _detector(
        "rank",
        "replicas",
        "settings_differ",
        "replica_named",
        actionable=("replica_corrupted",),
        section="ladder",
    ),
    _detector("rank", "policy", "approval_needed", section="ladder"),
    # Custom alerts: rules of the settings file, and `monitor.alert`.
    _detector("rank", "rule", "user_alert"),
    _detector("rank", "loop", "user_alert"),
    # Compared with the schedule that the run declared.
    _detector("rank", "schedule"),
    # Compared with what the gradients add up to.
    _detector("rank", "optimizer_state", "update_ratio"),
    # Compared with what the updates can have changed.
    _detector("rank", "weights", "weight_norm"),
    # Over the merged steps of all ranks; each rank reports its own rate.
    _detector("collector", "learning_rate", "learning_rate", "lr_jump"),
    _detector("collector", "weight_decay"),
    _detector("collector", "loss_scale"),
    _detector("collector", "layer_gradient"),
    _detector("collector", "update_ratio"),
    _detector("collector", "activation", "activation", "activation_collapse"),
    _detector("collector", "weight_norm"),
    _detector("collector", "throughput"),
    _detector("collector", "data_bound"),
    _detector("collector", "straggler"),
    _detector("collector", "memory_creep"),
    _detector("collector", "rank_loss"),
    _detector("collector", "reduction"),
    _detector("collector", "stalled"),
    _detector("collector", "checkpoint_overdue"),
    # Over the scalars of a post-training run, if it declared its kind.
    _detector("collector", "policy_collapse"),
    _detector("collector", "dead_reward"),
    _detector("collector", "kl_runaway"),
    _detector("collector", "truncation"),
    _detector("collector", "reward_hacking"),
    _detector("collector", "reward_jump"),
    _detector("collector", "policy_ratio"),
    _detector("collector", "sampler_gap"),
    _detector("collector", "preference"),
    _detector("collector", "overconfidence"),
    _detector("collector", "memorized"),
    _detector("collector", "forgetting"),
    _detector("collector", "labels"),
    _detector("collector", "adapter"),
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
    """Return the registered kinds of findings about a subject, such as machines."""
    return frozenset(kind.name for kind in KINDS.values() if kind.subject == subject)


def finding_alert_name(kind: str, cause: str) -> str:
    """Return the alert that the registry of kinds gives to such a finding; empty: none."""
    row = KINDS.get(kind)
    return "" if row is None else row.alerts.get(cause, row.alert)
