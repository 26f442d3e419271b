"""Steps of a run as a collector merges them, from the journals of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainvitals.detect.fleet.base import MergedStep
from trainvitals.records import NamesDefined, decode_events
from trainvitals.rows import rows_of
from trainvitals.wire import Batch
from vitals_collector.live.step_join import (
    LAYER_COLUMNS,
    LayerPart,
    RowWriters,
    WriterRows,
    decode_rank_rows,
    merge_steps,
    step_columns,
)


def merge_batches(batches_by_rank: Sequence[Sequence[Batch]]) -> list[MergedStep]:
    """Return the merged steps of all ranks, with their layers; none if there are no rows.

    Args:
        batches_by_rank: batches of each rank's journal, rank 0 first.
    """
    names: dict[int, str] = {}
    for batch in (batch for batches in batches_by_rank for batch in batches):
        schema = batch.header.stream_schema
        if schema.stream == "events":
            for row in decode_events(schema, batch.rows):
                if isinstance(row.event, NamesDefined) and row.event.stream == "layers":
                    names |= {int(i): name for i, name in row.event.names.items()}
    rows: list[WriterRows] = []
    layers: list[LayerPart] = []
    for rank, batches in enumerate(batches_by_rank):
        for batch in batches:
            schema = batch.header.stream_schema
            if schema.stream not in ("steps", "layers"):
                continue
            raw = rows_of(schema, batch.rows)
            writers = (rank, len(batches_by_rank), rank)
            of = RowWriters(*(np.full(len(raw), number) for number in writers))
            if schema.stream == "steps":
                columns = step_columns(schema, is_rank0=rank == 0)
                rows.append(decode_rank_rows(schema, raw, columns, of))
            else:
                decoded = decode_rank_rows(schema, raw, ["layer", *LAYER_COLUMNS], of)
                layers.append(LayerPart(names, decoded))
    return merge_steps(rows, layers).steps if rows else []
