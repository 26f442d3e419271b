"""Whether a value is in what a server sent, in whatever form it sends numbers."""

from __future__ import annotations

import struct

from vitals_bench.query.filling import Planted


def is_sent(raw: bytes, value: float) -> bool:
    """Return whether the bytes hold the value: as text, or as a double or float in memory."""
    texts = {repr(value), f"{value:.7g}", f"{value:.6g}", f"{value:.5f}"}
    forms = [text.encode() for text in texts]
    forms += [struct.pack("<d", value), struct.pack("<f", value)]
    return any(form in raw for form in forms)


def num_hidden(raw: bytes, planted: Planted) -> int:
    """Return how many of the planted spikes are nowhere in what was sent."""
    return sum(not is_sent(raw, value) for value in planted.spikes.values())
