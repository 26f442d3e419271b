"""Commands that act: `vitals command` and `vitals alerts`."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trainvitals import views
from trainvitals.cli.groups import Commands, add_group
from trainvitals.cli.options import Dir, Form
from trainvitals.cli.output import Format, format_time, write_json, write_rows, write_table
from trainvitals.errors import UsageError
from trainvitals.io.client import CollectorClient, open_collector_client
from trainvitals.io.control_key import control_folder
from trainvitals.io.lookup import known_collector
from trainvitals.records import CommandAction
from vitals_collector.cli.opening import CollectorOptions, as_folder, choose_run
from vitals_collector.cli.replay import find_vitals_dir
from vitals_collector.cli.store import user
from vitals_collector.queries.open import Reader, find_run, open_folder, open_reader
from vitals_collector.queries.stacks import grouped_stacks_text

Run = Annotated[str, typer.Argument(help="Run id or its beginning, name, or the run's folder.")]
By = Annotated[str, typer.Option("--by", help="Your name [default: this user].")]
Which = Annotated[
    str,
    typer.Argument(
        metavar="ALERT", help="Its fingerprint, or its name (of your own alerts the name you gave)."
    ),
]
Matchers = Annotated[
    list[str] | None,
    typer.Option(
        help="FIELD=VALUE or FIELD=~PATTERN, where FIELD is name, run, severity or a label; "
        "repeatable, all must fit."
    ),
]
OfRun = Annotated[
    str, typer.Option("--run", help="The run, if several runs have an alert of this name.")
]


Action = Literal[
    "halt", "rollback", "skip", "lr", "checkpoint", "pause", "resume", "profile", "approve", "veto",
    "accept", "list",
]  # fmt: skip
_NEED_A_REASON = ("halt", "rollback", "skip", "lr", "accept", "veto")
_ANSWERED = ("done", "refused", "expired", "invalid")
_LOOK_SECONDS = 0.25


def register(app: typer.Typer) -> None:
    """Add the ``vitals alerts`` commands."""
    commands: Commands = {
        "list": (list_alerts, "vitals alerts list --state firing"),
        "ack": (ack, "vitals alerts ack 3f2a9c0d11e4b877"),
        "silence": (
            silence,
            'vitals alerts silence "reward hacked" --hours 2 --reason "known"',
        ),
        "silences": (list_silences, "vitals alerts silences"),
        "unsilence": (unsilence, "vitals alerts unsilence 3"),
        "test": (send_test_messages, "vitals alerts test --receivers receivers.toml"),
    }
    about = "List, acknowledge or silence alerts; test the receivers."
    example = "vitals alerts list --state firing"
    alerts = add_group(app, "alerts", commands, about=about, example=example)
    alerts.callback(invoke_without_command=True, no_args_is_help=False)(_list_by_default)


# -------------------------------------------------------------------------------------- command


def command(
    *,
    run: Run,
    action: Annotated[Action, typer.Argument(help="The command; list shows earlier ones.")],
    value: Annotated[
        str,
        typer.Argument(
            help="For skip: number of updates; for lr: the learning rate, or xFACTOR of the "
            "schedule's (x1 returns to the schedule); for accept: the healthy step; for approve "
            "and veto: the number of the decision, if it is not the pending one."
        ),
    ] = "",
    reason: Annotated[str, typer.Option(help="Reason, recorded in the run.")] = "",
    checkpoint: Annotated[
        str, typer.Option(help="Checkpoint to roll back to [default: the latest healthy one].")
    ] = "",
    steps: Annotated[int, typer.Option(help="For profile: number of steps, at most 100.")] = 10,
    rank: Annotated[
        int,
        typer.Option(help="For profile: the rank [default: the slowest and a typical one]."),
    ] = -1,
    ttl: Annotated[float, typer.Option(help="Seconds until the command expires.")] = 60.0,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for the run's response, through a collector.")
    ] = 15.0,
    folder: Dir = None,
    server: CollectorOptions,
    form: Form = Format.TABLE,
) -> None:
    """Command a run: halt, roll back, pause, skip updates, change the rate, save, profile.

    Prints the response of the run's escalation policy, and exits 1 if it refuses. A command takes
    effect at one step on all ranks, at most once. `accept STEP` declares an outlier, a rise or a
    damaged state at that step healthy, now and later.
    """
    folder, run = as_folder(run, folder)
    if folder is None and action != "list":
        folder = _default_folder(server)
    if action == "list":
        with _control_client(server, needs="read") as client:
            command_views = client.ask(views.CommandsQuestion(run_id=find_run(client, run).run_id))
        _write_commands(command_views, form)
        return
    if action == "profile" and not value:
        value = str(steps)
    request = build_request(
        action,
        value,
        reason=reason or ("" if action in _NEED_A_REASON else f"asked for by {user()}"),
        checkpoint=checkpoint,
        ttl=ttl,
        rank=rank,
    )
    view = send_request(run, request, issued_by=user(), folder=folder, server=server, wait=wait)
    show_response(view, form)


def build_request(
    action: CommandAction,
    value: str,
    *,
    reason: str,
    checkpoint: str = "",
    ttl: float = 60.0,
    rank: int = -1,
) -> views.CommandRequest:
    """Return the request for the words of a `vitals command`.

    Raises:
        UsageError: no run can carry it out.
    """
    by_factor = action == "lr" and value.startswith("x")
    request = views.CommandRequest(
        action="lr_factor" if by_factor else action,
        reason=reason,
        checkpoint_id=checkpoint,
        argument=_number(value.removeprefix("x") if by_factor else value, action),
        ttl_seconds=ttl,
        rank=rank,
    )
    request.check()
    return request


def send_request(
    run: str,
    request: views.CommandRequest,
    *,
    issued_by: str,
    folder: Path | None,
    server: CollectorOptions,
    wait: float,
) -> views.CommandView:
    """Sign a command and send it, or write it to the run directory; return its state.

    Raises:
        VitalsError: the run does not exist or has ended, or the command cannot be signed or sent.
    """
    if folder is not None:
        return _write_signed_command(folder, run, request, issued_by)
    keys = control_folder(os.environ, server.token_file, server.collector)
    with _control_client(server, needs="control") as client:
        summary = find_run(client, run)
        _check_open(summary)
        _check_rank(request.rank, summary.world_size)
        view = client.send_command(summary.run_id, request, issued_by=issued_by, keys=keys)
        return _answer(client, view, wait)


def show_response(view: views.CommandView, form: Format) -> None:
    """Print the response to a command that was sent; exit 1 if the run does not execute it."""
    _write_commands((view,), form)
    if view.status in ("refused", "expired", "invalid"):
        raise typer.Exit(1)


def stacks(
    *,
    run: Run,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the ranks.", min=1.0)] = 15.0,
    folder: Dir = None,
    server: CollectorOptions,
    form: Form = Format.TABLE,
) -> None:
    """Show the stack of each rank of a running job, even if it hangs.

    Ranks at the same place are shown together, the smallest group first. Ranks that do not respond
    are listed. Requires the same rights as `vitals command`, and does not stop the training. Other
    formats contain the stacks of all threads.
    """
    folder, run = as_folder(run, folder)
    folder = folder or _default_folder(server)
    request = views.CommandRequest(
        action="stacks", reason=f"asked for by {user()}", ttl_seconds=wait
    )
    if folder is not None:
        sent = _write_signed_command(folder, run, request, user())

        def look() -> tuple[tuple[views.StacksView, ...], int]:
            with open_reader(folder) as opened:
                return _stacks(opened.reader, sent)

        stacks_of_ranks, world_size = _wait_for_stacks(look, wait, pause=1.0)
    else:
        keys = control_folder(os.environ, server.token_file, server.collector)
        with _control_client(server, needs="control") as client:
            summary = find_run(client, run)
            _check_open(summary)
            sent = client.send_command(summary.run_id, request, issued_by=user(), keys=keys)
            stacks_of_ranks, world_size = _wait_for_stacks(
                lambda: _stacks(client, sent), wait, pause=_LOOK_SECONDS
            )
    if form is Format.JSON:
        write_json(stacks_of_ranks)
    elif form is Format.CSV:
        header = ("rank", "step", "stacks", "collectives", "detail")
        rows = [
            (v.rank, v.step, v.stacks, "; ".join(v.collectives), v.detail) for v in stacks_of_ranks
        ]
        write_rows(header, rows, Format.CSV)
    else:
        typer.echo(grouped_stacks_text(stacks_of_ranks, world_size))
    if not any(view.stacks for view in stacks_of_ranks):
        raise typer.Exit(1)


def _stacks(reader: Reader, sent: views.CommandView) -> tuple[tuple[views.StacksView, ...], int]:
    """Return the stacks for ``vitals stacks`` so far, and the number of ranks."""
    run_id, number = sent.command.run_id, sent.command.number
    latest = reader.ask(views.StacksQuestion(run_id=run_id))
    world_size = reader.ask(views.RunQuestion(run_id=run_id)).summary.world_size
    return tuple(view for view in latest if view.command_number == number), world_size


def _wait_for_stacks(
    look: Callable[[], tuple[tuple[views.StacksView, ...], int]], wait: float, *, pause: float
) -> tuple[tuple[views.StacksView, ...], int]:
    """Poll for ``vitals stacks`` until all ranks' stacks have come, at most ``wait`` seconds."""
    give_up = time.monotonic() + wait
    while True:
        answers, world_size = look()
        if len({view.rank for view in answers}) >= world_size or time.monotonic() >= give_up:
            return answers, world_size
        time.sleep(pause)


