"""Requests of OpenTelemetry metrics, as JSON and as protobuf."""

import struct

from tests.collector.rows import RUN, START
from tests.plugins.bridges.wandb_files import field

TIME = START + 5_000_000_000


def point(value: float | int | str, *, step: int | None = None, time: int = TIME, **labels: str):
    """Return a data point."""
    made = {"timeUnixNano": str(time), "attributes": [pair(k, v) for k, v in labels.items()]}
    made["asInt" if isinstance(value, int) else "asDouble"] = (
        str(value) if isinstance(value, int) else value
    )
    if step is not None:
        made["attributes"].append({"key": "step", "value": {"intValue": str(step)}})
    return made


def pair(key: str, value: str):
    """Return an attribute."""
    return {"key": key, "value": {"stringValue": value}}


def request(*metrics, run: str = RUN, service: str = "loader"):
    """Return the request of one service of a run."""
    attributes = [pair("vitals.run_id", run), pair("service.name", service)]
    return {
        "resourceMetrics": [
            {"resource": {"attributes": attributes}, "scopeMetrics": [{"metrics": list(metrics)}]}
        ]
    }


def gauge(name: str, *points):
    """Return a gauge with these data points."""
    return {"name": name, "gauge": {"dataPoints": list(points)}}


def encoded(body) -> bytes:
    """Return the request as protobuf, by the numbers of metrics.proto."""

    def attributes(pairs, number: int) -> bytes:
        return b"".join(
            field(number, field(1, p["key"].encode()) + field(2, value(p["value"]))) for p in pairs
        )

    def value(of) -> bytes:
        if "intValue" in of:
            return field(3, int(of["intValue"]))
        return field(1, of["stringValue"].encode())

    def number_point(of) -> bytes:
        made = field(3, 0)[:-1].replace(field(3, 0)[:1], b"\x19") + struct.pack(
            "<Q", int(of["timeUnixNano"])
        )
        if "asDouble" in of:
            made += b"\x21" + struct.pack("<d", float(of["asDouble"]))
        else:
            made += b"\x31" + struct.pack("<q", int(of["asInt"]))
        return made + attributes(of["attributes"], 7)

    raw = b""
    for resource in body["resourceMetrics"]:
        metrics = b""
        for metric in resource["scopeMetrics"][0]["metrics"]:
            points = b"".join(field(1, number_point(p)) for p in metric["gauge"]["dataPoints"])
            metrics += field(2, field(1, metric["name"].encode()) + field(5, points))
        held = field(1, attributes(resource["resource"]["attributes"], 1)) + field(2, metrics)
        raw += field(1, held)
    return raw
