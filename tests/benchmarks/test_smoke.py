"""Every benchmark can be imported and is a command; the rest of their tests is nightly."""

import importlib
import pkgutil

import typer

import vitals_bench
from vitals_bench.cli import build_app


def test_every_module_can_be_imported():
    for module in pkgutil.walk_packages(vitals_bench.__path__, "vitals_bench."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                # Only a peer that is not installed, or plugins/ as a whole, may be missing.
                assert error.name is not None, module.name
                is_ours = error.name.startswith(("vitals", "train"))
                assert error.name == "vitals_plugins" or not is_ours, module.name


def test_every_benchmark_is_a_command_with_an_example():
    command = typer.main.get_command(build_app())
    assert {"guard", "parts", "detect", "query"} <= command.commands.keys()
    for each in command.commands.values():
        assert (each.epilog or "").startswith("Example: python -m vitals_bench ")