def _number(value: str, action: str) -> float | None:
    """Return VALUE of ``vitals command`` as a number; None without one."""
    try:
        return float(value) if value else None
    except ValueError:
        raise UsageError(
            f"{action} is given {value!r}; it must be a number",
            hint="vitals command RUN skip 20 | lr 1e-4 | lr x0.5 | accept 4200",
        ) from None


def _answer(client: CollectorClient, sent: views.CommandView, wait: float) -> views.CommandView:
    """Return a `vitals command`'s state once it is final, or after ``wait`` seconds."""
    give_up = time.monotonic() + wait
    view = sent
    while view.status not in _ANSWERED and time.monotonic() < give_up:
        time.sleep(_LOOK_SECONDS)
        for listed in client.ask(views.CommandsQuestion(run_id=sent.command.run_id)):
            if listed.command.number == sent.command.number:
                view = listed
    return view


def _write_signed_command(
    folder: Path, run: str, request: views.CommandRequest, issued_by: str
) -> views.CommandView:
    """Sign a `vitals command` with the run's key; write it to its directory, for a local agent."""
    from trainvitals.io.mailbox import sign_command
    from trainvitals.io.rundir import RunDir

    with open_reader(folder) as opened:
        summary = choose_run(opened, run)
        check_run_takes(opened.reader, summary, request)
    path = folder.absolute()
    run_dir = RunDir.open(path if path.name == summary.run_id else path / summary.run_id)
    unsigned = request.command(summary.run_id, issued_by=issued_by, now_unix_ns=time.time_ns())
    signed = sign_command(unsigned, run_dir.command_key())
    run_dir.put_command(signed)
    return views.CommandView(command=signed, status="pending")


