"""The detectors of docs/DETECTORS.md, in the registry's order, with their examples."""

from collections.abc import Iterable

from docs.drawn import loop, nodes, posttraining, steps, waits
from docs.drawn.entry import Entry
from trainvitals.detect.registry import DETECTORS


def _in_order(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    order = list(DETECTORS)
    return tuple(sorted(entries, key=lambda entry: order.index(entry.name)))


IN_LOOP = _in_order(loop.ENTRIES)
OF_STEPS = _in_order((*steps.ENTRIES, *waits.ENTRIES))
OF_SCALARS = _in_order(posttraining.ENTRIES)
OF_NODES = _in_order(nodes.ENTRIES)
ENTRIES = (*IN_LOOP, *OF_STEPS, *OF_SCALARS, *OF_NODES)
