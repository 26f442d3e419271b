"""Reads one column of all layers at once: layers have no summaries, so their rows are decoded."""

from collections.abc import Sequence

import numpy as np
from sqlalchemy import Connection, select

from vitals_collector.queries.blocks import KEYS, Block, find_parts, read_blocks
from vitals_collector.queries.loading import Selection
from vitals_collector.queries.series import AttemptRow, Floats, Ints, Mask, Points, join, stitch
from vitals_collector.storage.schema import names

RATIO = "update_ratio"


def load(
    connection: Connection, wanted: Selection, attempts: Sequence[AttemptRow]
) -> dict[str, Points]:
    """Return each layer's curve over the lineage, in the order of the model's own numbering."""
    low, high = wanted.from_step, wanted.to_step
    parts = find_parts(connection, wanted.run_id, "layers", from_step=low, to_step=high)
    columns = ["update_norm", "weight_norm"] if wanted.column == RATIO else [wanted.column]
    named = layer_names(connection, wanted.run_id)
    found: dict[str, list[Points]] = {}
    for block in read_blocks(
        connection, parts, [*KEYS, "layer", *columns], from_step=low, to_step=high
    ):
        value, is_there = value_of(block, columns)
        points = Points(
            block.whole("step"), block.whole("attempt"), block.whole("time_unix_ns"), value
        )
        layer = block.whole("layer")
        for number, which in _by_layer(layer, is_there):
            name = named.get((block.incarnation, number), f"layer {number}")
            found.setdefault(name, []).append(points.take(which))
    return {name: stitch(join(some), attempts, "lineage") for name, some in found.items()}


def value_of(block: Block, columns: Sequence[str]) -> tuple[Floats, Mask]:
    """Return a block's values, of two columns their ratio, and which rows have one."""
    masks = [block.column(name).valid for name in columns]
    is_there = np.ones(len(block), dtype=bool)
    for mask in masks:
        is_there &= True if mask is None else mask
    value = block.numbers(columns[0])
    if len(columns) > 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            value = value / block.numbers(columns[1])
    return value, is_there


def layer_names(connection: Connection, run_id: str) -> dict[tuple[str, int], str]:
    """Return the name of each incarnation's numbers."""
    table = names.c
    query = select(table.incarnation, table.id, table.name).where(
        table.run_id == run_id, table.stream == "layers"
    )
    return {(incarnation, number): name for incarnation, number, name in connection.execute(query)}


def _by_layer(layer: Ints, is_there: Mask) -> list[tuple[int, Ints]]:
    """Return each layer's rows that have a value, the lowest number first."""
    which = np.flatnonzero(is_there)
    order = which[np.argsort(layer[which], kind="stable")]
    ordered = layer[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    ends = np.append(begins[1:], len(order))
    return [(int(ordered[b]), order[b:e]) for b, e in zip(begins, ends, strict=False) if e > b]


__all__ = ["RATIO", "layer_names", "load", "value_of"]
