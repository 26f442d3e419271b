"""`vitals plan`: resources of a training, before it starts."""

from typing import Annotated, cast, get_args

import typer

from trainvitals.cli.options import FactsForm
from trainvitals.cli.output import Format, write_json, write_rows
from trainvitals.errors import UsageError
from trainvitals.units import humanize
from vitals_plugins.lab.plan.training_plan import (
    GPUS,
    SOURCES,
    PlanInput,
    Shape,
    TrainingPlan,
    TrainingType,
    plan_training,
    shape_of,
)
from vitals_plugins.lab.plan.training_plan import batch_size_cost as batch_of

_TYPES = get_args(TrainingType)


def register(app: typer.Typer) -> None:
    """Add the `vitals plan` command."""
    app.command(
        "plan", epilog="Example: vitals plan --params 7e9 --tokens 1e12 --gpus 64 --gpu h100"
    )(show_plan)


def show_plan(
    params: Annotated[float, typer.Option(help="Parameters of the model, such as 7e9.")],
    tokens: Annotated[float, typer.Option(help="Tokens it is trained on, such as 1e12.")],
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "h100",
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")] = 1,
    layers: Annotated[
        int, typer.Option(help="Blocks [default: by the size].", min=0, show_default=False)
    ] = 0,
    width: Annotated[
        int,
        typer.Option(help="Width of a block [default: by the size].", min=0, show_default=False),
    ] = 0,
    vocab: Annotated[int, typer.Option(help="Words of the vocabulary.", min=0)] = 32_000,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 2048,
    micro_batch: Annotated[int, typer.Option(help="Sequences at a time on one GPU.")] = 1,
    precision: Annotated[
        str,
        typer.Option(
            help="mixed (halves, with fp32 master weights and moments), bf16 (all of it) or fp32."
        ),
    ] = "mixed",
    mfu: Annotated[float, typer.Option(help="Model FLOPs utilization that is expected.")] = 0.4,
    noise_scale: Annotated[
        float,
        typer.Option(
            help="Measured gradient noise scale in tokens (steps.critical_batch_tokens) [default: "
            "an estimate].",
            show_default=False,
        ),
    ] = 0.0,
    gpu_hour_price: Annotated[
        float,
        typer.Option(help="Price of a GPU for an hour.", envvar="VITALS_GPU_HOUR_PRICE", min=0.0),
    ] = 0.0,
    form: FactsForm = Format.TABLE,
) -> None:
    """Estimate the needs of a training: FLOPs, memory per GPU, batch, days and price.

    For a decoder-only transformer with AdamW. Footnotes name the source of each formula. Memory is
    an upper bound for the tensors; 8% of a GPU is left to its driver, NCCL and fragmentation.
    """
    if precision not in _TYPES:
        raise UsageError(f"--precision is {precision!r}; it must be one of {', '.join(_TYPES)}")
    if bool(layers) != bool(width):
        raise UsageError("--layers and --width go together", hint="give both, or neither")
    sized = min(max(1e3, params), 1e16)  # otherwise the plan reports an invalid size
    shape = Shape(layers, width, vocab) if layers else shape_of(sized, vocab=vocab)
    plan_input = PlanInput(
        num_params=params,
        tokens=tokens,
        gpu=gpu.lower(),
        num_gpus=gpus,
        shape=shape,
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        training_type=cast(TrainingType, precision),
        mfu=mfu,
        noise_scale=noise_scale,
        gpu_hour_price=gpu_hour_price,
    )
    result = plan_training(plan_input)
    if form is Format.JSON:
        write_json({"asked": plan_input, "plan": result, "sources": SOURCES})
        return
    _write_plan(plan_input, result, form, is_guessed=not layers)


def _write_plan(
    plan_input: PlanInput, result: TrainingPlan, form: Format, *, is_guessed: bool
) -> None:
    """Print the estimate of a planned training, with its formulas as notes."""
    notes = ["flops", "attention", "time", "batch", "states", "activations"]
    notes += ["shape"] if is_guessed else []
    mark = {name: f"[{number}]" for number, name in enumerate(notes, 1)}
    num_blocks = "1 block" if result.shape.layers == 1 else f"{result.shape.layers:,} blocks"
    shape = f"{num_blocks} of width {result.shape.width:,}"
    batch, half = (
        result.batch,
        batch_of(plan_input.tokens, result.noise_scale, result.noise_scale / 2),
    )
    measured = "measured" if plan_input.noise_scale else "an estimate"
    rows: list[tuple[str, object]] = [
        ("model", f"{_count(plan_input.num_params)} parameters, {shape}"
         f" {mark['shape'] if is_guessed else ''}".rstrip()),
        ("FLOPs", f"{result.flops:.3g}, of them {result.attention_flops:.2g} of attention "
         f"{mark['flops']}{mark['attention']}"),
        ("days", f"{result.days:.3g} at {100 * plan_input.mfu:.0f} % utilization {mark['time']}"),
        ("GPU-hours", f"{result.gpu_hours:,.{0 if result.gpu_hours >= 10 else 2}f}"),
        ("price", "no price given: --gpu-hour-price" if result.price is None
         else f"{result.price:,.0f} at {plan_input.gpu_hour_price:g} a GPU-hour"),
    ]  # fmt: skip
    if batch.tokens < plan_input.sequence_length and not plan_input.noise_scale:
        rows.append(("batch", "not known: the estimate is below one sequence, so it does not hold "
                     f"here; measure it: --noise-scale {mark['batch']}"))  # fmt: skip
    else:
        rows += [
            ("batch", f"at most {humanize(batch.tokens, 'tokens')} tokens ({measured}): "
             f"{batch.steps:,.0f} steps {mark['batch']}"),
            ("", f"so large a batch needs {batch.more_steps:.3g} times the least steps and "
             f"{batch.more_tokens:.3g} times the least tokens; half as large "
             f"{half.more_steps:.3g} and {half.more_tokens:.3g} times"),
        ]  # fmt: skip
        if result.least_batch_tokens > batch.tokens:
            least = batch_of(plan_input.tokens, result.noise_scale, result.least_batch_tokens)
            rows.append(("", f"{plan_input.num_gpus:,} GPUs train on no fewer than "
                         f"{humanize(least.tokens, 'tokens')} a step, which needs "
                         f"{least.more_tokens:.3g} times the least tokens"))  # fmt: skip
    is_csv = form is Format.CSV
    if not is_csv:
        write_rows(("plan", "value"), rows, form)
        typer.echo("")
    header = ("memory per GPU, GB", "checkpointing", "weights", "gradients", "optimizer",
              "activations", "other", "sum", f"fits {plan_input.gpu}")  # fmt: skip
    cells = [
        (
            fit.strategy,
            "yes" if fit.checkpointing else "no",
            *(float(f"{size / 1e9:.4g}") for size in (*fit.memory, fit.memory.total)),
            "yes" if fit.fits else "no",
        )
        for fit in result.fits
    ]
    write_rows(header, cells, form)
    if not is_csv:
        typer.echo("")
        for name in notes:
            typer.echo(f"{mark[name]} {SOURCES[name]}")
        typer.echo(
            f"{mark['states']}, {mark['activations']}: the table; what is other is gathered "
            "blocks, buckets and the output's gradient"
        )


def _count(num_params: float) -> str:
    """Return a readable number of a planned model's parameters."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if num_params >= size:
            return f"{num_params / size:,.4g} {word}"
    return f"{num_params:,.0f}"
