"""`vitals deploy ...`: writes the files of a deployment, or pushes the dashboard to Grafana."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from trainvitals.alerting import RUNBOOK
from trainvitals.cli.groups import Commands, add_group
from trainvitals.errors import StorageError, UsageError
from trainvitals.io.client import CollectorTokens, read_tokens
from vitals_deploy import prometheus
from vitals_deploy.templates import (
    alertmanager_files,
    grafana_files,
    read_dashboard,
    slurm_files,
    systemd_files,
)

GENERATORS = {
    "prometheus": prometheus.prometheus_files,
    "grafana": grafana_files,
    "alertmanager": alertmanager_files,
    "systemd": systemd_files,
    "slurm": slurm_files,
}
"""Each makes its files with the default settings when called without arguments."""

Output = Annotated[Path, typer.Option(help="Directory the files are written to.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that differ.")]


def register(app: typer.Typer) -> None:
    """Add `vitals deploy` with its commands."""
    commands: Commands = {
        "prometheus": (
            deploy_prometheus,
            "vitals deploy prometheus --collector 10.0.0.5:8765 --tokens tokens.json",
        ),
        "grafana": (
            deploy_grafana,
            "vitals deploy grafana --url http://127.0.0.1:3000 --token-file FILE",
        ),
        "alertmanager": (
            deploy_alertmanager,
            "vitals deploy alertmanager --page-url https://pager.example.org/hook",
        ),
        "systemd": (deploy_systemd, "vitals deploy systemd --vitals /opt/vitals/bin/vitals"),
        "slurm": (deploy_slurm, "vitals deploy slurm --nodes 4 --gpus 8 --script x.py"),
        "all": (deploy_all, "vitals deploy all --output deploy"),
    }
    about = "Write configuration for Prometheus, Grafana, Alertmanager, systemd and Slurm."
    example = "vitals deploy prometheus --output /etc/prometheus"
    add_group(app, "deploy", commands, about=about, example=example)


def deploy_prometheus(
    output: Output = Path("vitals-deploy/prometheus"),
    collector: Annotated[str, typer.Option(help="Collector, host:port.")] = "127.0.0.1:8765",
    alertmanager: Annotated[str, typer.Option(help="Alertmanager, host:port.")] = "127.0.0.1:9093",
    runs: Annotated[
        Path | None,
        typer.Option(
            help="Scrape the agents of these run directories [default: those that ship to the "
            "collector]."
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="The collector's tokens.json: its read token and certificate are written."
        ),
    ] = None,
    public_url: Annotated[
        str, typer.Option(help="The dashboard's address: alerts link a run's page.")
    ] = "",
    runbook_url: Annotated[
        str, typer.Option(help="Where docs/RUNBOOK.md is published: alerts link its sections.")
    ] = RUNBOOK,
    force: Force = False,
) -> None:
    """Write the scrape configuration and the alert rules."""
    targets = prometheus.agent_targets(runs) if runs else None
    found = None if tokens is None else reader_tokens(tokens)
    made = prometheus.prometheus_files(
        collector=_host_and_port("--collector", collector),
        alertmanager=_host_and_port("--alertmanager", alertmanager),
        tls=None if found is None else found.tls,
        agents=targets,
        public_url=_template_free("--public-url", public_url),
        runbook_url=_template_free("--runbook-url", runbook_url),
    )
    secrets = {}
    if found is not None:
        secrets[prometheus.TOKEN_FILE] = found.read
        secrets[prometheus.AGENTS_TOKEN_FILE] = found.scrape
    _write_and_print(
        output, {name: made[name] for name in made if name not in secrets}, force=force
    )
    for name, token in secrets.items():
        typer.echo(_write_secret(output / name, token))


def _host_and_port(option: str, address: str) -> str:
    """Return the host:port of a server's URL, as a Prometheus target.

    Raises:
        UsageError: it has more than a scheme, a host and a port.
    """
    target = address.removeprefix("https://").removeprefix("http://").removesuffix("/")
    if not target or not target.isprintable() or set(target) & set("/@ {}"):
        raise UsageError(f"{option} is {address!r}; it must be host:port")
    return target


def _template_free(option: str, url: str) -> str:
    """Return a URL for Prometheus rules; it must not contain a template.

    Raises:
        UsageError: it has some.
    """
    if "{{" in url or not url.isprintable():
        raise UsageError(
            f"{option} is {url!r}; it must be an address without '{{{{'",
            hint="for example https://vitals.example.org",
        )
    return url


def deploy_grafana(
    output: Output = Path("vitals-deploy/grafana"),
    url: Annotated[str, typer.Option(help="Push to this Grafana instead of writing a file.")] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token of a Grafana service account.")
    ] = None,
    prometheus_url: Annotated[
        str, typer.Option(help="Also create a data source for this Prometheus.")
    ] = "",
    force: Force = False,
) -> None:
    """Write the dashboard to a file, or push it to a Grafana."""
    if not url:
        _write_and_print(output, grafana_files(), force=force)
        return
    if token_file is None:
        raise UsageError(
            "pushing to Grafana needs a token",
            hint="write a service account's token to a file and name it with --token-file",
        )
    from vitals_deploy.grafana import GrafanaClient

    client = GrafanaClient(url, _read_line(token_file))
    try:
        if prometheus_url:
            client.ensure_datasource(prometheus_url)
        folder = client.ensure_folder()
        typer.echo(client.push_dashboard(read_dashboard(), folder_uid=folder))
    finally:
        client.close()


def deploy_alertmanager(
    output: Output = Path("vitals-deploy/alertmanager"),
    page_url: Annotated[
        str, typer.Option(help="Webhook for alerts that a human must act on (page).")
    ] = "http://127.0.0.1:9095/page",
    notify_url: Annotated[
        str, typer.Option(help="Webhook for notices.")
    ] = "http://127.0.0.1:9095/notify",
    force: Force = False,
) -> None:
    """Write an example configuration."""
    _write_and_print(
        output, alertmanager_files(page_url=page_url, notify_url=notify_url), force=force
    )


def deploy_systemd(
    output: Output = Path("vitals-deploy/systemd"),
    vitals: Annotated[
        str, typer.Option(help="Absolute path of the vitals command.")
    ] = "/opt/vitals/bin/vitals",
    port: Annotated[int, typer.Option(min=1, max=65534, help="The collector's port.")] = 8765,
    force: Force = False,
) -> None:
    """Write hardened units for a collector and a node's agent."""
    _write_and_print(output, systemd_files(vitals=vitals, port=port), force=force)


