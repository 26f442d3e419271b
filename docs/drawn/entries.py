"""What docs/DETECTORS.md says of each detector that the code itself does not."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from docs.drawn import loop, nodes, steps, waits
from docs.drawn.svg import Panel
from trainvitals.detect import level, outliers, spike
from trainvitals.detect.fleet import layers, memory, node, optimizer, ranks, speed
from trainvitals.detect.registry import DETECTORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One detector of the page."""

    name: str
    """As findings name it, in ``detector``."""
    title: str
    owner: Any
    """The class or function whose docstring says what it finds, and how."""
    needs: str
    """What it must see; else it abstains."""
    examples: Callable[[], list[Panel]]
    module: ModuleType | None = None
    """The module whose docstring has the principle; only the first of its detectors names it."""
    finds: str = ""
    """What it finds, where the docstring's first sentence does not say that."""
    more: str = ""
    """What the docstrings leave out."""
    good: str = ""
    """What it is good for; of those in every rank also in RL, for GANs, in curricula, and where the
    optimizer itself spikes."""
    bad: str = ""
    """What it is not good for, and what to do there."""
    config: type | None = None
    """Its settings, where they have no section."""
    notes: tuple[str, ...] = field(default=())
    """Names of constants of ``source`` whose text below them belongs here."""
    source: ModuleType | None = None

    @property
    def kinds(self) -> Mapping[str, str]:
        """Kinds of its findings, and their levels."""
        return DETECTORS[self.name].kinds

    @property
    def section(self) -> str:
        """Its section of docs/SETTINGS.md."""
        return DETECTORS[self.name].section


def _rest_of(owner: Any) -> str:
    """Return the docstring after its first line."""
    return str(inspect.getdoc(owner)).partition("\n\n")[2]


