"""The user's function that builds the model, its loss, and the loader: ``--entry``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from trainvitals.errors import UsageError

CONTRACT = (
    "`build()` returns (model, loss_of), where loss_of(batch) gives the loss that the loop trains "
    "on, as for monitor.batches(probe=...)"
)


class EntryResult(NamedTuple):
    """Return value of the user's function."""

    model: Any
    loss_of: Callable[[Any], Any]
    loader: Any = None


def run_entry_function(entry: str) -> EntryResult:
    """Return the model, loss and loader for a replay or a landscape, from the user's function.

    Raises:
        UsageError: it cannot be imported, raises, or returns something else.
    """
    from torch import nn

    try:
        # Our command line is not the file's: argparse in it would parse ours.
        with mock.patch.object(sys, "argv", [entry.rpartition(":")[0]]):
            function = _load_function(entry)
            built = function()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{entry} raised {type(error).__name__}: {error}"
        raise UsageError(text[:500], hint=CONTRACT) from error
    parts = tuple(built) if isinstance(built, tuple | list) else (built,)
    is_right = len(parts) in (2, 3) and isinstance(parts[0], nn.Module) and callable(parts[1])
    if not is_right:
        got = ", ".join(type(part).__name__ for part in parts)
        raise UsageError(f"{entry} returned ({got})", hint=CONTRACT)
    model = parts[0]
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError(
            f"{entry} returned a model on the device meta, which holds no weights",
            hint="build it on the CPU or a GPU, or call model.to_empty(device='cpu') first: the "
            "weights come from the checkpoint",
        )
    return EntryResult(*parts)


def _load_function(entry: str) -> Callable[[], Any]:
    """Import the user's function that builds the model and loss for a replay or a landscape."""
    where, _, name = entry.rpartition(":")
    if not where or not name.isidentifier():
        raise UsageError(
            f"--entry is {entry!r}; it must be FILE:FUNCTION or MODULE:FUNCTION",
            hint="--entry train.py:build",
        )
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{where} cannot be imported: {type(error).__name__}: {error}"
        raise UsageError(
            text[:500], hint="what trains on import belongs under `if __name__ == '__main__':`"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{where} has no function {name}", hint=CONTRACT)
    return function  # type: ignore[no-any-return]


def _import_module(name: str) -> Any:
    """Import the user's module from the working directory or the path, for a replay."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"{path} is not a file", hint="--entry train.py:build, from where it is")
    sys.path.insert(0, str(path.absolute().parent))  # for imports from its own directory
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # as an import does: dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module
