"""`vitals postmortem`: a page about a run, to attach to a ticket."""

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainvitals.cli.options import Dir, Force, Run
from trainvitals.cli.output import write_json
from trainvitals.errors import UsageError
from vitals_collector.cli.opening import CollectorOptions, RunChoice
from vitals_collector.cli.writing import write_file

Incident = Annotated[str, typer.Option(help="Only this incident; the report lists their ids.")]
Html = Annotated[Path | None, typer.Option(help="Write one page of HTML, with pictures.")]
Markdown = Annotated[
    Path | None, typer.Option(help="Write Markdown [default: to stdout; plain text on a terminal].")
]


Form = Annotated[
    Literal["text", "json"],
    typer.Option("--format", help="How to write to stdout; json: the facts of the report."),
]


def postmortem(
    *,
    run: Run = "",
    incident: Incident = "",
    html: Html = None,
    md: Markdown = None,
    form: Form = "text",
    force: Force = False,
    folder: Dir = None,
    server: CollectorOptions,
) -> None:
    """Report what went wrong in a run: when, where, what Vitals did, and the cost.

    The page is self-contained: no scripts, no other files, no network.
    """
    from trainvitals.document import markdown, page
    from vitals_collector.report.postmortem.report_data import gather_report_data
    from vitals_collector.report.postmortem.story import report_blocks

    if html is not None and html == md:
        raise UsageError(f"--html and --md are both {html}; give two different files")
    with server.open(RunChoice(run, folder)) as (opened, summary):
        facts = gather_report_data(
            opened.reader, summary.run_id, now_unix_ns=time.time_ns(), incident_id=incident
        )
    blocks = report_blocks(facts)
    for file, make in ((html, page.write_page), (md, markdown.write_markdown)):
        if file is not None:
            write_file(file, make(blocks).encode(), force=force)
            sys.stdout.write(f"{file}\n")
    if form == "json":
        body = {name: getattr(facts, name) for name in facts.__dataclass_fields__}
        body["decisions"] = body.pop("ledger")
        write_json(body)
    elif html is None and md is None:
        # Piped output may end up in a ticket, in which text from the run must not become a link.
        write = markdown.write_text if sys.stdout.isatty() else markdown.write_markdown
        sys.stdout.write(write(blocks))
