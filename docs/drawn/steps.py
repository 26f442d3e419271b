"""Examples of the detectors for merged steps: values of the optimizer, the layers, the ranks."""

import inspect
import math
import random
from collections.abc import Callable, Sequence

from docs.drawn.entry import Entry
from docs.drawn.loop import noisy
from docs.drawn.runs import SECOND, State, watched
from docs.drawn.svg import Panel
from trainvitals.detect.fleet import layers, optimizer, ranks, weights
from trainvitals.detect.fleet.base import MergedStep, Value
from trainvitals.detect.fleet.layers import ActivationConfig, LayerConfig
from trainvitals.records import OVERFLOW

LAYERS = ("embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")
BROKEN = "blocks.2"
RANKS = 6
EVERY = 10
"""Rows of layers come every tenth step."""

_HIDDEN = "-"
"""Start of labels that are not in the legend."""


def step(number: int, *, attempt: int = 1, **parts: object) -> MergedStep:
    """Return a merged step, one second after the previous one."""
    return MergedStep(step=number, attempt=attempt, time_unix_ns=number * SECOND, **parts)  # type: ignore[arg-type]


def of_run(column: str) -> Callable[[MergedStep], float | None]:
    """Return a function that reads a column of the run."""
    return lambda merged: _float(merged.run.get(column))


def of_rank(column: str, rank: int) -> Callable[[MergedStep], float | None]:
    """Return a function that reads a column of one rank."""
    return lambda merged: _float(merged.ranks[column][rank])


def of_layer(layer: str, column: str) -> Callable[[MergedStep], float | None]:
    """Return a function that reads a column of one layer."""
    return lambda merged: merged.layers[layer][column]


def _float(value: Value) -> float | None:
    return None if value is None else float(value)


# ------------------------------------------------------------------------- the optimizer's numbers


def learning_rate() -> list[Panel]:
    """A jump, a climb, a schedule lost at a resume; warm restarts, a step decay."""
    cosine = [_warm_cosine(i, 240) for i in range(240)]
    jump = [rate * (4.0 if i >= 150 else 1.0) for i, rate in enumerate(cosine)]
    climb = [rate * 1.04 ** max(i - 120, 0) for i, rate in enumerate(cosine)]
    resumed = [_warm_cosine(i - 150 if i >= 150 else i, 240) for i in range(240)]
    restarts = [_warm_cosine(i if i < 80 else (i - 80) % 60 + 20, 80) for i in range(240)]
    decay = [3e-4 * 0.1 ** (i // 80) * min(1.0, (i + 1) / 20) for i in range(240)]
    return [
        _rates("four times as high from step 150 on", jump, "learning_rate"),
        _rates("multiplied by 1.04 in every step from step 121 on", climb, "learning_rate"),
        _rates("resumed at step 150, the schedule starts again", resumed, "learning_rate", 150),
        _rates("silent: warm restarts", restarts),
        _rates("silent: a step decay", decay),
    ]


def _warm_cosine(i: int, steps: int) -> float:
    """Return a rate of 3e-4 after 20 steps of warm-up, down to a tenth along a cosine."""
    if i < 20:
        return 3e-4 * (i + 1) / 20
    return 3e-4 * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * (i - 20) / (steps - 20))))


def _rates(title: str, rates: Sequence[float], detector: str = "", resumed: int = 1000) -> Panel:
    steps = [
        step(i, attempt=2 if i >= resumed else 1, run={"learning_rate": rate})
        for i, rate in enumerate(rates)
    ]
    lines = {"learning rate": of_run("learning_rate")}
    return watched(title, steps, detector, lines=lines, y_label="learning rate")