IN_LOOP = (
    Entry(
        name="nonfinite",
        title="Non-finite numbers",
        owner=outliers.NonFiniteDetector,
        needs="Nothing but the step itself: it speaks from the first one on. `rank_failed` is told "
        "where a rank could not measure, which is unknown and not bad.",
        good="Every kind of training, RL, GANs, curricula and large rates as well: it compares "
        "with nothing that these could shift.",
        bad="Damage that is still finite, in any of them.",
        examples=loop.nonfinite,
        notes=("MAX_OVERFLOWS",),
        source=outliers,
    ),
    Entry(
        name="loss_spike",
        title="A loss that is high",
        owner=spike.SpikeDetector,
        finds="Finds steps whose loss is above what the steps before allow for, one by one or "
        "several together.",
        needs="`loss` of `warm_up` applied steps. Several steps are added up only where every loss "
        "is positive, and where the loss is minimized.",
        good="Outliers from 3x on at 15 % noise, 1.5x for 5 steps or more, and in a calm run less: "
        "there is no fixed floor.",
        bad="A level that changes often and for good reason: two tasks in blocks, a curriculum "
        "that was not announced with `expect`. Each change is told, until it comes regularly."
        " Single hard batches are told five times and epoch borders three times. In "
        "reinforcement learning and for GANs say `loss_kind`: then only single outliers are "
        "told, and around zero these must be ten times the whole range; rewards with heavy "
        "tails are told all the same. Large optimizer spikes (AdamW at 3e-2) are told each "
        "time, and whether one is damage the loss alone cannot say.",
        examples=loop.loss_spike,
        module=spike,
        more=_rest_of(spike.SpikeDetector._refresh),
        config=spike.SpikeConfig,
    ),
    Entry(
        name="grad_norm_spike",
        title="Gradient-norm spike",
        owner=None,
        finds="Finds steps whose gradient norm is above the limit of the steps before, by the rule "
        "of a loss and with a wider limit.",
        needs="`grad_norm` of `warm_up` applied steps.",
        good="Explosions, in any kind of training: 40 times the usual norm and more. In RL and for "
        "GANs, whose loss says little, and under a large rate, whose spikes lie below it.",
        bad="Anything smaller: clean runs show 15 times for one step, 35 times at worst. The first "
        "steps of a curriculum's next part, where `expect` did not announce it.",
        examples=loop.grad_norm_spike,
        config=spike.GradNormConfig,
        notes=("GRAD_NORM_DEFAULTS",),
        source=spike,
    ),
    Entry(
        name="grad_norm_burst",
        title="Gradient-norm burst",
        owner=spike.BurstDetector,
        needs="`grad_norm` of `warm_up` steps, above zero; `loss`, where there is one, excuses a "
        "norm that grows while the run learns.",
        good="What announces a spike, two steps and more before the loss moves; lost optimizer "
        "state, in RL, for GANs, in curricula and under a large rate alike.",
        bad="Hard batches that come one after the other: told five times, then no more. A "
        "curriculum's next part that was not announced, and the largest optimizer spikes: each "
        "told once.",
        examples=loop.grad_norm_burst,
        config=spike.BurstConfig,
    ),
    Entry(
        name="loss_level",
        title="Level of the loss: divergence, failed recovery",
        owner=level.LevelDetector,
        needs="`loss` of `window` steps, and noise: of a loss that never changes nothing is said. "
        "Only where the loss is minimized.",
        good="A walk away of six deviations of the noise and 5 %, and in calm runs a step up of "
        "3 % that stays.",
        bad="Curricula and new data that were not announced with `expect`: the rise is real, and "
        "is told. A loss that goes up while the run improves, in RL, or wanders, as a GAN's: say "
        "`loss_kind`, and it is silent, about faults too. Large optimizer spikes: a row of them is "
        "a level, and is told.",
        examples=loop.loss_level,
        module=level,
        config=level.LevelConfig,
    ),
    Entry(
        name="loss_drift",
        title="Drift of the loss within its noise",
        owner=level.DriftDetector,
        needs="`loss` of 512 steps, above zero. Only where the loss is minimized.",
        good="10 % for good at 15 % noise; 2 % in 100 steps, within some 400 while the noise is "
        "5 %, later where it is more.",
        bad="The first 500 steps, and as many after a sudden fall. Warm restarts and other slow "
        "waves are told once or twice, until it is known how far they go. So are RL and GANs,"
        " whose loss wanders, until `loss_kind` is said, and a curriculum that was not "
        "announced. It has nothing to say of optimizer spikes.",
        examples=loop.loss_drift,
        config=level.DriftConfig,
    ),
    Entry(
        name="loss_progress",
        title="Lost progress, a loss that never learns, a collapse",
        owner=level.ProgressDetector,
        needs="`loss`; `learning_rate`, where there is one, says when the warm-up is over. Only "
        "where the loss is minimized.",
        good="A run that is back where it began (90 % of its gain, for 100 steps), that never left "
        "it in 500 steps, that is stuck after a restart, or whose loss drops below a third at "
        "once.",
        bad="Fine-tuning that begins where it ends: a loss that has nothing left to learn is told"
        " once. A task that is suddenly easy, as a part of a curriculum may be, looks like a "
        "collapse, and so may what follows a large optimizer spike. RL and GANs, where there "
        "is no such progress: say `loss_kind`.",
        examples=loop.loss_progress,
        config=level.ProgressConfig,
    ),
)

