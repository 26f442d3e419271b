"""One decoder that is fuzzed."""

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainvitals.errors import VitalsError

MOST_SECONDS = 30.0
"""Of CPU, for one input of some kilobytes: far above what a slow machine needs."""
MOST_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Target:
    """One decoder, or one way in."""

    name: str
    samples: Callable[[], list[bytes]]
    read: Callable[[Path, bytes], object]
    reseal: Callable[[bytes], bytes] | None = None
    """Makes checksums hold again, so that what lies behind them is reached."""
    weight: int = 20
    """Examples of the short run; fewer where one takes long."""
    is_traced: bool = True
    """Whether the memory is looked at: it makes whole commands several times as slow."""
    is_partial: bool = False
    """Whether its samples lack what a sound one has beside them, and are refused for that."""


def refused(target: Target, raw: bytes, folder: Path) -> bool:
    """Have the bytes read; fail where that raises, takes long or takes much memory."""
    folder.mkdir()
    if target.is_traced:
        tracemalloc.start()
    before, began = tracemalloc.get_traced_memory()[0], time.process_time()
    try:
        target.read(folder, raw)
    except VitalsError:
        is_refused = True
    else:
        is_refused = False
    finally:
        num_bytes = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
    assert time.process_time() - began < MOST_SECONDS
    assert num_bytes < MOST_BYTES
    return is_refused
