"""Draws what is declared, which the conformance suite proves, as the page of the docs."""

from collections.abc import Iterator

from tests.integrations.declared import FRAMEWORKS, SIGNALS, Framework, Variant

HEAD = """\
# Frameworks

NOTICE
What each adapter guarantees, and what it cannot see. `make test-integrations` trains with every one
of them on two ranks and compares the result with this page: a fault on rank 1 only, 12 kinds of it,
and the signals of each step, compared with a computation without any framework.

- *exact*: the verdict names the fault and, if non-finite, the rank; a skipped update is skipped on
  all ranks and leaves parameters, optimizer state and buffers bitwise unchanged; a signal is the
  true number. Finite outliers follow [the rules](guides/bad-steps.md).
- *abstains*: not available there, and not guessed: the signal is missing, the rule is silent.
- *its own*: the framework's own skip, counted as such and not as a fault.
- *no clip*: the loop does not clip the norm, or its limit is unknown; the state then counts as
  damaged later.

Vitals stores guarded runs in `./vitals_runs` (or `VITALS_DIR`): `vitals runs vitals_runs` lists
them, `vitals show` has a run's curves and decisions, `vitals why vitals_runs STEP` explains one
step, and `VITALS_MODE=observe` or `off` lowers the mode without a code change.

| framework | guide | adapter | tested with | from |
|---|---|---|---|---|
"""

ASKED = """\
## Probe

The probe finds out whether the weights are damaged. In mode `heal` the state then goes back, in
`guard` the result pages. *By the loop*: call `attached.keep_batch(batch, loss_of)` before each
forward, on all ranks, with the `Attached` of the adapter; without it the event `no_probe` reports
it once.

| framework | the probe is set |
|---|---|
"""
FAULTS = {
    "NaN or Inf in the loss": ("nan", "loss"),
    "in the gradients": ("nan", "element"),
    "outlier of the loss": ("x100", "loss"),
    "of the norm": ("x100", "element"),
    "beyond 1.8e19": ("1e30", "element"),
}
WORDS = {
    "loss": "loss",
    "rank_loss": "loss of each rank",
    "grad_norm": "gradient norm",
    "grad_norm_clipped": "clipped norm",
    "layer_norms": "norm of each layer",
    "learning_rate": "learning rate",
    "loss_scale": "loss scale",
    "times": "times",
}


def render(notice: str, versions: dict[str, dict[str, str]]) -> str:
    """Return the page.

    Args:
        notice: says that the page is generated.
        versions: the pins of ``newest`` and ``oldest``, by distribution.
    """
    lines = HEAD.replace("NOTICE\n", notice).splitlines()
    lines += [_framework(f, versions) for f in FRAMEWORKS]
    notes: list[str] = []
    lines += ["", "## Faults", ""]
    lines += _table("a fault on rank 1 alone", [*FAULTS, "the clip"], _faults, notes)
    lines += ["", "## Signals", ""]
    lines += _table("signal", [WORDS[s] for s in SIGNALS], _signals, notes)
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""]
    lines += ASKED.splitlines()
    lines += [f"| {f.title} | {f.asked} |" for f in FRAMEWORKS]
    lines += ["", "## Unsupported, or not run", ""]
    for framework in FRAMEWORKS:
        for verb, what in (("error", framework.refused), ("not run", framework.not_run)):
            lines += [f"- {framework.title}, {name}: {verb}; {why}." for name, why in what.items()]
    return "\n".join(lines) + "\n"


def _framework(framework: Framework, versions: dict[str, dict[str, str]]) -> str:
    name = framework.distribution or "torch"
    newest, oldest = versions["newest"].get(name, ""), versions["oldest"].get(name, "")
    guide = f"[{framework.module}](integrations/{framework.module}.md)"
    adapter = (
        f"`trainer_hooks.integrations.{framework.module}`"
        if framework.package
        else "`trainer_hooks`"
    )
    return f"| {framework.title} | {guide} | {adapter} | {name} {newest} | {oldest} |"


def _table(corner: str, columns: list[str], cells, notes: list[str]) -> Iterator[str]:
    yield f"| framework, variant / {corner} | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for framework in FRAMEWORKS:
        for name, variant in framework.variants.items():
            row = " | ".join(cells(variant, notes))
            yield f"| {framework.title}: {name} | {row} |"


def _noted(word: str, why: str, notes: list[str]) -> str:
    if why not in notes:
        notes.append(why)
    return f"{word} ({notes.index(why) + 1})"


def _faults(variant: Variant, notes: list[str]) -> Iterator[str]:
    for kind, place in FAULTS.values():
        yield _fault(variant, kind, place, notes)
    if not (variant.owes("loss") or variant.owes("grad_norm")):
        yield "abstains"
    elif variant.has_no_clip:
        yield _noted("no clip", variant.has_no_clip, notes)
    else:
        yield "known"


def _fault(variant: Variant, kind: str, place: str, notes: list[str]) -> str:
    if kind == "nan" and place == "element" and variant.scaled:
        return "its own"
    if kind == "1e30" and variant.owes("grad_norm") and variant.short_norm:
        return _noted("exact, reported as non-finite", variant.short_norm, notes)
    if kind == "1e30" and variant.short_flag:
        return _noted("its own", variant.short_flag, notes)
    if kind == "1e30" and variant.keeps_back:
        return _noted("exact, and its own", variant.keeps_back, notes)
    if place == "loss" and not variant.owes("loss"):
        why = variant.abstains["loss"]
        if kind == "nan":
            return _noted("exact, by its gradients", why, notes)
        return _noted("abstains", why, notes)
    if kind != "nan" and place != "loss" and not variant.owes("grad_norm"):
        return _noted("abstains", variant.abstains["grad_norm"], notes)
    return "exact"


def _signals(variant: Variant, notes: list[str]) -> Iterator[str]:
    for signal in SIGNALS:
        if signal in variant.abstains:
            yield _noted("abstains", variant.abstains[signal], notes)
        elif not variant.owes(signal):
            yield "-"
        elif signal == "learning_rate" and variant.schedule_waits:
            yield _noted("exact, waits in a skipped step", variant.schedule_waits, notes)
        else:
            yield "exact"
