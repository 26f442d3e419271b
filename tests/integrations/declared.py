"""What each framework's adapter owes: the conformance suite holds it to this, the docs show it.

A variant owes every signal, exactly, but for those that it names with the reason. What it does not
owe must be missing: nothing is guessed. The faults that it owes follow from that: a rule without
its signal abstains.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

SIGNALS = (
    "loss",
    "rank_loss",
    "grad_norm",
    "grad_norm_clipped",
    "layer_norms",
    "learning_rate",
    "loss_scale",
    "times",
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train with a framework."""

    abstains: Mapping[str, str] = field(default_factory=dict)
    """Signals that are out of reach, and why."""
    scaled: bool = False
    """Whether there is a loss scale: an overflow then is the scaler's own skip, and no fault."""
    rounded: bool = False
    """Computed in less than float32, which a reference does not round alike."""
    schedule_waits: str = ""
    """Why the learning rate's schedule stands still in a skipped step; empty where it goes on."""

    unclipped: bool = False
    """Whether nothing is clipped, and the guard was told so."""
    unknown_clip: str = ""
    """Why it is not known what is clipped to, though the norm is; empty where it is known."""
    short_norm: str = ""
    """Why a finite outlier beyond 1.8e19 is taken for one that is not finite; empty where not."""

    short_flag: str = ""
    """Why such an outlier is an overflow to the framework's own scale; empty where not."""
    keeps_back: str = ""
    """Why the framework keeps such an outlier back by itself; empty: never."""

    def owes(self, signal: str) -> bool:
        """Whether the signal is there, and exact."""
        return signal not in self.abstains and (signal != "loss_scale" or self.scaled)

    @property
    def has_no_clip(self) -> str:
        """Why nothing is known to be clipped; empty: it is known what the loop clips to."""
        if self.unclipped:
            return _UNCLIPPED
        norms = (self.abstains.get("grad_norm_clipped"), self.abstains.get("grad_norm"))
        return self.unknown_clip or norms[0] or norms[1] or ""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One framework and its adapter."""

    title: str
    module: str
    """The training in ``tests.integrations.trainings``, and the guide in ``docs/integrations``."""
    package: str = ""
    """What must be importable; empty where torch is enough."""
    distribution: str = ""
    """Its name in the package index."""
    variants: Mapping[str, Variant]
    asked: str
    """Whether the adapter has the probe ask the state, and what the loop can do where not."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """What the adapter refuses in words, and why."""
    not_run: Mapping[str, str] = field(default_factory=dict)
    """What could not be run where the suite was, and why."""


_UNCLIPPED = "nothing is clipped"
_UNTOLD_CLIP = "the loop gives the norm, and nobody says what it clips to"
_OWN_CLIP = "the loop clips before the step, and did not say what the norm was"
_FLOAT32 = "the norm is the loop's own, whose squares float32 cannot hold: infinite to it"
_NO_LOSS = "the loop did not give it"
_BY_MODULE = "configure_gradient_clipping is the module's own: nobody knows what it aims at"
_NOT_AIMED = "clipped by value: no norm was aimed at"
_MANUAL_LOSS = "what a manual loop gives to backward may be divided, or a part"
_MANUAL_CLIP = "a manual loop clips before Lightning's hooks"
_NO_TRAINER = "the trainer clips before it calls a callback, and shows it no loss"
_NOT_STEPPED = "Accelerate keeps a schedule where the scaler's optimizer.step() was not called"
_NO_FSDP = "on CPU ranks Accelerate wraps in DDP without a word, whatever the plugin says"
_ENGINE_SKIPPED = "Accelerate keeps a schedule where DeepSpeed's engine made no update"
_ACCELERATE_REFUSES = {
    "Megatron-LM and XLA": "Accelerate does not make the update by optimizer.step()",
    "LOMO and layer-wise optimizers": "they update inside backward, before the verdict",
}

_ENGINE_WAITS = "the engine does not step the schedule where it skips"
_ENGINE_NORM = "the engine's norm is of float32, and infinite: it keeps the first back by itself"
_ENGINE_FLAG = "the engine's norm is of float32: it takes the scale to be too high as well"
_NO_BATCH = "by the loop: the adapter sees the number, not the batch"
_UNPROVEN = "an exact skip has not been shown there"

FRAMEWORKS = (
    Framework(
        title="torchrun",
        module="torchrun",
        asked="by the loop, and with `watch` by `monitor.batches(loader, probe=loss_of)`",
        variants={
            "watch, DDP": Variant(),
            "watch, FSDP2": Variant(),
            "watch, DDP, not fused": Variant(),
            "attach, judged before the clip": Variant(),
            "attach, told the norm": Variant(short_norm=_FLOAT32, unknown_clip=_UNTOLD_CLIP),
            "attach, nothing told": Variant(
                abstains={
                    "loss": _NO_LOSS,
                    "rank_loss": _NO_LOSS,
                    "grad_norm": _OWN_CLIP,
                    "layer_norms": _OWN_CLIP,
                }
            ),
            "attach, float16 with a scaler": Variant(scaled=True, rounded=True),
        },
    ),
    Framework(
        title="Hugging Face Trainer",
        module="huggingface",
        package="transformers",
        distribution="transformers",
        asked="by itself, where `compute_loss` is the trainer's own and no engine trains",
        variants={
            "DDP": Variant(),
            "DDP, accumulating": Variant(),
            "DDP, not fused": Variant(),
            "DDP, float16 with a scaler": Variant(scaled=True, rounded=True),
            "DDP, float16 with a scaler, not fused": Variant(
                scaled=True, rounded=True, schedule_waits=_NOT_STEPPED
            ),
            "callback without the trainer": Variant(
                abstains={
                    "loss": _NO_TRAINER,
                    "rank_loss": _NO_TRAINER,
                    "grad_norm": _NO_TRAINER,
                    "layer_norms": _NO_TRAINER,
                }
            ),
            "DeepSpeed, ZeRO 2, accumulating": Variant(
                schedule_waits=_ENGINE_SKIPPED, keeps_back=_ENGINE_NORM
            ),
        },
        refused=_ACCELERATE_REFUSES
        | {
            "restore_callback_states_from_checkpoint": "it creates a new callback without its "
            "trainer; the state is restored without it",
            "DeepSpeed without the trainer": "only the trainer knows the engine",
        },
        not_run={"FSDP": _NO_FSDP},
    ),
    Framework(
        title="Accelerate",
        module="accelerate",
        package="accelerate",
        distribution="accelerate",
        asked=_NO_BATCH,
        variants={
            "DDP": Variant(),
            "DDP, accumulating": Variant(),
            "DDP, not fused": Variant(),
            "DDP, float16 with a scaler": Variant(scaled=True, rounded=True),
            "DDP, float16 with a scaler, not fused": Variant(
                scaled=True, rounded=True, schedule_waits=_NOT_STEPPED
            ),
            "DDP, says that it does not clip": Variant(unclipped=True),
            "DeepSpeed, ZeRO 2": Variant(schedule_waits=_ENGINE_SKIPPED, keeps_back=_ENGINE_NORM),
        },
        refused=_ACCELERATE_REFUSES
        | {"several optimizers with a scaler": "Accelerate updates it after each of them"},
        not_run={"FSDP": _NO_FSDP},
    ),
    Framework(
        title="Lightning Trainer",
        module="lightning",
        package="lightning",
        distribution="lightning",
        asked="by the loop: a `training_step` also logs and counts",
        variants={
            "DDP": Variant(),
            "DDP, not fused": Variant(),
            "DDP, accumulating": Variant(),
            "DDP, clipped by value": Variant(abstains={"grad_norm_clipped": _NOT_AIMED}),
            "DDP, a clip of the module's own": Variant(abstains={"grad_norm_clipped": _BY_MODULE}),
            "DDP, float16 with a scaler": Variant(scaled=True, rounded=True),
            "DDP, float16, fused and never clipped": Variant(
                scaled=True, rounded=True, unclipped=True
            ),
            "FSDP2": Variant(),
            "manual optimization": Variant(
                abstains={
                    "loss": _MANUAL_LOSS,
                    "rank_loss": _MANUAL_LOSS,
                    "grad_norm": _MANUAL_CLIP,
                    "layer_norms": _MANUAL_CLIP,
                }
            ),
        },
        refused={
            "DeepSpeedStrategy": "its engine makes the update, and cannot skip a step",
            "several optimizers in one callback": "they alternate; use one callback each",
        },
        not_run={
            "FSDPStrategy": "it needs a GPU",
        },
    ),
    Framework(
        title="Lightning Fabric",
        module="fabric",
        package="lightning",
        distribution="lightning",
        asked=_NO_BATCH,
        variants={
            "DDP": Variant(),
            "DDP, not fused": Variant(),
            "DDP, accumulating": Variant(),
            "DDP, clipped by value": Variant(abstains={"grad_norm_clipped": _NOT_AIMED}),
            "DDP, never clipped": Variant(unclipped=True),
            "DDP, clipped by the guard": Variant(),
            "DDP, clipped in a way of the loop's own": Variant(
                abstains={"grad_norm": _OWN_CLIP, "layer_norms": _OWN_CLIP}
            ),
            "DDP, float16 with a scaler": Variant(scaled=True, rounded=True),
            "FSDP2": Variant(),
        },
        refused={
            "DeepSpeedStrategy": "its engine makes the update, and cannot skip a step",
            "two guards on one Fabric": "it cannot assign the loss of backward",
        },
        not_run={
            "FSDPStrategy": "it needs a GPU",
        },
    ),
    Framework(
        title="torchtitan",
        module="torchtitan",
        package="torchtitan",
        distribution="torchtitan",
        asked="not: its forward and backward are one call; its validation is evidence",
        variants={
            "Trainer, FSDP2": Variant(),
            "Trainer, FSDP2, accumulated": Variant(),
            "Trainer, FSDP2, not fused": Variant(),
        },
        refused={
            "optimizers in backward": "they step before there is a norm to judge",
            "fault_tolerance (torchft)": "it decides itself whether a step is made",
        },
        not_run={
            "context and expert parallelism": "their kernels need a GPU",
            "float8 and CUDA graphs": "they need a GPU",
            "torchtitan 0.3.0": "not in the suite; it was run manually through the same faults",
        },
    ),
    Framework(
        title="DeepSpeed",
        module="deepspeed",
        package="deepspeed",
        distribution="deepspeed",
        asked=_NO_BATCH + "; refused under ZeRO 3",
        variants={
            "no ZeRO": Variant(),
            "no ZeRO, bfloat16": Variant(
                rounded=True, schedule_waits=_ENGINE_WAITS, keeps_back=_ENGINE_NORM
            ),
            "ZeRO 1": Variant(schedule_waits=_ENGINE_WAITS, keeps_back=_ENGINE_NORM),
            "ZeRO 1, bfloat16, wide gradients": Variant(
                rounded=True, schedule_waits=_ENGINE_WAITS, keeps_back=_ENGINE_NORM
            ),
            "ZeRO 2": Variant(schedule_waits=_ENGINE_WAITS, keeps_back=_ENGINE_NORM),
            "ZeRO 2, accumulating, two groups": Variant(
                schedule_waits=_ENGINE_WAITS, keeps_back=_ENGINE_NORM
            ),
            "ZeRO 2, never clipped": Variant(unclipped=True, schedule_waits=_ENGINE_WAITS),
            "ZeRO 2, bfloat16": Variant(
                rounded=True, schedule_waits=_ENGINE_WAITS, keeps_back=_ENGINE_NORM
            ),
            "ZeRO 2, float16 with a scale": Variant(
                scaled=True,
                rounded=True,
                schedule_waits=_ENGINE_WAITS,
                short_flag=_ENGINE_FLAG,
            ),
            "ZeRO 3": Variant(schedule_waits=_ENGINE_WAITS),
            "ZeRO 3, bfloat16": Variant(rounded=True, schedule_waits=_ENGINE_WAITS),
        },
        refused={
            "pipelines": "its ranks hold different layers, so there is no common gradient norm",
            "experts (MoE)": "its ranks hold different parameters, so there is no common "
            "gradient norm",
            "1-bit Adam, 1-bit LAMB, 0/1 Adam": "they exchange gradients within their step",
            "Muon under ZeRO or in half precision": "it turns gradients into updates "
            "before they can be measured",
            "ZenFlow": "it updates outside its step",
            "float16 torch_autocast under ZeRO": "its scaler is updated within the step",
            "offload to the CPU or NVMe": _UNPROVEN,
            "tensor parallelism (mpu, autotp)": _UNPROVEN,
            "DeepCompile, MiCS, SuperOffload, the hybrid engine": _UNPROVEN,
            "legacy fusion": _UNPROVEN,
        },
        not_run={
            "FusedAdam and FP16_Optimizer": "they need CUDA",
            "overlapping communication": "it needs CUDA streams",
        },
    ),
)
