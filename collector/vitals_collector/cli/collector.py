"""The collector's commands; they import heavy packages inside, so `vitals --help` is fast."""

import gc
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainvitals.cli.groups import Commands, add_commands
from trainvitals.errors import UsageError
from vitals_collector.cli import control, store, token
from vitals_collector.cli.export import export
from vitals_collector.cli.forecast import show_forecast
from vitals_collector.cli.goodput import show_goodput
from vitals_collector.cli.postmortem import postmortem
from vitals_collector.cli.query import query
from vitals_collector.cli.read import list_runs, tail, why
from vitals_collector.cli.replay import replay
from vitals_collector.cli.show import show
from vitals_collector.cli.sql import sql
from vitals_collector.cli.store import CapGigabytes, Data, LostAfter, data_dir

if TYPE_CHECKING:
    from vitals_collector.api.app import CollectorSettings
    from vitals_collector.api.serve import ListenSettings

Database = Annotated[
    str,
    typer.Option(
        help="postgresql://USER@HOST/DB for all but the rows' files [default: SQLite in --data].",
        envvar="VITALS_COLLECTOR_DATABASE",  # a password belongs there, not on a command line
    ),
]
Lake = Annotated[
    str,
    typer.Option(
        help="Folder or s3://BUCKET/PREFIX of the rows, one for all collectors on a database "
        "[default: lake in --data].",
        envvar="VITALS_DATA",
    ),
]
Listen = Annotated[str, typer.Option(help="HOST:PORT; port 0 picks a free port.")]
Folders = Annotated[
    list[Path] | None,
    typer.Option(help="Also read the run directories in this folder; repeatable."),
]
AllowHosts = Annotated[
    list[str] | None, typer.Option(help="Another host name that clients use for it; repeatable.")
]
AllowRemote = Annotated[bool, typer.Option("--allow-remote", help="Listen beyond this machine.")]
AllowPlain = Annotated[
    bool,
    typer.Option(
        "--allow-plain",
        help="Plain HTTP at --listen: only where a proxy in front terminates TLS.",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        help="TLS certificate, PEM [default: one made at the first start, in --data]. Clients "
        "trust exactly the one in tokens.json.",
        exists=True,
        dir_okay=False,
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(
        help="Private key of --tls-cert, PEM [default: in the same file].",
        exists=True,
        dir_okay=False,
    ),
]
TlsCa = Annotated[
    str,
    typer.Option(
        help="PEM file of the CA that signed --tls-cert: clients trust what it signs for the host "
        "name. `system`: they trust the CAs of their machine."
    ),
]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(
        help="PEM file of CAs: clients must present a certificate of one of them (mutual TLS).",
        exists=True,
        dir_okay=False,
    ),
]
Receivers = Annotated[
    Path | None,
    typer.Option(
        help="TOML file of addresses, of receivers of alerts and for remote write; readable by its "
        "owner only (docs/guides/alerts.md).",
        envvar="VITALS_COLLECTOR_RECEIVERS",
    ),
]
GoneOptions = Annotated[
    list[str] | None,
    typer.Option("--webhook", "--alertmanager", "--remote-write", hidden=True),
]
KeepHours = Annotated[
    float,
    typer.Option(help="Hours before the rows of ranks and hosts are rolled up.", min=0.0),
]
KeepDays = Annotated[
    float,
    typer.Option(help="Days after its end when a run is removed; 0 keeps runs forever.", min=0.0),
]
GpuHourPrice = Annotated[
    float,
    typer.Option(
        help="Price of one GPU-hour: incidents also show the cost of lost work; 0: no price.",
        envvar="VITALS_GPU_HOUR_PRICE",
        min=0.0,
    ),
]


COMMANDS: Commands = {
    "show": (show, "vitals show my-run --metric steps.loss --format csv"),
    "goodput": (show_goodput, "vitals goodput my-run"),
    "forecast": (show_forecast, "vitals forecast my-run --total-steps 100000"),
    "query": (
        query,
        'vitals query steps my-run --where "loss > 3" --columns step,attempt,loss',
    ),
    "export": (
        export,
        "vitals export my-run --stream ranks --format csv --output ranks.csv",
    ),
    "postmortem": (postmortem, "vitals postmortem my-run --html incident.html"),
    "runs": (list_runs, "vitals runs --format csv"),
    "why": (why, "vitals why my-run 31219"),
    "tail": (tail, "vitals tail my-run --follow"),
    "command": (
        control.command,
        'vitals command my-run rollback --reason "bad data since 9:00"\n\n'
        'Example: vitals command my-run lr x0.5 --reason "loss is noisy"\n\n'
        'Example: vitals command my-run accept 4200 --reason "a new task begins there"',
    ),
    "stacks": (control.stacks, "vitals stacks my-run"),
    "replay": (replay, "vitals replay trainer_state.json --plot seen.svg"),
    "sql": (sql, 'vitals sql "SELECT run_id, max(loss) FROM steps GROUP BY run_id"'),
}


def register(app: typer.Typer) -> None:
    """Add `vitals collector` and the commands that read runs and act on them."""
    add_commands(app, {"collector": (collector, "vitals collector --folder vitals_runs")})
    add_commands(app, COMMANDS)
    for group in (control, store, token):
        group.register(app)


