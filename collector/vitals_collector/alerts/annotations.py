"""Notes of users at a step of a run: validated, stored, audited, deleted with the run."""

from sqlalchemy import func, insert, select

from trainvitals.errors import UsageError
from trainvitals.redaction import redact_text
from trainvitals.views import AnnotationRequest, AnnotationView
from vitals_collector.alerts.commands import CONFLICT
from vitals_collector.storage.schema import annotations, runs
from vitals_collector.storage.store import Store, remove_nul, unknown_run, write_audit

MAX_TEXT = 300
MAX_BY = 80
MAX_OF_RUN = 10_000
"""Lines of one run."""
_MAX_STEP = 2**63 - 1


def annotate(
    store: Store, run_id: str, request: AnnotationRequest, *, caller: str, now_unix_ns: int
) -> AnnotationView:
    """Store a user's note on a run and its author durably.

    Raises:
        UsageError: unknown run, a value out of bounds, or too many lines.
    """
    text = _clean_note_text("text", request.text, MAX_TEXT)
    by = _clean_note_text("by", request.by, MAX_BY)
    if not text:
        raise UsageError("text is empty; write what is to be seen at the step")
    if not 0 <= request.step <= _MAX_STEP:
        raise UsageError(f"step is {request.step}; it must be 0 to {_MAX_STEP}")
    by = by or caller
    view = AnnotationView(step=request.step, time_unix_ns=now_unix_ns, text=text, by=by)
    values = {"run_id": run_id, "step": view.step, "time_unix_ns": now_unix_ns}
    of_run = annotations.c.run_id == run_id
    with store.write() as connection:
        if connection.execute(select(runs.c.run_id).where(runs.c.run_id == run_id)).first() is None:
            raise unknown_run(run_id)
        num = connection.execute(select(func.count()).select_from(annotations).where(of_run))
        if num.scalar_one() >= MAX_OF_RUN:
            raise UsageError(
                f"run {run_id} has {MAX_OF_RUN} annotations; no more are taken",
                hint="is a program writing them? `monitor.observe` is for numbers",
                code=CONFLICT,
            )
        connection.execute(insert(annotations).values(**values, text=text, written_by=by))
        actor = f"{by} ({caller})" if by != caller else by
        write_audit(connection, now_unix_ns, actor, "annotate", f"run/{run_id}/{view.step}", text)
    return view


def _clean_note_text(name: str, text: str, most: int) -> str:
    """Return a note's text as it can be stored, without secrets and the white space around it."""
    text = redact_text(remove_nul(text).encode(errors="replace").decode().strip())
    if len(text) > most:
        raise UsageError(f"{name} has {len(text)} characters; it may have {most}")
    return text