def deploy_slurm(
    output: Output = Path("vitals-deploy/slurm"),
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 4,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of each node.")] = 8,
    cpus: Annotated[int, typer.Option(min=1, help="Cores of each node.")] = 64,
    runs: Annotated[
        str, typer.Option(help="Run directories, on a shared file system.")
    ] = "$HOME/vitals_runs",
    script: Annotated[str, typer.Option(help="Training script with its arguments.")] = "train.py",
    force: Force = False,
) -> None:
    """Write a batch script for a watched training job."""
    made = slurm_files(nodes=nodes, gpus=gpus, cpus=cpus, runs=runs, command=script)
    _write_and_print(output, made, force=force)


def deploy_all(output: Output = Path("vitals-deploy"), force: Force = False) -> None:
    """Write everything with the default settings, one directory each."""
    for name, generate in GENERATORS.items():
        _write_and_print(output / name, generate(), force=force)


def reader_tokens(path: Path) -> CollectorTokens:
    """Return the collector's tokens from their file, for scrapes by Prometheus.

    Raises:
        UsageError: it is missing, or has no token to read with.
        InsecurePathError: others may read it.
    """
    tokens = read_tokens(path)
    if not tokens.read:
        raise UsageError(
            f"{path} is not a token file with a token for 'read'",
            hint="the collector makes tokens.json in its data directory",
        )
    return tokens


def _read_line(path: Path) -> str:
    """Read the token for pushing the dashboard to Grafana from the first line of a file."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(
            f"{path} cannot be read: {error}", hint="name a text file that you may read"
        ) from error
    return text.partition("\n")[0]


def _write_and_print(directory: Path, files: dict[str, str], *, force: bool) -> None:
    for path in write_files(directory, files, force=force):
        typer.echo(path)


def _write_secret(path: Path, token: str) -> Path:
    """Write a token with which Prometheus scrapes to a private file; return its path."""
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error}", hint="choose another directory with --output"
        ) from error
    return path


# -------------------------------------------------- files, never written over what somebody changed


def write_files(directory: Path, files: Mapping[str, str], *, force: bool = False) -> list[Path]:
    """Write generated deployment files below the directory; return their paths.

    Raises:
        UsageError: a file is there with another content and `force` is false; nothing was written.
        StorageError: the directory or a file cannot be written.
    """
    texts = {
        directory / name: text
        for name, text in files.items()
        # What was put in its place stays there, whatever is written around it.
        if not text.startswith("put the ") or not (directory / name).exists()
    }
    try:
        changed = [p for p, text in texts.items() if p.exists() and p.read_text() != text]
        if changed and not force:
            raise UsageError(
                f"{changed[0]} exists and its content differs",
                hint="write to another --output, or overwrite it with --force",
            )
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(
            f"cannot write to {directory}: {error}", hint="choose another directory with --output"
        ) from error
    return list(texts)