def collector(
    data: Data = None,
    database: Database = "",
    lake: Lake = "",
    listen: Listen = "127.0.0.1:0",
    folder: Folders = None,
    allow_host: AllowHosts = None,
    allow_remote: AllowRemote = False,
    allow_plain: AllowPlain = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = "",
    tls_client_ca: TlsClientCa = None,
    receivers: Receivers = None,
    gone_options: GoneOptions = None,
    lost_after: LostAfter = 60.0,
    keep_hours: KeepHours = 24.0,
    cap_gb: CapGigabytes = 5.0,
    keep_days: KeepDays = 0.0,
    gpu_hour_price: GpuHourPrice = 0.0,
) -> None:
    """Run the server: ingest, storage, alerts, commands, API.

    URLs that may contain secrets come from the file of --receivers and from the environment:
    VITALS_COLLECTOR_WEBHOOK (alerts as JSON; several are space-separated),
    VITALS_COLLECTOR_ALERTMANAGER (the only receiver then) and VITALS_REMOTE_WRITE (run metrics, to
    a Prometheus-compatible store).
    """
    from vitals_collector.alerts.receivers import load_notifier_settings
    from vitals_collector.api.app import CollectorSettings
    from vitals_collector.api.auth import check_bind
    from vitals_collector.api.serve import ListenSettings, parse_listen
    from vitals_collector.retention.settings import VolumeSettings

    if gone_options:
        raise UsageError(
            "--webhook, --alertmanager and --remote-write are gone: an address may hold a secret, "
            "and every user of this machine can read a command line",
            hint="set VITALS_COLLECTOR_WEBHOOK, VITALS_COLLECTOR_ALERTMANAGER or "
            "VITALS_REMOTE_WRITE, or write the address into the file of --receivers "
            "(docs/guides/alerts.md)",
        )
    host, port = parse_listen(listen)
    check_bind(host, allow_remote=allow_remote)
    _check_tls(allow_plain, tls_cert, tls_key, tls_ca, tls_client_ca)
    where = ListenSettings(
        host=host, port=port, tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca
    )
    cap = round(cap_gb * 1e9)
    notifiers = load_notifier_settings(receivers)
    settings = CollectorSettings(
        data=data_dir(data),
        database=database,
        lake=lake,
        folders=tuple(folder or ()),
        bound=host,
        hosts=tuple(allow_host or ()),
        notifiers=notifiers,
        lost_after_seconds=lost_after,
        volumes=VolumeSettings(keep_hours=keep_hours, max_run_bytes=cap, keep_days=keep_days),
        gpu_hour_price=gpu_hour_price,
    )
    _serve(settings, where, tls_ca=tls_ca, plain=allow_plain)


def _check_tls(plain: bool, cert: Path | None, key: Path | None, ca: str, client: object) -> None:
    """Refuse options of `vitals collector` for TLS that contradict each other."""
    if plain and (cert or key or ca or client):
        raise UsageError(
            "--allow-plain is given together with options of TLS",
            hint="leave out --allow-plain; it is for a proxy in front that terminates TLS",
        )
    if (key or ca) and not cert:
        raise UsageError(
            f"--tls-{'key' if key else 'ca'} is given without --tls-cert",
            hint="add --tls-cert; without any of them the collector makes its own certificate",
        )


def _serve(
    settings: "CollectorSettings", where: "ListenSettings", *, tls_ca: str, plain: bool
) -> None:
    """Run `vitals collector` until stopped, as the only one on its data directory."""
    from dataclasses import replace

    from vitals_collector.api.app import TOKENS_FILE, create_app
    from vitals_collector.api.certificate import load_or_create_certificate, write_client_trust
    from vitals_collector.api.serve import bind, lock_data_dir, log_to_stderr, serve, url_of

    log_to_stderr()
    sys.meta_path.insert(0, _BlockedImports())
    with lock_data_dir(settings.data) as data_lock, bind(where) as bound:
        if not plain:
            where = replace(
                where, tls_cert=where.tls_cert or load_or_create_certificate(settings.data)
            )
        settings = replace(settings, url=url_of(bound, where, of_this_machine=True))
        app = create_app(settings, host_port=data_lock)
        if where.tls_cert is not None:
            write_client_trust(settings.data / TOKENS_FILE, where.tls_cert, ca=tls_ca)
        # A commit creates thousands of short-lived objects and hardly any cycle. With Python's
        # default, the search for cycles among them, and among all imported objects, takes a third
        # of a commit's time. The threshold exceeds the live objects of a commit of 4,096 ranks.
        gc.collect()
        gc.freeze()
        gc.set_threshold(200_000, 10, 10)
        serve(app, bound, where, settings.data)


class _BlockedImports(MetaPathFinder):
    """Prevents libraries from importing installed modules that this process never uses.

    pyarrow imports pandas to check whether a list is a series, and DuckDB imports pyarrow.dataset
    to read a table in memory; both work without. They take 43 MB of an idle collector, and 0.4 ms
    of CPU of each insert.
    """

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        """Raise ImportError if `vitals collector` never uses the module; leave the rest."""
        if name in ("pandas", "pyarrow.dataset"):
            raise ModuleNotFoundError(f"{name} is not imported in a collector", name=name)
