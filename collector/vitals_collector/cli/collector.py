"""The collector's commands; what is heavy is imported inside them, so `vitals --help` is quick."""

from pathlib import Path
from typing import Annotated

import typer

from vitals_collector.cli import control, read, replay, store
from vitals_collector.cli.store import CapGigabytes


def register(app: typer.Typer) -> None:
    """Add `vitals collector` and the commands that look back and act."""
    app.command("collector", epilog="Example: vitals collector --folder vitals_runs")(collector)
    read.register(app)
    control.register(app)
    replay.register(app)
    store.register(app)


def collector(
    data: Annotated[
        Path | None, typer.Option(help="Its own folder [default: ~/.local/share/trainvitals].")
    ] = None,
    database: Annotated[
        str,
        typer.Option(
            help="postgresql://USER@HOST/DB [default: an SQLite file in --data].",
            envvar="VITALS_COLLECTOR_DATABASE",  # a password belongs there, not on a command line
        ),
    ] = "",
    listen: Annotated[
        str, typer.Option(help="HOST:PORT; port 0 takes a free one.")
    ] = "127.0.0.1:0",
    folder: Annotated[
        list[Path] | None, typer.Option(help="Also read run directories below it; repeatable.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name it is called by; repeatable.")
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Listen beyond this machine; asks for TLS.")
    ] = False,
    allow_plain: Annotated[
        bool, typer.Option("--allow-plain", help="Without TLS: a proxy in front ends it.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    webhook: Annotated[
        list[str] | None,
        typer.Option(
            help="Post alerts there as JSON; repeatable.", envvar="VITALS_COLLECTOR_WEBHOOK"
        ),
    ] = None,
    alertmanager: Annotated[
        str,
        typer.Option(
            help="Hand alerts to this Alertmanager.", envvar="VITALS_COLLECTOR_ALERTMANAGER"
        ),
    ] = "",
    lost_after: Annotated[
        float, typer.Option(help="Seconds of silence after which a run is lost.", min=1.0)
    ] = 60.0,
    keep_hours: Annotated[
        float, typer.Option(help="Hours until rows of ranks and hosts are thinned.", min=0.0)
    ] = 24.0,
    cap_gb: CapGigabytes = 5.0,
    keep_days: Annotated[
        float,
        typer.Option(help="Remove runs so long after their end; 0 keeps them for ever.", min=0.0),
    ] = 0.0,
) -> None:
    """Keep everything that was seen: ingest, store, alerts, commands and the query API."""
    import os

    from trainvitals.io.client import default_data_dir
    from vitals_collector.api.app import CollectorSettings, create_app
    from vitals_collector.api.auth import check_bind
    from vitals_collector.api.serve import (
        ListenSettings,
        bind,
        log_to_stderr,
        only_one,
        parse_listen,
        serve,
    )
    from vitals_collector.keeping.thinning import VolumeSettings

    host, port = parse_listen(listen)
    check_bind(host, allow_remote=allow_remote, tls=tls_cert is not None, allow_plain=allow_plain)
    where = ListenSettings(host=host, port=port, tls_cert=tls_cert, tls_key=tls_key)
    settings = CollectorSettings(
        data=(data or default_data_dir(os.environ)).expanduser().absolute(),
        database=database,
        folders=tuple(folder or ()),
        bound=host,
        hosts=tuple(allow_host or ()),
        webhooks=tuple(webhook or ()),
        alertmanager=alertmanager,
        lost_after_seconds=lost_after,
        volumes=VolumeSettings(
            keep_hours=keep_hours, max_run_bytes=round(cap_gb * 1e9), keep_days=keep_days
        ),
    )
    log_to_stderr()
    with only_one(settings.data), bind(where) as bound:
        serve(create_app(settings), bound, where, settings.data)