def weight_decay() -> list[Panel]:
    """A jump, also at a resume; a cosine from 0.04 to 0.4, warm-up and stages."""
    jump = [0.01 if i < 150 else 3.0 for i in range(240)]
    cosine = [0.4 - 0.18 * (1.0 + math.cos(math.pi * i / 240)) for i in range(240)]
    stages = [0.05 * min(1.0, i / 40) * 2.0 ** (i // 80) for i in range(240)]
    options = {"lines": {"weight decay": of_run("weight_decay")}, "y_label": "weight decay"}
    return [
        watched(title, [step(i, attempt=2 if i >= resumed else 1, run={"weight_decay": decay})
                        for i, decay in enumerate(decays)], detector, **options)
        for title, decays, detector, resumed in (
            ("from 0.01 to 3 at step 150", jump, "weight_decay", 1000),
            ("resumed at step 150 with another config", jump, "weight_decay", 150),
            ("silent: a cosine from 0.04 to 0.4", cosine, "", 1000),
            ("silent: a warm-up, then stages that double it", stages, "", 1000),
        )
    ]  # fmt: skip


def loss_scale() -> list[Panel]:
    """Repeated overflows; the search from 2**32, and a doubled scale that is reverted."""
    collapse = _scales(65536.0, {150: 9})
    search = _scales(2.0**32, {0: 20, 100: 1, 180: 1})
    lines = {"loss scale": of_run("loss_scale"), "limit": lambda merged: 1.0}
    options = {"lines": lines, "y_label": "loss scale", "log": True}
    return [
        watched("a scale that was found collapses", collapse, "loss_scale", **options),  # type: ignore[arg-type]
        watched("silent: the search for a scale, and single tries", search, **options),  # type: ignore[arg-type]
    ]


def _scales(scale: float, overflows: dict[int, int]) -> list[MergedStep]:
    """Return 240 steps with this number of consecutive overflows from each of these steps."""
    bad = {first + n for first, num in overflows.items() for n in range(num)}
    steps = []
    for i in range(240):
        scale = scale / 2 if i in bad else scale * 2 if i + 1 in (overflows if i else ()) else scale
        steps.append(step(i, run={"loss_scale": scale, "verdict": OVERFLOW if i in bad else 0}))
    return steps


def weight_norm() -> list[Panel]:
    """Weight decay 300 times too strong; the growth of a healthy run."""
    healthy = [20.0 + 6.0 * (1.0 - math.exp(-n / 25)) for n in range(60)]
    decays = [norm * 0.95 ** max(0, n - 40) for n, norm in enumerate(healthy)]
    lines = {"weight norm": of_run("weight_norm")}
    return [
        watched(title, [step(n * EVERY, run={"weight_norm": norm}) for n, norm in enumerate(norms)],
                detector, lines=lines, y_label="weight norm")
        for title, norms, detector in (
            ("weight decay 300 times too strong from step 400 on", decays, "weight_norm"),
            ("silent: weights that grow from their beginning", healthy, ""),
        )
    ]  # fmt: skip


# ------------------------------------------------------------------------------------- the layers


def layer_gradient() -> list[Panel]:
    """One layer leaves its normal range; all do together."""
    alone = _layers({BROKEN: dict.fromkeys(range(45, 60), 9.0)}, {})
    together = _layers({layer: {45: 9.0, 46: 6.0} for layer in LAYERS}, {})
    return [
        _layer_panel(f"{BROKEN} alone is nine times as high", alone, "layer_gradient"),
        _layer_panel("silent: a heavy batch, nine times in all layers", together),
    ]


def _layers(factors: dict[str, dict[int, float]], weights: dict[str, float]) -> list[MergedStep]:
    """Return 60 rows of layers whose norms are noisy, times factors at some rows."""
    rng = random.Random(20)
    rows = []
    for n in range(60):
        layers = {}
        for place, layer in enumerate(LAYERS):
            norm = 0.1 * (1 + 0.3 * place) * math.exp(rng.gauss(0.0, 0.1))
            norm *= factors.get(layer, {}).get(n, 1.0)
            layers[layer] = {"grad_norm": norm}
            if weights:
                layers[layer] = {"update_norm": 1e-3 * norm, "weight_norm": weights[layer]}
        rows.append(step(n * EVERY, layers=layers))
    return rows


def _layer_panel(title: str, rows: Sequence[MergedStep], detector: str = "") -> Panel:
    others = [layer for layer in LAYERS if layer != BROKEN]
    lines = {BROKEN: of_layer(BROKEN, "grad_norm")}
    lines |= {"the others": of_layer(others[0], "grad_norm")}
    lines |= {f"{_HIDDEN}{layer}": of_layer(layer, "grad_norm") for layer in others[1:]}
    ratio = LayerConfig().weak_ratio
    limit = (f"{ratio:g} times its course", lambda state: ratio * _course(state, BROKEN))
    return watched(title, rows, detector, of="layer_gradient", lines=lines, limit=limit,
                   y_label="gradient norm", log=True)  # fmt: skip


def _course(state: State, layer: str) -> float:
    return next(math.exp(kept[2]) for kept in state["courses"] if kept[0] == layer)


def update_ratio() -> list[Panel]:
    """Updates of one layer grow too large for its weights; a layer whose ratio always is high."""
    weights = {layer: 0.02 if layer == "head" else 1.0 for layer in LAYERS}
    grows = _layers({BROKEN: {n: 1.3 ** (n - 40) for n in range(40, 60)}}, weights)
    fresh = _layers({}, weights)
    return [
        _ratio_panel(f"the updates of {BROKEN} grow", grows, BROKEN, "update_ratio"),
        _ratio_panel("silent: a new head, always 50 times the others", fresh, "head"),
    ]


def _ratio_panel(title: str, rows: Sequence[MergedStep], first: str, detector: str = "") -> Panel:
    def ratio(layer: str) -> Callable[[MergedStep], float | None]:
        return lambda row: row.layers[layer]["update_norm"] / row.layers[layer]["weight_norm"]

    others = [layer for layer in LAYERS if layer != first]
    lines = {first: ratio(first), "the others": ratio(others[0])}
    lines |= {f"{_HIDDEN}{layer}": ratio(layer) for layer in others[1:]}
    strong = LayerConfig().weak_ratio
    limit = (f"{strong:g} times its course", lambda state: strong * _course(state, first))
    return watched(title, rows, detector, of="update_ratio", lines=lines, limit=limit,
                   y_label="update / weight", log=True)  # fmt: skip


def activation() -> list[Panel]:
    """An output that grows tenfold, one that collapses; one batch with a single large one."""
    sizes = noisy([1.0] * 120, 0.05, 21)
    grown = [size * math.exp(max(0, n - 60) * 0.06) for n, size in enumerate(sizes)]
    single = [size * (25.0 if n == 80 else 1.0) for n, size in enumerate(sizes)]
    fallen = [size * (1.0 if n < 80 else 0.03) for n, size in enumerate(sizes)]
    return [
        _activations("an output grows, row by row", grown, "activation"),
        _activations("an output collapses", fallen, "activation"),
        _activations("silent: one batch with large outputs", single),
    ]


def _activations(title: str, sizes: Sequence[float], detector: str = "") -> Panel:
    rows = [
        step(n * EVERY, layers={BROKEN: {"activation_rms": size}}) for n, size in enumerate(sizes)
    ]
    config = ActivationConfig()

    def limit(state: State) -> float | None:
        _, count, _, _, _, level = state["courses"][0]
        return config.rms_ratio * math.exp(level) if count > config.warm_up else None

    lines = {f"output of {BROKEN}": of_layer(BROKEN, "activation_rms")}
    return watched(title, rows, detector, of="activation", lines=lines, y_label="root mean square",
                   limit=(f"{config.rms_ratio:g} times its level", limit), log=True)  # fmt: skip


# -------------------------------------------------------------------------------------- the ranks


def rank_loss() -> list[Panel]:
    """One rank is always above the others; each rank is at times."""
    rng = random.Random(22)
    broken, heavy = [], []
    for i in range(240):
        losses = [2.5 * math.exp(rng.gauss(0.0, 0.006)) for _ in range(RANKS)]
        broken.append(_ranks_row(i, [losses[0] * (1.07 if i >= 80 else 1.0), *losses[1:]]))
        losses = [2.5 * math.exp(rng.gauss(0.0, 0.006)) for _ in range(RANKS)]
        if rng.random() < 0.3:
            losses[rng.randrange(RANKS)] *= 1.0 + rng.expovariate(8.0)
        heavy.append(_ranks_row(i, losses))
    return [
        _rank_panel("rank 0 is above the others from step 80", broken, "rank_loss"),
        _rank_panel("silent: outliers that are not always the same rank's", heavy),
    ]


def reduction() -> list[Panel]:
    """One rank's link flips bits; rounding alone."""
    rng = random.Random(23)
    errors = [[abs(rng.gauss(0.0, 0.3)) for _ in range(RANKS)] for _ in range(240)]
    broken = [list(of_step) for of_step in errors]
    for i in range(120, 240, 30):
        broken[i][0] = 4000.0
    return [
        _reductions("rank 0 gets changed gradients from step 120 on", broken, "reduction"),
        _reductions("silent: rounding", errors),
    ]


def _reductions(title: str, errors: Sequence[Sequence[float]], detector: str = "") -> Panel:
    rows = [step(i, ranks={"reduction_error": of_step}) for i, of_step in enumerate(errors)]
    lines = each_rank("reduction_error", RANKS)
    most = ranks.ReductionConfig().limit
    return watched(title, rows, detector, of="reduction", lines=lines,
                   limit=(f"{most:g}", lambda _: most), y_label="roundings", log=True)  # fmt: skip


def _ranks_row(number: int, losses: Sequence[float]) -> MergedStep:
    return step(number, ranks={"rank_loss": losses})


def _rank_panel(title: str, rows: Sequence[MergedStep], detector: str = "") -> Panel:
    lines = each_rank("rank_loss", RANKS)
    return watched(title, rows, detector, lines=lines, y_label="loss", every=2)


def each_rank(column: str, ranks: int) -> dict[str, Callable[[MergedStep], float | None]]:
    """Return functions that read a column of each rank: rank 0's first, the others share a name."""
    names = {rank: f"{_HIDDEN}{rank}" for rank in range(ranks)} | {0: "rank 0", 1: "the others"}
    return {name: of_rank(column, rank) for rank, name in names.items()}


ENTRIES = (
    Entry(
        name="learning_rate",
        title="Learning rate",
        owner=optimizer.LearningRateWatcher,
        needs="`learning_rate` of rank 0. For jumps and climbs: a finished warm-up. For a "
        "forgotten schedule: an earlier attempt.",
        examples=learning_rate,
        config=optimizer.LearningRateConfig,
    ),
    Entry(
        name="loss_scale",
        title="Loss scale and overflows",
        owner=optimizer.LossScaleWatcher,
        needs="`loss_scale`, and a scaler that has settled.",
        examples=loss_scale,
        config=optimizer.LossScaleConfig,
    ),
    Entry(
        name="weight_decay",
        title="Weight decay",
        owner=optimizer.WeightDecayWatcher,
        needs="`weight_decay`, which rank 0 writes at every step if a parameter group has one; "
        "`warm_up_rows` steps without a new highest value.",
        examples=weight_decay,
        config=optimizer.WeightDecayConfig,
    ),
    Entry(
        name="weight_norm",
        title="Weight norm",
        owner=weights.WeightNormWatcher,
        needs="`weight_norm` (`SignalSettings(weight_norm=True)`), `warm_up` samples of it. Off by "
        "default: each tensor of parameters adds a number to the exchange of every step, and 1 of "
        "43 kinds of small healthy training is reported.",
        more="Always on: `weights` reports this kind for a layer whose weights something else than "
        "the optimizer changed, such as a flipped bit or a layer that was zeroed or scaled. Rank 0 "
        "reads the norm of each matrix, as often as that takes 0.4% of the time, at least every 50 "
        "steps, and compares it with the change that updates of Adam or AdamW explain. Then the "
        "[probe](guides/bad-steps.md#pass-a-probe) runs. It abstains with other optimizers, on "
        "sharded parameters and on reduced precision on the CPU, with fewer than three layers, and "
        "if several layers changed, more than a quarter of them: the loop replaced the state.",
        examples=weight_norm,
        config=weights.WeightNormConfig,
    ),
    Entry(
        name="layer_gradient",
        title="Gradients of a layer",
        owner=layers.LayerGradientWatcher,
        needs="`grad_norm` of at least four layers, `warm_up` rows of each.",
        examples=layer_gradient,
        module=layers,
        more=str(inspect.getdoc(layers.LayerOutlierWatcher)),
        config=layers.LayerConfig,
    ),
    Entry(
        name="update_ratio",
        title="Update-to-weight ratio",
        owner=layers.UpdateRatioWatcher,
        needs="`update_norm` and `weight_norm` of at least four layers; judged by the rule and "
        "settings of the gradients, without `least_share`.",
        more="Without these signals, `optimizer_state` reports this kind for a layer whose second "
        "moments (Adam) were set to 0, with the step. Rank 0 reads the moments every 50 steps, and "
        "after a finding, and compares their sums with what the measured gradients add up to. It "
        "abstains on sharded state, with fewer than four layers, and if the sums of more than a "
        "quarter of the layers differ.",
        examples=update_ratio,
    ),
    Entry(
        name="activation",
        title="Activations",
        owner=layers.ActivationWatcher,
        needs="`activation_rms`, `activation_max` or `activation_dead_ratio` of a layer, `warm_up`"
        " rows of it.",
        examples=activation,
        config=layers.ActivationConfig,
    ),
    Entry(
        name="rank_loss",
        title="Loss of one rank",
        owner=ranks.RankLossWatcher,
        needs="`rank_loss` of three ranks or more.",
        examples=rank_loss,
        config=ranks.RankLossConfig,
    ),
    Entry(
        name="reduction",
        title="Gradients that do not add up",
        owner=ranks.ReductionWatcher,
        needs="`reduction_error` of every rank: `SignalSettings(reduction=True)`, with DDP.",
        examples=reduction,
        config=ranks.ReductionConfig,
    ),
)
"""The detectors that are drawn here."""
