"""Text that exists on every machine with Python: the sources of the standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


def standard_library_bytes(max_bytes: int) -> bytes:
    """Return the demo's text: sources of the standard library's top modules, sorted by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return bytes(text[:max_bytes])


class Windows(Dataset[Tensor]):
    """Windows of ``context + 1`` bytes; consecutive windows do not overlap."""

    def __init__(self, text: bytes, context: int) -> None:
        size = context + 1
        count = len(text) // size
        self._windows = torch.frombuffer(bytearray(text[: count * size]), dtype=torch.uint8)
        self._windows = self._windows.view(count, size)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        return self._windows[index].long()
