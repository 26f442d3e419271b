"""``/v1/sd/agents``: the agents that can be scraped, for Prometheus' ``http_sd_configs``.

Each agent sends its URL with its data. Prometheus sends the read token to every target, so a URL
that means a different machine to each reader is not shown to others: the URL of an agent on a
loopback interface is returned only to a client on this machine, for agents on this machine. A URL
that is never an agent's (link-local, metadata), or a host name that resolves to one, is never
returned.
"""

import ipaddress
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import msgspec
from fastapi import APIRouter, Depends
from sqlalchemy import Connection, Row, select
from starlette.requests import Request
from starlette.responses import Response

from trainvitals.errors import ConfigError
from trainvitals.identity import safe_node_id
from vitals_collector.alerts.notifiers import refuse_address
from vitals_collector.api.auth import json_response, require, require_unlimited_token
from vitals_collector.api.questions import openapi_responses
from vitals_collector.live.run_status import Liveness, SourceState, find_absent_parts, run_state
from vitals_collector.storage.schema import sources
from vitals_collector.storage.store import Store

SILENT_SECONDS = 900.0
"""An agent that was silent for longer is a target only if its run is known to need it."""
_DAY_SECONDS = 86_400.0

_FORWARDED = frozenset(
    ("forwarded", "via", "x-real-ip", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto")
)
"""Headers that show that a proxy sends the request for another client."""
_LOOKUPS = 16
_LOOKUP_SECONDS = 3.0
"""For the names of all agents together; Prometheus retries, and keeps its targets meanwhile."""


class AgentAddress(NamedTuple):
    """URL at which an agent can be scraped."""

    run_id: str
    node: str
    url: str


class TargetGroup(msgspec.Struct, frozen=True):
    """One target in Prometheus' format."""

    targets: tuple[str, ...]
    labels: dict[str, str]


def discovery_router(store: Store, *, liveness: Callable[[], Liveness]) -> APIRouter:
    """Return the route of Prometheus' service discovery."""
    permitted = [Depends(require("read")), Depends(require_unlimited_token)]
    router = APIRouter(tags=["metrics"], dependencies=permitted)

    @router.get("/v1/sd/agents", responses=openapi_responses(tuple[TargetGroup, ...]))
    def agents(request: Request) -> Response:
        """Return the agents of running runs, for Prometheus' ``http_sd_configs``."""
        here = safe_node_id(socket.gethostname()) if _is_local_request(request) else ""
        with store.read_transaction() as connection:
            heard = scrapable(connection, liveness())
        return json_response(target_groups(heard, this_node=here))

    return router


def _is_local_request(request: Request) -> bool:
    """Return whether a request's client is a program on this machine and not a proxy."""
    if request.client is None or not _FORWARDED.isdisjoint(request.headers):
        return False
    return _is_loopback(request.client.host)


def target_groups(agents: Iterable[AgentAddress], *, this_node: str) -> list[TargetGroup]:
    """Return each URL to scrape once: with its run, or without if an agent serves several."""
    parsed = [(agent, _parsed(agent.url)) for agent in agents]
    addresses = _addresses({parts.hostname or "" for _, parts in parsed if parts is not None})
    runs: dict[tuple[str, str], set[str]] = {}
    for agent, parts in parsed:
        if parts is None:
            continue
        host = parts.hostname or ""
        if _is_visible(host, addresses.get(host, ()), is_here=agent.node == this_node):
            runs.setdefault((parts.netloc, agent.node), set()).add(agent.run_id)
    return [
        TargetGroup((address,), {"node": node} | ({"run": min(ids)} if len(ids) == 1 else {}))
        for (address, node), ids in sorted(runs.items())
    ]


def scrapable(connection: Connection, when: Liveness) -> list[AgentAddress]:
    """Return the running runs' agents to scrape, including those that became silent recently.

    A lost agent of a running run stays a target that is down, until it is back, the run is over, or
    a day has passed.
    """
    day_ago = when.now_unix_ns - int(_DAY_SECONDS * 1e9)
    of_agents = sources.c.source.like("node:%") & (sources.c.last_received_unix_ns >= day_ago)
    query = select(*(sources.c[name] for name in ("run_id", "metrics_url", *SourceState._fields)))
    of_run: dict[str, list[Row[Any]]] = defaultdict(list)
    for row in connection.execute(
        query.where(sources.c.run_id.in_(select(sources.c.run_id).where(of_agents)))
    ):
        of_run[row.run_id].append(row)
    return [agent for rows in of_run.values() for agent in _scrapable_agents_of(rows, when)]


def _scrapable_agents_of(rows: Sequence[Row[Any]], when: Liveness) -> Iterator[AgentAddress]:
    """Yield a running run's agents that Prometheus can scrape, by its sources' latest states."""
    parts = [SourceState._make(row[2:]) for row in rows]
    if run_state(parts, when) != "running":
        return
    away = find_absent_parts(parts, when)
    away_nodes = {*away.nodes, *away.agents}
    since = when.now_unix_ns - int(SILENT_SECONDS * 1e9)
    agents = (row for row in rows if row.source.startswith("node:"))
    newest = {row.node: row for row in sorted(agents, key=lambda row: row.last_received_unix_ns)}
    for node, row in newest.items():
        if row.last_received_unix_ns >= since or node in away_nodes:
            yield AgentAddress(row.run_id, node, row.metrics_url)


def _parsed(url: str) -> SplitResult | None:
    """Return an agent's URL, parsed; None if it is invalid."""
    try:
        parts = urlsplit(url)
        has_port = parts.port is not None
    except ValueError:
        return None
    is_plain = parts.scheme == "http" and has_port and parts.netloc.isascii()
    if not is_plain or "@" in parts.netloc or parts.path not in ("", "/"):
        return None
    return parts if parts.hostname else None


def _addresses(hosts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return addresses of hosts to scrape; those that are not resolved in time are omitted."""
    with_names = ThreadPoolExecutor(_LOOKUPS)
    try:
        lookups = {host: with_names.submit(_resolve_host, host) for host in sorted(hosts)}
        done = wait(lookups.values(), _LOOKUP_SECONDS).done
        return {host: future.result() for host, future in lookups.items() if future in done}
    finally:
        with_names.shutdown(wait=False, cancel_futures=True)


def _resolve_host(host: str) -> tuple[str, ...]:
    """Return the addresses of an agent's host to scrape; none if its name is unknown."""
    try:
        every = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(str(entry[4][0]) for entry in every)


def _is_visible(host: str, addresses: Iterable[str], *, is_here: bool) -> bool:
    """Return whether service discovery may show a host's target to the client."""
    addresses = tuple(addresses)
    try:
        for address in addresses:
            refuse_address(address)
    except ConfigError:
        return False
    # A machine resolves its own name to loopback, while others resolve it to the machine.
    is_own = any(map(_is_loopback, addresses)) and host != socket.gethostname().lower()
    return bool(addresses) and (is_here or not is_own)


def _is_loopback(host: str) -> bool:
    """Return whether an address to scrape can be reached from this machine only."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
