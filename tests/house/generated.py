"""The program that writes the generated pages, and the commands that it describes."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load_build_docs() -> ModuleType:
    """Return docs/build_docs.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "docs" / "build_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_docs = load_build_docs()
COMMANDS = {path: (command, context) for path, command, context in build_docs.commands()}
"""By its words, each command and its context."""
