"""Pushes the run metrics of ``/metrics`` to a Prometheus-compatible store (remote write 1.0).

Runs in a separate thread, which reads the store as a scrape does: nothing waits for it. Samples
that were not accepted are retried in order, with growing pauses; beyond ten minutes, the oldest are
dropped and counted. A permanent refusal (4xx except 429) is not retried. The URL's address is
resolved, checked and pinned at each push, as for receivers of alerts.
"""

import asyncio
import logging
import math
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit

import httpx
from prometheus_client.registry import Collector

from trainvitals.clock import Clock
from trainvitals.errors import ConfigError, MissingDependencyError
from vitals_collector.alerts.notifiers import AsyncPinnedTransport, check_url, redacted
from vitals_collector.api.exposition import OUTCOMES
from vitals_collector.storage.store import IngestCounters
from vitals_plugins.bridges.protobuf import encode_varint

PUSH_SECONDS = 15.0
"""From one push to the next: as often as the generated configuration scrapes."""
MAX_WAITING = 40
"""Pushes that wait for the other side to come back: ten minutes."""
MAX_PAUSE_SECONDS = 120.0
MAX_REASON_BYTES = 200
_TIMEOUT_SECONDS = 10.0
_PUSH_TIMEOUT_SECONDS = 30.0
"""For a whole push: a response that arrives byte by byte must not delay all others."""
_CLOSE_SECONDS = 3.0
_HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
    "User-Agent": "vitals-collector",
}
_JOB = ("job", "vitals-collector")
_STALE = b"\x02\x00\x00\x00\x00\x00\xf0\x7f"
"""The NaN by which a series ends at once, and not after five minutes."""
_LOG = logging.getLogger("vitals.collector.remote_write")

Series = tuple[tuple[str, str], ...]
"""Name and value of each label, sorted by name."""


class RemoteWriter:
    """Collects samples periodically, and pushes the waiting ones.

    Args:
        url: destination; it may contain a user and a password.
        collector: returns the samples, as at a scrape.
        counters: gets the outcome of each push.
        clock: timestamps of samples, and retries.
        leads: whether this collector pushes: of several on one database one does.
        transport: HTTP transport; None: pinned to the address that was checked.
    """

    def __init__(
        self,
        url: str,
        collector: Collector,
        counters: IngestCounters,
        *,
        clock: Clock,
        leads: Callable[[], bool] = lambda: True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url
        self._collector = collector
        self._counters = counters
        self._clock = clock
        self._leads = leads
        self._transport = transport
        self._trusted = httpx.create_ssl_context()
        self._waiting: deque[bytes] = deque()
        self._last: set[Series] = set()
        self._num_failures = 0
        self._paused_until_ns = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._push_until_stopped, name="vitals-remote-write", daemon=True
        )
        counters.remote_writes.update(dict.fromkeys(OUTCOMES, 0))

    def start(self) -> None:
        """Start the thread that pushes samples to Prometheus."""
        self._thread.start()

    def close(self) -> None:
        """Stop the remote write; waiting samples are no longer pushed."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _push_until_stopped(self) -> None:
        """Push samples periodically by remote write; count and log an error."""
        while not self._stop.wait(PUSH_SECONDS):
            try:
                self.push_if_due()
            except Exception:  # noqa: BLE001 - counted, and retried
                self._counters.fail("remote_write")
                _LOG.exception("remote_write_failed again_in=%gs", PUSH_SECONDS)

    def push_if_due(self) -> None:
        """Collect Prometheus samples, and push the waiting ones, if it is time."""
        if not self._leads():
            self._waiting.clear()  # the leader has pushed it since
            self._last.clear()
            return
        self._collect_samples()
        while self._waiting and self._clock.monotonic_ns() >= self._paused_until_ns:
            if not self._push(self._waiting[0]):
                return
            self._waiting.popleft()

    def _collect_samples(self) -> None:
        """Collect the runs' samples for Prometheus; above a limit, drop the oldest."""
        values = dict(_iterate_run_samples(self._collector))
        unix_ms = self._clock.time_ns() // 1_000_000
        body = encode_write_request(values, ended=self._last - values.keys(), unix_ms=unix_ms)
        self._last = set(values)
        if not body:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._count("dropped")
        self._waiting.append(body)

    def _push(self, body: bytes) -> bool:
        """Push one body to the Prometheus store; False: retry later."""
        try:
            status, text = asyncio.run(self._send(compress_snappy(body)))
        except TimeoutError:
            return self._try_again(f"no whole answer within {_PUSH_TIMEOUT_SECONDS:g} s")
        except httpx.HTTPError as error:
            return self._try_again(f"{type(error).__name__}: {error}")
        except ConfigError as error:  # the name may lead elsewhere again
            return self._try_again(error.text)
        if status == 429 or status >= 500:
            return self._try_again(f"HTTP {status}")
        self._num_failures = 0
        is_taken = 200 <= status < 300
        self._count("delivered" if is_taken else "failed")
        if not is_taken:
            line = "".join(c if c.isprintable() else " " for c in text.strip())
            reason = f"status={status}: {line}"
            _LOG.warning("remote_write_refused url=%s %s", redacted(self._url), reason)
        return True

    async def _send(self, raw: bytes) -> tuple[int, str]:
        """Send one remote-write body; return the response's status and its text's start."""
        client = httpx.AsyncClient(
            timeout=_TIMEOUT_SECONDS,
            follow_redirects=False,
            transport=self._transport or AsyncPinnedTransport(verify=self._trusted),
        )
        sending = client.stream("POST", self._url, content=raw, headers=_HEADERS)
        async with asyncio.timeout(_PUSH_TIMEOUT_SECONDS), client, sending as answer:
            async for part in answer.aiter_bytes(MAX_REASON_BYTES):
                return answer.status_code, part.decode(errors="replace")
            return answer.status_code, ""

    def _try_again(self, reason: str) -> bool:
        """Schedule another push to the Prometheus store, after a growing pause."""
        self._count("retried")
        self._num_failures += 1
        if self._num_failures == 1:
            _LOG.warning("remote_write_waits url=%s: %s", redacted(self._url), reason)
        pause = min(MAX_PAUSE_SECONDS, PUSH_SECONDS * 2 ** min(self._num_failures - 1, 10))
        self._paused_until_ns = self._clock.monotonic_ns() + int(pause * 1e9)
        return False

    def _count(self, outcome: str) -> None:
        """Count a push to the Prometheus store by its outcome."""
        with self._counters.lock:
            self._counters.remote_writes[outcome] += 1


