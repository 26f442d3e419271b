"""Options that several commands share, and groups of options."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import typer

from trainvitals.cli.output import Format

Run = Annotated[
    str,
    typer.Argument(help="Run id or its beginning, name, or folder [default: the latest run]."),
]
LocalRun = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Run id or its beginning, name, or folder (a run's, or one with runs)."
    ),
]
# Not checked by typer: our own errors name the fix.
Dir = Annotated[
    Path | None, typer.Option("--dir", help="Folder with run directories.", readable=False)
]
VitalsDir = Annotated[
    Path, typer.Option("--dir", envvar="VITALS_DIR", help="Folder with run directories.")
]
Collector = Annotated[
    str, typer.Option("--collector", help="Address or data folder of a collector.")
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="The collector's tokens.")]
Form = Annotated[Format, typer.Option("--format", help="How to write the data.")]
FactsForm = Annotated[Format, typer.Option("--format", help="table, json or csv.")]
ReportFormat = Literal["table", "json"]
"""Format of a report whose parts do not fit into the rows of a CSV file."""
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file whose content differs.")]
Control = Annotated[
    bool,
    typer.Option(
        "--control",
        help="Let a browser send commands once it gives a code that this terminal shows.",
    ),
]


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's ``Struct`` parameters by the options that their fields declare.

    Typer gets the fields instead of the parameter. The command receives an instance.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        group = parameter.annotation
        if isinstance(group, type) and issubclass(group, msgspec.Struct):
            groups[name] = group
            hints = get_type_hints(group, include_extras=True)
            fields = inspect.signature(group).parameters.values()
            parameters += [field.replace(annotation=hints[field.name]) for field in fields]
        else:
            parameters.append(parameter)
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            fields = group.__struct_fields__
            values[name] = group(**{key: values.pop(key) for key in fields if key in values})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
