"""Loads plugins: optional parts of Vitals, found by their entry points."""

from importlib.metadata import entry_points
from typing import Any

from trainvitals.errors import UsageError

GROUP = "trainvitals.plugins"
_PACKAGE = "vitals_plugins"


def load_plugin(name: str) -> Any:
    """Return the object of a plugin's entry point, so that the core need not import it.

    Raises:
        UsageError: the plugin is not installed.
        ModuleNotFoundError: a package that the plugin needs is not installed.
    """
    try:
        for point in entry_points(group=GROUP, name=name):
            return point.load()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != _PACKAGE:
            raise
    raise UsageError(
        f"the plugin {name} is not part of this installation",
        hint="reinstall with pip install --force-reinstall --no-deps trainvitals",
    )