def remote_writer(
    url: str,
    collector: Collector,
    counters: IngestCounters,
    *,
    clock: Clock,
    leads: Callable[[], bool],
) -> RemoteWriter | None:
    """Return the writer that pushes to Prometheus at ``url``; None without a URL.

    Raises:
        ConfigError: the URL is invalid, or its host cannot be a server.
        MissingDependencyError: the package for snappy is not installed.
    """
    if not url:
        return None
    if not _is_http_url(url):
        raise ConfigError(
            f"the remote-write address is {redacted(url)!r}; it must be http://HOST/... or "
            "https://HOST/...",
            hint="for example http://127.0.0.1:9090/api/v1/write",
        )
    check_url(url)
    if find_spec("cramjam") is None:
        raise MissingDependencyError(
            "remote write needs the package cramjam, which is not installed",
            hint="pip install 'trainvitals[remote-write]'",
        )
    return RemoteWriter(url, collector, counters, clock=clock, leads=leads)


def _is_http_url(url: str) -> bool:
    """Return whether a remote-write URL has the scheme HTTP or HTTPS, and a host."""
    try:
        parts = urlsplit(url)
        _ = parts.port, httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _iterate_run_samples(collector: Collector) -> Iterator[tuple[Series, float]]:
    """Yield the Prometheus series that are about a run, each with its value."""
    for family in collector.collect():
        for sample in family.samples:
            if "run" in sample.labels:
                labels = {**sample.labels, "__name__": sample.name}
                shown = {name: text for name, text in labels.items() if text}
                yield tuple(sorted({**shown, _JOB[0]: _JOB[1]}.items())), sample.value


# ------------------------------------------------------------------------------------- the messages


def encode_write_request(
    values: dict[Series, float], *, ended: Iterable[Series], unix_ms: int
) -> bytes:
    """Return the remote-write request of samples and of the end of series; b"" if empty."""
    bits = [
        # The ordinary NaN: other NaN bits may mark the end of a series.
        (series, struct.pack("<d", math.nan if math.isnan(value) else value))
        for series, value in values.items()
    ]
    bits += [(series, _STALE) for series in ended]
    return b"".join(
        _encode_bytes_field(1, _encode_series(series, value, unix_ms)) for series, value in bits
    )


def compress_snappy(body: bytes) -> bytes:
    """Return a remote-write body as snappy's block format."""
    import cramjam  # of the extra remote-write

    return bytes(cramjam.snappy.compress_raw(body))


def _encode_series(series: Series, value: bytes, unix_ms: int) -> bytes:
    """Return a TimeSeries of Prometheus remote write, with one sample."""
    labels = b"".join(
        _encode_bytes_field(
            1, _encode_bytes_field(1, name.encode()) + _encode_bytes_field(2, text.encode())
        )
        for name, text in series
    )
    sample = b"\x09" + value + b"\x10" + encode_varint(unix_ms)
    return labels + _encode_bytes_field(2, sample)


def _encode_bytes_field(number: int, content: bytes) -> bytes:
    """Return a remote-write field that holds bytes (protobuf.dev, "Encoding")."""
    return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content
