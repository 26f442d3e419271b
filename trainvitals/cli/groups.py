"""Makes groups of commands, such as `vitals store`: all of them look and answer alike."""

from collections.abc import Callable, Mapping

import typer

Commands = Mapping[str, tuple[Callable[..., None], str]]
"""By name, what a command does and an example of it."""


def add_group(
    app: typer.Typer,
    name: str,
    commands: Commands,
    *,
    about: str,
    example: str,
) -> typer.Typer:
    """Add a group with its commands; called without one of them it shows its help.

    Args:
        app: gets the group.
        name: what the group is called.
        commands: what is in it.
        about: the group's help.
        example: an example of the group.
    """
    group = typer.Typer(
        help=about,
        epilog=f"Example: {example}",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    for command, (function, shown) in commands.items():
        group.command(command, epilog=f"Example: {shown}")(function)
    app.add_typer(group, name=name)
    return group