def check_run_takes(reader: Reader, run: views.RunSummary, request: views.CommandRequest) -> None:
    """Refuse a command that does not fit the current state of the run.

    Raises:
        UsageError: the run has ended, or has no such rank, healthy checkpoint or step.
    """
    from vitals_collector.alerts.commands import check_accepted_step, check_checkpoint

    _check_open(run)
    _check_rank(request.rank, run.world_size)
    announced = reader.ask(views.CheckpointsQuestion(run_id=run.run_id))
    check_checkpoint(request.checkpoint_id, [(c.checkpoint_id, c.state) for c in announced])
    check_accepted_step(request, run.last_step)


def _check_open(run: views.RunSummary) -> None:
    """Refuse `vitals command` for a run that has ended; one without rows may return."""
    if run.state not in ("running", "lost"):
        raise UsageError(
            f"run {run.run_id} is {run.state}, so it cannot take a command",
            hint=f"`vitals show {run.run_id}` says how it ended",
        )


def _check_rank(rank: int, world_size: int) -> None:
    """Refuse ``vitals command`` for a rank that the run does not have."""
    if rank >= world_size:
        raise UsageError(f"--rank is {rank}; the run has ranks 0 to {world_size - 1}")


def _write_commands(listed: tuple[views.CommandView, ...], form: Format) -> None:
    """Print a table of the commands to a run, or their JSON."""
    rows = [
        (
            v.command.number,
            views.CommandRequest.from_command(v.command).text,
            v.status,
            v.step if v.step >= 0 else None,
            v.command.reason,
            v.detail,
            format_time(v.command.expires_unix_ns),
        )
        for v in listed
    ]
    header = ("number", "action", "status", "step", "reason", "answer", "expires")
    write_table(header, rows, form, body=listed)


