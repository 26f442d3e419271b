"""Tables about a run, for `vitals show` and for the post-mortem."""

from collections.abc import Sequence

from trainvitals.cli.output import format_time
from trainvitals.document.blocks import TableBlock
from trainvitals.hindsight import HINDSIGHT_WORDS, summarize_outcomes
from trainvitals.policy.actions import rule_words
from trainvitals.views import CheckpointView, DecisionView, EventView, RunDetail


def run_facts(
    detail: RunDetail, ledger: Sequence[DecisionView], learning_rates: str = ""
) -> list[tuple[str, object]]:
    """Return the facts of a run for terminals and report files; empty ones are "" or None."""
    summary, info = detail.summary, detail.info
    return [
        ("run", summary.run_id),
        ("name", summary.name),
        ("project", summary.project),
        ("user", summary.user),
        ("tags", ", ".join(summary.tags)),
        ("state", summary.state),
        ("health", summary.health),
        ("missing", ", ".join(summary.missing)),
        ("mode", summary.mode),
        ("ranks", summary.world_size),
        ("started", format_time(summary.started_unix_ns)),
        ("last seen", format_time(summary.last_seen_unix_ns)),
        ("last step", summary.last_step),
        ("loss", summary.loss),
        ("gradient norm", summary.grad_norm),
        ("learning rate", learning_rates),
        ("skips", summary.num_skips),
        ("rollbacks", summary.num_rollbacks),
        ("attempts", len(detail.attempts)),
        ("rows lost", sum(source.num_lost_rows for source in detail.sources)),
        ("git commit", info.git_commit),
        ("torch", info.torch_version),
        ("folder", info.run_dir),
        ("observed decisions", summarize_outcomes(view.hindsight or None for view in ledger)),
    ]


def decision_table(views: Sequence[DecisionView]) -> TableBlock:
    """Return the table of decisions with their evidence, for terminals and report files."""
    header = ("step", "action", "rule", "rank", "done", "reason", "evidence", "rollbacks left")
    return TableBlock(header, [_decision_row(view) for view in views])


def _decision_row(view: DecisionView) -> tuple[object, ...]:
    """Return a decision as a row of a report's table: action, reason, evidence and so on."""
    decision = view.decision
    hindsight = HINDSIGHT_WORDS.get(view.hindsight, "not done")
    evidence = [f"{name} {value:.6g}" for name, value in decision.evidence.items()]
    if decision.rollback_to_step >= 0:
        evidence.append(f"rollback to step {decision.rollback_to_step} ({decision.checkpoint_id})")
    return (
        decision.step,
        decision.action,
        rule_words(decision.rule),
        rank_text(decision.rank),
        "yes" if decision.acted else f"observed, {hindsight}",
        decision.reason,
        ", ".join(evidence),
        decision.budget_left if decision.budget_left >= 0 else None,
    )


def rank_text(rank: int) -> object:
    """Return the cell of a rank in tables for terminals and files; -1 means all."""
    return rank if rank >= 0 else "all"


def checkpoint_table(views: Sequence[CheckpointView]) -> TableBlock:
    """Return the table of checkpoints and snapshots, for terminals and report files."""
    return TableBlock(
        ("checkpoint", "step", "state", "where", "bytes", "detail"),
        [(c.checkpoint_id, c.step, c.state, c.where, c.num_bytes, c.detail) for c in views],
    )


def event_table(views: Sequence[EventView]) -> TableBlock:
    """Return the table of events in their order, for terminals and report files."""
    return TableBlock(
        ("time", "source", "step", "message"),
        [(format_time(e.time_unix_ns), e.source, e.step, e.text) for e in views],
    )
