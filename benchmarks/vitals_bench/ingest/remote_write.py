"""Prometheus remote write 1.0: the four messages, made by protobuf's own library, and snappy's."""

from __future__ import annotations

import functools
from typing import Any

from vitals_bench.ingest.records import NAMES, RANKS_PER_NODE, Block

HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
PACKAGES = ("cramjam", "google.protobuf")
"""What encoding needs."""

# Of prompb/remote.proto and prompb/types.proto: message, field, number, type, repeated.
_FIELDS = (
    ("WriteRequest", "timeseries", 1, "TimeSeries", True),
    ("TimeSeries", "labels", 1, "Label", True),
    ("TimeSeries", "samples", 2, "Sample", True),
    ("Label", "name", 1, "string", False),
    ("Label", "value", 2, "string", False),
    ("Sample", "value", 1, "double", False),
    ("Sample", "timestamp", 2, "int64", False),
)


@functools.cache
def messages() -> dict[str, Any]:
    """Return the messages' classes by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="vitals_bench/remote.proto", package="prometheus", syntax="proto3"
    )
    by_name: dict[str, Any] = {}
    for message, field, number, kind, is_repeated in _FIELDS:
        if message not in by_name:
            by_name[message] = file.message_type.add(name=message)
        of_message = kind[0].isupper()
        by_name[message].field.add(
            name=field,
            number=number,
            label=kinds.LABEL_REPEATED if is_repeated else kinds.LABEL_OPTIONAL,
            type=kinds.TYPE_MESSAGE if of_message else getattr(kinds, f"TYPE_{kind.upper()}"),
            type_name=f".prometheus.{kind}" if of_message else None,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"prometheus.{name}"))
        for name in by_name
    }


def encode(config: str, rank: int, block: Block) -> bytes:
    """Return the ranks' records, of which the first is ``rank``, as one compressed request.

    Labels are in the order of their names, and the samples of a series in the order of time: a
    receiver refuses anything else.
    """
    import cramjam

    request = messages()["WriteRequest"]()
    times = (block.time_unix_ns // 1_000_000).tolist()
    for i in range(len(block.values)):
        labels = {
            "config": config,
            "node": f"node-{(rank + i) // RANKS_PER_NODE}",
            "rank": str(rank + i),
        }
        for j, name in enumerate(NAMES):
            series = request.timeseries.add()
            for label, text in {"__name__": f"bench_{name}", **labels}.items():
                series.labels.add(name=label, value=text)
            for value, time_ms in zip(block.values[i, :, j].tolist(), times, strict=True):
                series.samples.add(value=value, timestamp=time_ms)
    return bytes(cramjam.snappy.compress_raw(request.SerializeToString()))
