"""LoRA adapters that are not trained, and a base model that is."""

from trainvitals.detect.fleet.base import MergedStep
from trainvitals.detect.posttraining import names
from trainvitals.detect.posttraining.base import CountWatcher, quantity
from trainvitals.detect.posttraining.names import TaskSpec
from trainvitals.records import Finding


class AdapterWatcher(CountWatcher):
    """Reports LoRA adapters that get no update, and layers whose own weight is trained too.

    Rank 0 counts once, in the third step: adapters in the optimizer, adapters with a gradient while
    other parameters have one, and adapted layers whose base weight is in the optimizer. Heads and
    ``modules_to_save`` have no adapter, so they do not count.
    """

    name = "adapter"
    CAUSES = ("adapter", "base_trained")

    @staticmethod
    def is_for(spec: TaskSpec) -> bool:
        """Return whether such a run can have LoRA adapters: each kind can."""
        return True

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the counts of adapters and base weights that a step logged."""
        in_optimizer = quantity(merged, names.ADAPTERS_IN_OPTIMIZER)
        with_gradient = quantity(merged, names.ADAPTERS_WITH_GRADIENT)
        base = quantity(merged, names.BASE_IN_OPTIMIZER)
        findings: tuple[Finding, ...] = ()
        if in_optimizer is not None and in_optimizer <= 0.0:
            findings += self._report_once(
                merged, "adapter", in_optimizer, 0.0,
                "no LoRA adapter is trained: none is in the optimizer with requires_grad. Likely "
                "causes: an adapter that was loaded for inference (pass is_trainable=True), an "
                "optimizer that was made before the adapter, or a call that froze all parameters. "
                "Make the optimizer after the adapter, from parameters with requires_grad",
            )  # fmt: skip
        elif with_gradient is not None and with_gradient <= 0.0:
            findings += self._report_once(
                merged, "adapter", with_gradient, 0.0,
                "no LoRA adapter has a gradient, while other parameters have one. Likely causes: "
                "an adapter that is disabled or not the active one, a forward that bypasses it, or "
                "gradient checkpointing without enable_input_require_grads(). Look at the "
                "gradients of one adapter",
            )  # fmt: skip
        elif in_optimizer is not None or with_gradient is not None:
            self._clear("adapter")
        if base is not None and base <= 0.0:
            self._clear("base_trained")
        elif base is not None:
            findings += self._report_once(
                merged, "base_trained", base, 0.0,
                f"the base weights of {base:.0%} of the adapted layers are trained as well, so "
                "this is a full fine-tuning with its memory and its forgetting. Likely causes: an "
                "adapter that was added without freezing the base, or a call that unfroze all "
                "parameters. Set requires_grad to False for all but the adapters",
            )  # fmt: skip
        return findings