# --------------------------------------------------------------------------------------- alerts


def _list_by_default(context: typer.Context) -> None:
    """List the alerts if ``vitals alerts`` is called without a command."""
    if context.invoked_subcommand is None:
        list_alerts(server=CollectorOptions())


def list_alerts(
    *,
    run: Annotated[str, typer.Option(help="Only alerts of this run.")] = "",
    state: Annotated[str, typer.Option(help="pending, firing or resolved.")] = "",
    folder: Dir = None,
    server: CollectorOptions,
    form: Form = Format.TABLE,
) -> None:
    """List alerts, latest first."""
    if state not in ("", "pending", "firing", "resolved"):
        raise UsageError(f"--state is {state!r}; it must be pending, firing or resolved")
    folder = folder or _default_folder(server)
    if folder is not None:
        with open_folder(folder) as opened:
            alert_views = _alerts_of(opened.reader, run, state)
    else:
        with _control_client(server, needs="read") as client:
            alert_views = _alerts_of(client, run, state)
    _write_alerts(alert_views, form)


def _alerts_of(reader: Reader, run: str, state: Any) -> tuple[views.AlertView, ...]:
    """Return the alerts of all runs for ``vitals alerts``, or of one run, in a state."""
    run_id = find_run(reader, run).run_id if run else ""
    return reader.ask(views.AlertsQuestion(run_id=run_id, state=state))


def ack(
    *,
    alert: Which,
    by: By = "",
    run: OfRun = "",
    reason: Annotated[str, typer.Option(help="What you are doing about it.")] = "",
    server: CollectorOptions,
    form: Form = Format.TABLE,
) -> None:
    """Acknowledge an alert: show that you are working on it."""
    request = views.AckRequest(by=by or user(), reason=reason)
    with _control_client(server, needs="control") as client:
        fingerprint = _fingerprint(client, alert, run)
        _write_alerts((client.ack_alert(fingerprint, request),), form)


def silence(
    *,
    alert: Annotated[
        str,
        typer.Argument(metavar="[ALERT]", help="Its fingerprint or name; or give --match."),
    ] = "",
    reason: Annotated[str, typer.Option(help="Reason.")] = "",
    hours: Annotated[float, typer.Option(help="For how long.", min=0.01)] = 1.0,
    match: Matchers = None,
    starts_in: Annotated[
        float, typer.Option(help="Hours until it starts; for a maintenance window.", min=0.0)
    ] = 0.0,
    by: By = "",
    run: OfRun = "",
    server: CollectorOptions,
    form: Form = Format.TABLE,
) -> None:
    """Silence the notifications of some alerts for some hours; they stay listed.

    --match covers all matching alerts, including future ones.
    """
    if bool(alert) == bool(match) or (starts_in and not match):
        raise UsageError("give one ALERT, or --match for several; --starts-in goes with --match")
    with _control_client(server, needs="control") as client:
        if not match:
            request = views.AckRequest(
                by=by or user(), reason=reason, silence_seconds=hours * 3600.0
            )
            fingerprint = _fingerprint(client, alert, run)
            _write_alerts((client.ack_alert(fingerprint, request),), form)
            return
        matchers = (*match, f"run={find_run(client, run).run_id}") if run else tuple(match)
        view = client.silence(
            views.SilenceRequest(
                matchers=matchers,
                by=by or user(),
                reason=reason,
                seconds=hours * 3600.0,
                starts_unix_ns=time.time_ns() + int(starts_in * 3600e9) if starts_in else 0,
            )
        )
    _write_silences((view,), form)


def list_silences(*, server: CollectorOptions, form: Form = Format.TABLE) -> None:
    """List current and future silences."""
    with _control_client(server, needs="read") as client:
        _write_silences(client.ask(views.SilencesQuestion()), form)


def unsilence(
    *,
    number: Annotated[int, typer.Argument(help="The silence's number.", min=0)],
    by: By = "",
    reason: Annotated[str, typer.Option(help="Reason.")] = "",
    server: CollectorOptions,
    form: Form = Format.TABLE,
) -> None:
    """End a silence now. Alerts it hid that still fire are sent within a minute."""
    request = views.EndSilenceRequest(by=by or user(), reason=reason)
    with _control_client(server, needs="control") as client:
        _write_silences((client.end_silence(number, request),), form)


