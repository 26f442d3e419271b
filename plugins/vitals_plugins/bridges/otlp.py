"""Receives OpenTelemetry metrics (OTLP/HTTP) as scalars of a run, from programs outside the ranks.

Protobuf (opentelemetry-proto, metrics/v1/metrics.proto) and its JSON form, uncompressed, within the
bound of every body but batches. Gauges and sums become the run's scalars, which ``vitals show``,
charts and mirrors have as any other. The resource says which run (``vitals.run_id``); an attribute
``step`` of a point says which step, else it is the newest that the run has. What cannot be taken
is counted in the answer, as OTLP has it.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from trainvitals.catalog import SCALARS_SCHEMA
from trainvitals.clock import Clock
from trainvitals.errors import UNREADABLE, FormatError, UsageError
from trainvitals.identity import Identity, check_run_id, new_incarnation, safe_node_id
from trainvitals.printable import printable
from trainvitals.records import EVENT_SCHEMA, NamesDefined, encode_event
from trainvitals.redaction import redact_text
from trainvitals.rows import Schema, Value
from trainvitals.wire import BatchHeader, encode_batch
from vitals_collector.api.auth import OTLP_PATH, PROTOBUF, principal_of, require
from vitals_collector.api.ingest_route import IngestApp
from vitals_collector.api.questions import openapi_request_body, openapi_responses
from vitals_collector.live.run_status import GUEST
from vitals_collector.queries.ledger import run_row
from vitals_collector.queries.series import attempt_rows
from vitals_collector.storage.store import Store
from vitals_collector.storage.tokens import Principal
from vitals_plugins.bridges.protobuf import (
    decode_double,
    decode_int64,
    encode_varint,
    read_fields,
)

MAX_NAMES = 500
"""Series of one service and run: a label with a different value in each point is not a series."""
MAX_NAME = 200
MAX_SERVICES = 50
"""Services per run: each is a separate source, stored as long as the run."""
MAX_WRITERS = 1_000
_MAX_STEP = 2**53
_MAX_TIME = 2**63 - 1
_FLAG_NO_VALUE = 1


@dataclass(frozen=True, slots=True)
class Point:
    """One number that was measured."""

    run_id: str
    service: str
    name: str
    time_unix_ns: int
    value: float
    step: int | None


@dataclass(slots=True)
class OtlpPoints:
    """Content of a request."""

    points: list[Point] = field(default_factory=list)
    num_refused: int = 0
    why: str = ""

    def refuse(self, num: int, why: str) -> None:
        """Count rejected OTLP points; the first reason is reported."""
        self.num_refused += num
        self.why = self.why or why


# ------------------------------------------------------------------------------------- decoding
#
# Both forms become the same plain containers, named as in JSON.


def decode_otlp_request(body: bytes, *, is_json: bool) -> OtlpPoints:
    """Return the points of an OTLP metrics request.

    Raises:
        FormatError: the body is not a valid request.
    """
    try:
        if is_json:
            request = msgspec.json.decode(body)
        else:
            parts = _embedded_messages(memoryview(body), 1)
            request = {"resourceMetrics": [_decode_resource_metrics(part) for part in parts]}
    except UNREADABLE as error:
        raise FormatError(f"the body is not an OTLP metrics request: {error}") from error
    taken = OtlpPoints()
    for resource in _dicts_or_empty(request, "resourceMetrics"):
        attributes = _parse_attributes(_dict_or_empty(resource, "resource"))
        run_id = str(attributes.get("vitals.run_id", ""))
        service = str(attributes.get("service.name", "")) or "unknown"
        for scope in _dicts_or_empty(resource, "scopeMetrics"):
            for metric in _dicts_or_empty(scope, "metrics"):
                _collect_points(metric, run_id, service, taken)
    return taken


def _collect_points(metric: Any, run_id: str, service: str, taken: OtlpPoints) -> None:
    """Add the points of a metric in an OTLP request; count those that are invalid."""
    name = metric.get("name") if isinstance(metric, dict) else None
    if not isinstance(name, str) or not name:
        taken.refuse(1, "a metric has no name")
        return
    shown = printable(name)[:60]
    if "gauge" not in metric and "sum" not in metric:
        taken.refuse(1, f"{shown} is neither a gauge nor a sum; other kinds have no single number")
        return
    points = _dicts_or_empty(metric.get("gauge") or metric.get("sum"), "dataPoints")
    try:
        check_run_id(run_id)
    except UsageError:
        why = f"the resource attribute vitals.run_id is {printable(run_id)[:40]!r}; it must be a "
        taken.refuse(len(points), why + "run's id, such as OTEL_RESOURCE_ATTRIBUTES sets it")
        return
    for point in points:
        try:
            taken.points.append(_parse_point(point, run_id, service, name))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            taken.refuse(1, f"a point of {shown} cannot be read: {type(error).__name__}")


def _parse_point(point: Any, run_id: str, service: str, name: str) -> Point:
    """Return a data point of an OTLP request; a ValueError if it is not valid."""
    attributes = _parse_attributes(point)
    step = attributes.pop("step", None)
    if int(point.get("flags", 0)) & _FLAG_NO_VALUE:
        raise ValueError("no value was recorded")
    value = float(point["asDouble"]) if "asDouble" in point else float(int(point["asInt"]))
    time = int(point["timeUnixNano"])
    if not 0 < time <= _MAX_TIME:
        raise ValueError("the data point has no valid timestamp")
    number = None if step is None else int(str(step))
    if number is not None and not 0 <= number <= _MAX_STEP:
        raise ValueError("the data point has no valid step")
    labels = ",".join(f"{key}={value}" for key, value in sorted(attributes.items()))
    full = f"{name}{{{labels}}}" if labels else name
    return Point(run_id, service, redact_text(printable(full))[:MAX_NAME], time, value, number)


def _parse_attributes(of: Any) -> dict[str, object]:
    attributes: dict[str, object] = {}
    for pair in _dicts_or_empty(of, "attributes"):
        value = _dict_or_empty(pair, "value")
        plain = next((value[kind] for kind in _VALUE_KINDS if kind in value), None)
        if isinstance(pair.get("key"), str) and isinstance(plain, str | int | float):
            attributes[pair["key"]] = plain
    return attributes


_VALUE_KINDS = ("stringValue", "intValue", "doubleValue", "boolValue")


def _dicts_or_empty(of: Any, name: str) -> list[Any]:
    """Return a list of objects in an OTLP request; empty if it is missing."""
    parts = of.get(name) if isinstance(of, dict) else None
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _dict_or_empty(of: Any, name: str) -> dict[str, Any]:
    part = of.get(name) if isinstance(of, dict) else None
    return part if isinstance(part, dict) else {}


def _decode_resource_metrics(raw: memoryview) -> dict[str, Any]:
    """Decode a resource and its metrics in an OTLP request to their JSON form."""
    resources = _embedded_messages(raw, 1)
    return {
        "resource": {
            "attributes": [
                _decode_key_value(p) for r in resources[-1:] for p in _embedded_messages(r, 1)
            ]
        },
        "scopeMetrics": [
            {"metrics": [_decode_metric(part) for part in _embedded_messages(scope, 2)]}
            for scope in _embedded_messages(raw, 2)
        ],
    }


def _decode_metric(raw: memoryview) -> dict[str, Any]:
    """Decode a gauge or sum of an OTLP request to its JSON form."""
    metric: dict[str, Any] = {}
    for number, value in read_fields(raw):
        if number == 1 and not isinstance(value, int):
            metric["name"] = bytes(value).decode("utf-8")
        elif number in (5, 7) and not isinstance(value, int):
            points = [_number_point(part) for part in _embedded_messages(value, 1)]
            metric["gauge" if number == 5 else "sum"] = {"dataPoints": points}
    return metric


def _number_point(raw: memoryview) -> dict[str, Any]:
    """Decode a NumberDataPoint of an OTLP request to its JSON form."""
    point: dict[str, Any] = {
        "attributes": [_decode_key_value(part) for part in _embedded_messages(raw, 7)]
    }
    for number, value in read_fields(raw):
        if not isinstance(value, int):
            continue
        if number == 3:
            point["timeUnixNano"] = value
        elif number == 4:
            point["asDouble"] = decode_double(value)
        elif number == 6:
            point["asInt"] = decode_int64(value)
        elif number == 8:
            point["flags"] = value
    return point


def _decode_key_value(raw: memoryview) -> dict[str, Any]:
    """Decode an attribute of an OTLP request to its JSON form."""
    pair: dict[str, Any] = {"key": "", "value": {}}
    for number, value in read_fields(raw):
        if isinstance(value, int):
            continue
        if number == 1:
            pair["key"] = bytes(value).decode("utf-8")
        elif number == 2:
            pair["value"] = dict(_any_value(value))
    return pair


def _any_value(raw: memoryview) -> Iterator[tuple[str, object]]:
    """Decode an AnyValue of an OTLP attribute; yield its JSON name and value."""
    for number, value in read_fields(raw):
        if number == 1 and not isinstance(value, int):
            yield "stringValue", bytes(value).decode("utf-8")
        elif number == 2 and isinstance(value, int):
            yield "boolValue", bool(value)
        elif number == 3 and isinstance(value, int):
            yield "intValue", decode_int64(value)
        elif number == 4 and isinstance(value, int):
            yield "doubleValue", decode_double(value)


def _embedded_messages(raw: memoryview, number: int) -> list[memoryview]:
    """Return the embedded messages of a protobuf field, in an OTLP request."""
    return [part for n, part in read_fields(raw) if n == number and not isinstance(part, int)]


# -------------------------------------------------------------------------------------- writing


class _ServiceWriter:
    """One service of one run, as a separate source: numbers its rows and its names."""

    def __init__(self, run_id: str, service: str, now_ns: int) -> None:
        node = f"{GUEST}{safe_node_id(service)}"
        self.identity = Identity(
            run_id=run_id,
            incarnation=new_incarnation(),
            source=f"node:{node}",
            node=node,
            started_unix_ns=now_ns,
        )
        self.names: dict[str, int] = {}
        self._next_seq = {"events": 0, "scalars": 0}

    def encode_batches(
        self, points: Sequence[Point], at: tuple[int, int], now_ns: int
    ) -> list[bytes]:
        """Return the batches of these OTLP points.

        ``at`` is the run's latest attempt, and its latest step.
        """
        attempt, newest = at
        new = dict.fromkeys(point.name for point in points if point.name not in self.names)
        encoded_bodies: list[bytes] = []
        if new:
            ids = {len(self.names) + index: name for index, name in enumerate(new)}
            self.names |= {name: number for number, name in ids.items()}
            event = NamesDefined(stream="scalars", names=ids)
            rows = encode_event(
                event, step=newest, attempt=attempt, time_unix_ns=now_ns, monotonic_ns=0
            )
            encoded_bodies.append(self._encode_batch(EVENT_SCHEMA, rows))
        rows = [
            [
                newest if point.step is None else point.step,
                # With a clock that is ahead, the run would seem to report from the future.
                *(attempt, min(point.time_unix_ns, now_ns), 0),
                *(self.names[point.name], point.value),
            ]
            for point in points
        ]
        return [*encoded_bodies, self._encode_batch(SCALARS_SCHEMA, rows)]

    def _encode_batch(self, schema: Schema, rows: Sequence[Sequence[Value]]) -> bytes:
        """Return a batch of rows that come from OTLP points, with the next numbers."""
        first = self._next_seq[schema.stream]
        self._next_seq[schema.stream] = first + len(rows)
        raw = b"".join(schema.pack(first + index, row) for index, row in enumerate(rows))
        header = BatchHeader(
            identity=self.identity, stream_schema=schema, first_seq=first, num_rows=len(rows)
        )
        return encode_batch(header, raw)


class OtlpIntake:
    """Stores points as rows, by the way that all rows go.

    A writer whose rows were not stored is dropped, so that later rows do not start after a hole.
    """

    def __init__(self, store: Store, ingest: IngestApp, *, clock: Clock) -> None:
        self._store, self._ingest, self._clock = store, ingest, clock
        self._writers: dict[tuple[str, str, str], _ServiceWriter] = {}
        self._lock = asyncio.Lock()

    async def store(self, taken: OtlpPoints, principal: Principal) -> None:
        """Store the OTLP points; they are durable when this returns.

        Raises:
            UsageError: there is no such run.
            ForeignBatchError: the run is not the token's.
            StorageError: nothing was stored; send it again.
        """
        groups: dict[tuple[str, str], list[Point]] = {}
        for point in taken.points:
            groups.setdefault((point.run_id, point.service), []).append(point)
        async with self._lock:
            for (run_id, service), points in groups.items():
                key = (run_id, service, principal.token_id)
                try:
                    await self._store_group(key, points, taken, principal)
                except BaseException:
                    self._writers.pop(key, None)
                    raise

    async def _store_group(
        self,
        key: tuple[str, str, str],
        points: Sequence[Point],
        taken: OtlpPoints,
        principal: Principal,
    ) -> None:
        """Store the OTLP points of one service of a run; refuse those above the limits."""
        run_id, service, _ = key
        at = await asyncio.to_thread(self._newest, run_id)
        now_ns = self._clock.time_ns()
        if key not in self._writers:
            if sum(of_run == run_id for of_run, _, _ in self._writers) >= MAX_SERVICES:
                taken.refuse(len(points), f"the run has more than {MAX_SERVICES} services")
                return
            if len(self._writers) >= MAX_WRITERS:
                self._writers.pop(next(iter(self._writers)))
            self._writers[key] = _ServiceWriter(run_id, service, now_ns)
        writer = self._writers[key]
        accepted, series = [], set(writer.names)
        for point in points:
            if point.name not in series and len(series) >= MAX_NAMES:
                taken.refuse(1, f"{service} has more than {MAX_NAMES} series in this run")
                continue
            series.add(point.name)
            accepted.append(point)
        if accepted:
            await self._ingest.store(writer.encode_batches(accepted, at, now_ns), principal)

    def _newest(self, run_id: str) -> tuple[int, int]:
        """Return the latest attempt and step of the run that OTLP points name."""
        with self._store.read_transaction() as connection:
            run_row(connection, run_id)
            moment = self._store.snapshot_on(connection)
            rows = attempt_rows(connection, run_id)
            last = moment.numbers.last_steps(run_id)
        attempt = max((row.id for row in rows), default=0)
        return attempt, max(0, last.get(attempt, max(last.values(), default=0)))


def otlp_router(store: Store, ingest: IngestApp, *, clock: Clock) -> APIRouter:
    """Return the route that takes OpenTelemetry metrics over HTTP."""
    router = APIRouter()
    intake = OtlpIntake(store, ingest, clock=clock)

    @router.post(
        OTLP_PATH,
        tags=["ingest"],
        dependencies=[Depends(require("ingest"))],
        responses=openapi_responses(dict[str, Any]),
        openapi_extra=openapi_request_body(dict[str, Any]),
    )
    async def take_metrics(request: Request) -> Response:
        """Store OpenTelemetry metrics (OTLP/HTTP: JSON, or `application/x-protobuf`) as scalars.

        The resource attribute `vitals.run_id` names the run; gauges and sums are accepted, all
        others are counted in `partialSuccess`. A body has at most 64 KiB, uncompressed.
        """
        if request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise UsageError(
                "Content-Encoding is set; metrics are taken as they are",
                hint="set OTEL_EXPORTER_OTLP_COMPRESSION=none, or `compression: none`",
            )
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        taken = decode_otlp_request(await request.body(), is_json=kind != PROTOBUF)
        await intake.store(taken, principal_of(request))
        if kind == PROTOBUF:
            return Response(_answer(taken), media_type=PROTOBUF)
        return Response(msgspec.json.encode(_json_answer(taken)), media_type="application/json")

    return router


def _json_answer(taken: OtlpPoints) -> Mapping[str, object]:
    """Return the OTLP export response for JSON; it counts refused points."""
    if not taken.num_refused:
        return {}
    refused = {"rejectedDataPoints": str(taken.num_refused), "errorMessage": taken.why}
    return {"partialSuccess": refused}


def _answer(taken: OtlpPoints) -> bytes:
    """Return the OTLP export response as protobuf; it counts refused points."""
    if not taken.num_refused:
        return b""
    why = taken.why.encode()[:1_000]
    inner = b"\x08" + encode_varint(taken.num_refused) + b"\x12" + encode_varint(len(why)) + why
    return b"\x0a" + encode_varint(len(inner)) + inner
