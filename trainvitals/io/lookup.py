"""Resolves what a user typed: a collector and its tokens, a directory, a run."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from trainvitals.errors import UsageError
from trainvitals.io.client import (
    CollectorAddress,
    CollectorTokens,
    collector_on,
    discover_collector,
    first_responding_url,
    open_collector_client,
    read_collector_file,
    read_tokens,
)
from trainvitals.io.setting_paths import collector_folder, default_data_dir

DEFAULT_DIR = "vitals_runs"


def find_collector(url: str = "", token_file: Path | None = None) -> CollectorAddress | None:
    """Return the collector at ``url``, otherwise the one that is found, with its tokens.

    The search covers the collector in the environment, and this user's own if it responds. ``url``,
    and the environment, may name its data directory.
    """
    collector = known_collector(url, token_file)
    # A named collector must respond or fail; a file may be left over from a crash.
    if collector is None or url or os.environ.get("VITALS_COLLECTOR_URL"):
        return collector
    with open_collector_client(collector, "") as client:
        return collector if client.answers() else None


def known_collector(named: str, token_file: Path | None = None) -> CollectorAddress | None:
    """Read from files how to reach the named collector, or this user's own; send no request.

    Raises:
        UsageError: a directory was named, and no collector runs on it.
    """
    file = token_file or os.environ.get("VITALS_TOKEN_FILE") or ""
    folder = collector_folder(named or os.environ.get("VITALS_COLLECTOR_URL", ""))
    if folder is not None:
        collector = collector_on(folder, file)
        if collector is None:
            raise UsageError(
                f"{'--collector' if named else 'VITALS_COLLECTOR_URL'} is {folder}, and no "
                "collector runs on that folder",
                hint="give the folder passed to `vitals collector --data`, or the collector's "
                "address",
            )
        return collector
    if not named:
        collector = discover_collector(os.environ)
        if collector is None or not token_file:
            return collector
        return CollectorAddress(url=collector.url, tokens=read_tokens(token_file))
    tokens = read_tokens(file) if file else CollectorTokens()
    url = first_responding_url(named, tokens.tls).rstrip("/")
    return CollectorAddress(url=url, tokens=tokens if file else _own_tokens(url))


def _own_tokens(url: str) -> CollectorTokens:
    """Read the tokens of this user's own collector from its file, if that is its URL."""
    data_dir = default_data_dir(os.environ)
    file = read_collector_file(data_dir)
    if file is None or file.url != url:
        return CollectorTokens()
    collector = collector_on(data_dir)
    return collector.tokens if collector is not None else CollectorTokens()


def default_runs_directory() -> Path:
    """Return the directory on disk that holds run directories by default.

    Raises:
        UsageError: it is not there.
    """
    folder = Path(os.environ.get("VITALS_DIR") or DEFAULT_DIR)
    if not folder.is_dir():
        raise UsageError(
            f"no collector answers, and there is no folder {folder}",
            hint="start `vitals collector`, or give a folder with run directories",
        )
    return folder


class NamedRun(Protocol):
    """Fields by which users name a run."""

    @property
    def run_id(self) -> str:
        """Return the id by which a user may name a run or its directory."""
        ...

    @property
    def name(self) -> str:
        """Return the name by which a user may look up a run, or ""."""
        ...


R = TypeVar("R", bound=NamedRun)


def choose_run(runs: Sequence[R], id_or_name: str) -> R:
    """Look up the run that a user typed: an id, its prefix, or a name; "" is the latest.

    Args:
        runs: the latest first.
        id_or_name: typed by the user.

    Raises:
        UsageError: there is none, or the prefix matches several.
    """
    if not runs:
        raise UsageError("there are no runs yet", hint="`vitals demo` trains one")
    if not id_or_name:
        return runs[0]
    by_name = [run for run in runs if id_or_name == run.name]
    by_id = [run for run in runs if run.run_id.startswith(id_or_name.upper())]
    if len(by_id) > 1:
        raise UsageError(
            f"{id_or_name!r} matches {len(by_id)} runs: "
            f"{', '.join(run.run_id for run in by_id[:3])}",
            hint="give more characters of the id",
        )
    for matching in (by_id, by_name):  # of several runs with one name, the latest
        if matching:
            return matching[0]
    raise UsageError(
        f"there is no run {id_or_name!r}", hint="`vitals runs` lists ids and names", code="V101"
    )
