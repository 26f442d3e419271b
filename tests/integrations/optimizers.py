"""What is declared about optimizers from elsewhere, which ``test_optimizers`` proves."""

from __future__ import annotations

from typing import Literal, NamedTuple

Outcome = Literal["exact", "refused"]


class Declared(NamedTuple):
    """One optimizer, and what a skipped step does with it."""

    module: str
    name: str
    kind: str
    outcome: Outcome = "exact"
    note: str = ""
    options: dict[str, object] = {}  # noqa: RUF012 - never written to
    wraps: str = ""
    """Attribute of the optimizer that is given to ``attach`` in its place; empty: none."""
    matrices_only: bool = False
    """Whether it trains the matrices, and a fused AdamW the rest."""


PO, SF, BNB = "pytorch_optimizer", "schedulefree", "bitsandbytes.optim"
_TWO_PASSES = (
    "two passes per step: `attach(model, optimizer.base_optimizer)`, then `first_step` and "
    "`second_step` as usual"
)

OPTIMIZERS = (
    Declared(BNB, "Adam8bit", "state in 8 bits"),
    Declared(BNB, "AdamW8bit", "state in 8 bits"),
    Declared(BNB, "Lion8bit", "state in 8 bits"),
    Declared(SF, "AdamWScheduleFree", "schedule-free", note="`optimizer.train()` first, as always"),
    Declared(SF, "SGDScheduleFree", "schedule-free", note="`optimizer.train()` first, as always"),
    Declared(SF, "RAdamScheduleFree", "schedule-free", note="`optimizer.train()` first, as always"),
    Declared(SF, "AdamWScheduleFreeClosure", "schedule-free", "refused", "needs a closure"),
    Declared(PO, "Shampoo", "preconditioned"),
    Declared(PO, "ScalableShampoo", "preconditioned"),
    Declared(PO, "SOAP", "preconditioned"),
    Declared(PO, "Kron", "preconditioned"),
    Declared(PO, "Muon", "orthogonalized", matrices_only=True),
    Declared(PO, "LARS", "layer-wise rates"),
    Declared(PO, "Lamb", "layer-wise rates"),
    Declared(PO, "GaLore", "projected gradients"),
    Declared(PO, "Conda", "projected gradients"),
    Declared(PO, "APOLLO", "projected gradients"),
    Declared(PO, "CAME", "factored state"),
    Declared(PO, "SM3", "factored state"),
    Declared(PO, "AdamMini", "one rate per block", options={"model": True}),
    Declared(PO, "Prodigy", "learns its rate"),
    Declared(PO, "DAdaptAdam", "learns its rate"),
    Declared(PO, "Lion", "sign of the momentum"),
    Declared(PO, "Tiger", "sign of the momentum"),
    Declared(PO, "Adan", "Nesterov momentum"),
    Declared(PO, "AdEMAMix", "two averages"),
    Declared(PO, "ADOPT", "other forms of Adam"),
    Declared(PO, "StableAdamW", "other forms of Adam"),
    Declared(PO, "AdaBelief", "other forms of Adam"),
    Declared(PO, "RAdam", "other forms of Adam"),
    Declared(
        PO, "A2Grad", "without a rate in its groups", note="the learning rate is not recorded"
    ),
    Declared(PO, "SAM", "sharpness-aware", note=_TWO_PASSES, wraps="base_optimizer"),
    Declared(PO, "AliG", "step from the loss", "refused", "needs a closure; the error is its own"),
    Declared("torch.optim", "LBFGS", "second order", "refused", "needs a closure"),
)

HEAD = """\
# Optimizers

NOTICE
`make test-integrations` trains with each of these, with a NaN or Inf in the loss and in gradients,
also in the first step, and compares the result with the same training without these steps.

- *exact*: parameters, buffers and the optimizer's state are equal bit for bit, in all later steps
  too.
- *refused*: an error in `watch`, or in the first step.

The optimizers of `torch.optim` are in `make test`: all are exact, and LBFGS is refused. If an
optimizer is not fused, a skipped step does not call its `step()`, so any other one is exact too;
each step then waits for the verdict. Optimizers that step in backward
(`register_post_accumulate_grad_hook`) are refused: they step before there is a norm to judge.

| optimizer | package | kind | a skipped step | remark |
|---|---|---|---|---|
"""


def render(notice: str, versions: dict[str, str]) -> str:
    """Return the page of the docs.

    Args:
        notice: says that the page is generated.
        versions: the tested version of each package.
    """
    lines = HEAD.replace("NOTICE\n", notice).splitlines()
    for each in OPTIMIZERS:
        package = each.module.partition(".")[0].replace("_", "-")
        tested = f"{package} {versions[package]}"
        lines.append(f"| `{each.name}` | {tested} | {each.kind} | {each.outcome} | {each.note} |")
    return "\n".join(lines) + "\n"
