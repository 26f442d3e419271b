"""Adds commands and groups of commands, such as `vitals store`."""

from collections.abc import Callable, Mapping

import typer

from trainvitals.cli.options import expand_options

Commands = Mapping[str, tuple[Callable[..., None], str]]
"""Function and example of each command, by its name."""


def add_commands(app: typer.Typer, commands: Commands) -> None:
    """Add commands with their examples to the ``vitals`` command line."""
    for name, (function, example) in commands.items():
        app.command(name, epilog=f"Example: {example}")(expand_options(function))


def add_group(
    app: typer.Typer, name: str, commands: Commands, *, about: str, example: str
) -> typer.Typer:
    """Add a group of ``vitals`` commands; called without one of them it shows its help.

    Args:
        app: gets the group.
        name: name of the group.
        commands: commands of the group.
        about: help of the group.
        example: example of the group.
    """
    group = typer.Typer(
        help=about, epilog=f"Example: {example}", no_args_is_help=True, rich_markup_mode=None
    )
    add_commands(group, commands)
    app.add_typer(group, name=name)
    return group