OF_STEPS = (
    Entry(
        name="learning_rate",
        title="Learning rate",
        owner=optimizer.LearningRateWatcher,
        needs="`learning_rate` of rank 0. Jumps: a warm-up that is over. A forgotten schedule: an "
        "attempt before this one.",
        examples=steps.learning_rate,
        config=optimizer.LearningRateConfig,
    ),
    Entry(
        name="loss_scale",
        title="Loss scale and overflows",
        owner=optimizer.LossScaleWatcher,
        needs="`loss_scale`, and a scaler that has settled.",
        examples=steps.loss_scale,
        config=optimizer.LossScaleConfig,
    ),
    Entry(
        name="layer_gradient",
        title="Gradients of a layer",
        owner=layers.LayerGradientWatcher,
        needs="`grad_norm` of at least four layers, `warm_up` rows of each.",
        examples=steps.layer_gradient,
        module=layers,
        more=str(inspect.getdoc(layers.LayerOutlierWatcher)),
        config=layers.LayerConfig,
    ),
    Entry(
        name="update_ratio",
        title="Updates beside weights",
        owner=layers.UpdateRatioWatcher,
        needs="`update_norm` and `weight_norm` of at least four layers; judged by the same rule "
        "and settings as their gradients, less `least_share`.",
        examples=steps.update_ratio,
    ),
    Entry(
        name="activation",
        title="Activations",
        owner=layers.ActivationWatcher,
        needs="`activation_rms` or `activation_max` of a layer, `warm_up` rows of it.",
        examples=steps.activation,
        config=layers.ActivationConfig,
    ),
    Entry(
        name="throughput",
        title="Throughput",
        owner=speed.ThroughputWatcher,
        needs="`tokens_per_second`, or `step_duration_seconds` of the ranks; five measurements of "
        "`block` steps. A change of the number of ranks begins anew.",
        examples=waits.throughput,
        more="Slow steps that come at intervals are left out. " + _rest_of(speed.Pace),
        config=speed.ThroughputConfig,
    ),
    Entry(
        name="data_bound",
        title="Waiting for data",
        owner=ranks.DataBoundWatcher,
        needs="`data_wait_seconds` and `step_duration_seconds` of the ranks.",
        examples=waits.data_bound,
        config=ranks.DataBoundConfig,
    ),
    Entry(
        name="straggler",
        title="Straggling rank",
        owner=ranks.StragglerWatcher,
        needs="`step_duration_seconds`, and of two ranks or more one of `communication_seconds`, "
        "`forward_backward_seconds`, `data_wait_seconds`.",
        examples=waits.straggler,
        config=ranks.StragglerConfig,
    ),
    Entry(
        name="memory_creep",
        title="Memory creep",
        owner=memory.MemoryCreepWatcher,
        needs="`memory_allocated_bytes` of every rank, and the device's size from an agent's "
        "`memory_total_bytes`.",
        examples=waits.memory_creep,
        config=memory.MemoryConfig,
    ),
    Entry(
        name="rank_loss",
        title="Loss of one rank",
        owner=ranks.RankLossWatcher,
        needs="`rank_loss` of three ranks or more.",
        examples=steps.rank_loss,
        config=ranks.RankLossConfig,
    ),
    Entry(
        name="stalled",
        title="Stalled step",
        owner=speed.stalled,
        finds="Finds a step that does not come.",
        needs="A usual duration: four ordinary steps. The time is handed in by who asks.",
        examples=waits.stalled,
        config=speed.StallConfig,
    ),
    Entry(
        name="checkpoint_overdue",
        title="Overdue checkpoint",
        owner=speed.checkpoint_overdue,
        finds="Finds a checkpoint that does not come.",
        needs="Two checkpoints, whose distance is the interval.",
        examples=waits.checkpoint_overdue,
        config=speed.CheckpointConfig,
    ),
)

OF_NODES = (
    Entry(
        name="gpu_throttle",
        title="Slowed clocks of a GPU",
        owner=node.GpuThrottleWatcher,
        needs="`throttle_reasons` of the GPU; for a power cap `sm_clock_hertz` too.",
        examples=nodes.gpu_throttle,
        module=node,
        config=node.ThrottleConfig,
    ),
    Entry(
        name="gpu_error",
        title="Memory errors and Xids of a GPU",
        owner=node.GpuErrorWatcher,
        needs="`ecc_uncorrected_errors`, `ecc_corrected_errors`, `last_xid`: each by itself, "
        "compared with the sample before.",
        examples=nodes.gpu_error,
        notes=("FATAL_XIDS",),
        source=node,
        config=node.GpuErrorConfig,
    ),
    Entry(
        name="gpu_lost",
        title="Lost GPU",
        owner=node.GpuLostWatcher,
        needs="A sample in which the GPU answered.",
        examples=nodes.gpu_lost,
        config=node.GpuLostConfig,
    ),
)

ENTRIES = (*IN_LOOP, *OF_STEPS, *OF_NODES)