def _write_silences(listed: tuple[views.SilenceView, ...], form: Format) -> None:
    """Print a table of silences for ``vitals alerts``, or their JSON."""
    rows = [
        (
            v.id,
            " ".join(v.matchers) or v.fingerprint,
            format_time(v.starts_unix_ns),
            format_time(v.ends_unix_ns),
            v.by,
            v.reason,
            v.num_firing,
        )
        for v in listed
    ]
    header = ("number", "matchers", "starts", "ends", "by", "reason", "silenced now")
    write_table(header, rows, form, body=listed)


def send_test_messages(
    receivers: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of receivers, as for `vitals collector`.",
            envvar="VITALS_COLLECTOR_RECEIVERS",
        ),
    ] = None,
    receiver: Annotated[str, typer.Option(help="Only the receiver of this name.")] = "",
    form: Form = Format.TABLE,
) -> None:
    """Send a test message to all receivers and show the result of each.

    URLs come from the file and from the environment (VITALS_COLLECTOR_WEBHOOK,
    VITALS_COLLECTOR_ALERTMANAGER), as they do for the collector.
    """
    from vitals_collector.alerts.receivers import load_notifier_settings
    from vitals_collector.alerts.worker import send_test

    settings = load_notifier_settings(receivers)
    names = [each.name for each in settings.receivers]
    if not names or (receiver and receiver not in names):
        raise UsageError(
            f"there is no receiver {receiver!r}" if receiver else "no receiver is configured",
            hint=f"configured are {', '.join(names)}" if names else "give --receivers FILE",
        )
    results = send_test(settings, receiver, now_unix_ns=time.time_ns())
    header = ("receiver", "outcome", "error")
    rows = [(name, "failed" if r.error else "delivered", r.error) for name, r in results]
    write_table(header, rows, form)
    if any(result.error for _, result in results):
        raise typer.Exit(1)


def _fingerprint(client: CollectorClient, alert: str, run: str) -> str:
    """Return the fingerprint of an alert that ``vitals alerts`` got by name or by fingerprint.

    Raises:
        UsageError: several open alerts have the name.
    """
    if re.fullmatch("[0-9a-f]{16}", alert):
        return alert
    named = [view for view in _alerts_of(client, run, "") if view.title == alert]
    open_alerts = [view for view in named if view.state != "resolved"]
    matches = open_alerts or named
    if len(matches) == 1 or (matches and not open_alerts):
        return matches[0].fingerprint  # the newest one
    if not matches:
        raise UsageError(
            f"there is no alert {alert!r}", hint="`vitals alerts list` shows names and fingerprints"
        )
    runs = sorted({view.run_id for view in matches})
    raise UsageError(
        f"{len(matches)} alerts are called {alert!r}",
        hint=f"name the run: --run {runs[0]}"
        if len(runs) > 1
        else "give the fingerprint: " + " or ".join(view.fingerprint for view in matches[:4]),
    )


def _write_alerts(listed: tuple[views.AlertView, ...], form: Format) -> None:
    """Print a table of alerts for ``vitals alerts``, or their JSON."""
    rows = [
        (
            v.fingerprint,
            v.severity,
            v.state,
            v.title,
            v.run_id,
            v.step if v.step >= 0 else None,
            format_time(v.started_unix_ns),
            v.acknowledged_by or (f"silenced: {v.silence_reason}" if v.silence_reason else ""),
            v.summary,
        )
        for v in listed
    ]
    header = (
        "fingerprint", "severity", "state", "alert", "run", "step", "since", "handled", "summary",
    )  # fmt: skip
    write_table(header, rows, form, body=listed)


# -------------------------------------------------------------------------------------- helpers


def _default_folder(server: CollectorOptions) -> Path | None:
    """Return the directory that a command reads if no collector was given or is known."""
    return None if known_collector(server.collector) is not None else find_vitals_dir()


@contextlib.contextmanager
def _control_client(server: CollectorOptions, *, needs: str) -> Iterator[CollectorClient]:
    """Give a client with the token for a command; it never comes from the command line."""
    address = known_collector(server.collector, server.token_file)
    if address is None:
        raise UsageError(
            "no collector is known here",
            hint="start `vitals collector`, give --collector URL --token-file FILE, "
            "or give the run's folder",
        )
    scope = "control" if needs == "control" or not address.tokens.read else "read"
    with open_collector_client(address, scope) as client:
        yield client
