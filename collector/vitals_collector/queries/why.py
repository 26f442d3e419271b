"""Explains a step in a paragraph: its values, its limits, findings and decisions."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from trainvitals import records, views
from trainvitals.detect.posttraining.charts import quantity_charts
from trainvitals.detect.posttraining.set import WATCHERS
from trainvitals.errors import UsageError
from trainvitals.hindsight import HINDSIGHT_WORDS
from trainvitals.io.completions import Completion, completions_of
from trainvitals.io.sample_ids import samples_of
from trainvitals.printable import printable
from trainvitals.units import humanize_count, name_ranks
from vitals_collector.ingest.projections import describe_samples
from vitals_collector.queries.open import Reader
from vitals_collector.queries.stacks import capital, wait_stacks_text
from vitals_collector.queries.user_alerts import UserAlertEpisode, user_alert_episodes

_VERDICT = (
    (records.BAD_LOSS | records.BAD_GRADIENTS, "the loss and the gradients were not finite"),
    (records.BAD_LOSS, "the loss was not finite"),
    (records.BAD_GRADIENTS, "the gradients were not finite"),
    (
        records.LOSS_OUTLIER | records.NORM_OUTLIER,
        "the loss and the gradient norm were above their limits",
    ),
    (records.LOSS_OUTLIER, "the loss was above its limit"),
    (records.NORM_OUTLIER, "the gradient norm was above its limit"),
    (records.OVERFLOW, "the loss scaler overflowed"),
    (records.RANK_FAILED, "a rank could not measure the step"),
    (records.NO_GRADIENT, "all gradients were exactly 0"),
    (records.NONFINITE_STATE, "optimizer state or buffers were not finite"),
    (records.REPLICAS_DIFFER, "parameters or optimizer state differed between ranks"),
    (records.SETTINGS_DIFFER, "settings differed between ranks"),
    (records.SNAPSHOT_MISSED, "a snapshot could not be taken"),
    (records.COMMANDED, "skipped by a manual command"),
)
_NOT_FINITE = records.BAD_LOSS | records.BAD_GRADIENTS

_OF_POST_TRAINING = frozenset(watcher.name for watcher in WATCHERS)
"""Kinds of findings about the scalars of a post-training run."""
_LOGGED_WITHIN = 50
"""Steps before a step in which its trainer logged the quantities last."""
FOLLOWING = 8
"""Number of later steps whose losses show the outcome of a step."""


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the explanation of a step needs."""

    run: views.RunSummary
    detail: views.RunDetail
    view: views.StepView
    decisions: Sequence[views.DecisionView]
    findings: Sequence[views.FindingView]
    notes: Sequence[views.EventView]
    incidents: Sequence[views.IncidentLine]
    stacks: Sequence[views.StacksView]
    after: views.SeriesReply | None
    quantities: Sequence[views.SeriesReply] = ()
    """Quantities of a post-training run, up to the step."""


def gather_step(
    reader: Reader, run: views.RunSummary, step: int, *, with_text: bool = True
) -> StepFacts:
    """Query everything that explains a step; without ``with_text``, no following losses.

    Raises:
        UsageError: nothing is stored about the step.
    """
    view = reader.ask(views.StepQuestion(run_id=run.run_id, step=step))
    if not (view.rows or view.findings or view.decisions):
        raise UsageError(
            f"no rows are stored for step {step}; the last step of {run.run_id} is {run.last_step}",
            hint="`vitals tail RUN` shows the latest steps",
        )
    detail = reader.ask(views.RunQuestion(run_id=run.run_id, volume=False))
    has_waits = any(entry.finding.kind == "waiting" for entry in view.findings)
    after = None
    if with_text and "steps.loss" in detail.metrics:
        after = reader.ask(
            views.SeriesQuestion(
                run_id=run.run_id,
                metric=loss_of(view),
                from_step=step + 1,
                to_step=step + FOLLOWING,
            )
        )
    return StepFacts(
        run=run,
        detail=detail,
        view=view,
        decisions=reader.ask(views.DecisionsQuestion(run_id=run.run_id)),
        findings=reader.ask(views.FindingsQuestion(run_id=run.run_id)),
        notes=reader.ask(views.EventsQuestion(run_id=run.run_id, kind="Note")),
        incidents=reader.ask(views.VerdictQuestion(run_id=run.run_id, judgement=False)).incidents,
        stacks=reader.ask(views.StacksQuestion(run_id=run.run_id)) if has_waits else (),
        after=after,
        quantities=_read_quantities(reader, detail, step) if with_text else (),
    )


def _read_quantities(reader: Reader, detail: views.RunDetail, step: int) -> list[views.SeriesReply]:
    """Query the quantities of a post-training run up to the explained step, in page order."""
    charts = quantity_charts(detail.info.task, detail.metrics)
    first, run_id = max(0, step - _LOGGED_WITHIN), detail.summary.run_id
    questions = [
        views.SeriesQuestion(
            run_id=run_id, metric=metric, from_step=first, to_step=step, points=100
        )
        for chart in charts
        for _, metric in chart.lines
    ]
    return [reader.ask(question) for question in questions]


def step_text(facts: StepFacts) -> str:
    """Return the text that explains a step, with its incident, stacks and traces."""
    run, step = facts.run, facts.view.step
    alerts = user_alert_episodes(raised.finding for raised in facts.findings)
    of_task = PostTrainingStep(
        quantities_text(facts.quantities, step), _begun_here(facts.findings, step)
    )
    parts = [explain_step(run, facts.view, facts.decisions, facts.after, alerts, of_task)]
    parts += [
        f"Part of an incident: vitals postmortem {run.run_id} --incident {line.incident_id}"
        for line in facts.incidents
        if line.onset_step <= step <= line.last_step
    ]
    parts += [
        part
        for part in (wait_stacks_text(facts.stacks, step), profiles_near(facts.notes, step))
        if part
    ]
    return "\n".join(parts)


class PostTrainingStep(NamedTuple):
    """Sentences that `vitals why` adds about a step of a post-training run."""

    quantities: str = ""
    begun: Sequence[str] = ()
    """Problems that began at it and were reported later."""

    @property
    def sentences(self) -> list[str]:
        """Return all sentences about the step: they come first, as its loss says little."""
        return [text for text in (self.quantities, *self.begun) if text]


_OTHER_RUN = PostTrainingStep()


def explain_step(
    run: views.RunSummary,
    view: views.StepView,
    ledger: Sequence[views.DecisionView],
    after: views.SeriesReply | None = None,
    alerts: Sequence[UserAlertEpisode] = (),
    of_task: PostTrainingStep = _OTHER_RUN,
) -> str:
    """Explain a step in a paragraph: one part for each attempt that trained it.

    ``ledger`` and ``alerts`` are all of the run; ``after`` are the losses of ``FOLLOWING`` steps.
    ``of_task`` is what only a post-training run has.
    """
    attempts = sorted({row.attempt for row in view.rows})
    times = {attempt: ordinal for ordinal, attempt in enumerate(attempts, start=1)}
    parts = [f"Step {view.step} of {run.name or 'run'} ({run.run_id}).", *of_task.sentences]
    for attempt, ordinal in times.items():
        which = f"{_attempt_label(ordinal, len(attempts))}: " if len(attempts) > 1 else ""
        parts += [which + of_attempt(view, attempt), *_rank_loss_range(view, attempt)]
    if not attempts:
        parts.append("No row of it is stored.")
    parts += _rolled_up_notes(view)
    reasons = " ".join(entry.decision.reason for entry in view.decisions)
    # A decision quotes its finding: nothing is repeated.
    ours = [e for e in without_waits(view.findings) if not e.finding.severity]
    for finding in (entry.finding for entry in ours):
        level_note = " (advisory)" if finding.level == "advisory" else ""
        if finding.reason not in reasons:
            parts.append(f"Finding{level_note}: {finding.reason}.")
    own_alerts = [a.text for a in alerts if a.onset <= view.step <= a.last]
    parts += own_alerts
    parts += [f"{reading.text}." for reading in view.readings]
    for entry in view.decisions:
        parts.append(decision_sentence(entry))
        if entry.decision.acted and entry.decision.cost_steps > 1:
            parts.append(f"Lost work: {entry.decision.cost_steps} steps.")
    if attempts and not (view.findings or view.decisions or own_alerts or of_task.begun):
        parts.append("No findings at this step.")
        parts += _nearest(view.step, ledger)
    parts += _rolled_back(view.step, ledger)
    parts += _later_losses_line(after)
    if view.moved_first is not None:
        parts.append(view.moved_first or "No precursor: nothing stood out before it.")
    for step_data in view.data:
        which = (
            f"{_attempt_label(times[step_data.attempt], len(times))}: "
            if len(times) > 1 and step_data.attempt in times
            else ""
        )
        parts.append(which + samples_sentence(step_data, tells_attempt=False))
    text = " ".join(part[:1].upper() + part[1:] for part in parts)
    return fill(printable(text), width=96, break_long_words=False)


def quantities_text(replies: Sequence[views.SeriesReply], step: int) -> str:
    """List the values that a post-training run had logged at the explained step; "" without."""
    texts = []
    for reply in replies:
        logged = [
            (at, value)
            for at, value in zip(reply.step, reply.value, strict=True)
            if value is not None
        ]
        if logged:
            at, value = logged[-1]
            name = reply.metric.removeprefix("scalars.")
            texts.append(f"{name} {value:.4g}" + ("" if at == step else f" (step {at})"))
    return f"Logged: {', '.join(texts)}." if texts else ""


def _begun_here(findings: Sequence[views.FindingView], step: int) -> list[str]:
    """Name the post-training problems that began at the explained step, reported later."""
    raised = (view.finding for view in findings)
    return [
        f"Began here, reported at step {finding.step}: {finding.reason}."
        for finding in raised
        if finding.kind in _OF_POST_TRAINING and finding.onset_step == step != finding.step
    ]


def without_waits(findings: Sequence[views.FindingView]) -> list[views.FindingView]:
    """Leave out findings on waits that the explanation of a later hang repeats."""
    hangs = {(v.finding.step, v.finding.rank) for v in findings if v.finding.kind == "hang"}
    return [
        view
        for view in findings
        if view.finding.kind != "waiting" or (view.finding.step, view.finding.rank) not in hangs
    ]


_NEAR = 100
"""Maximum distance of a trace, in steps."""


def profiles_near(events: Sequence[views.EventView], step: int) -> str:
    """Return the paths of traces near the explained step, one line each."""
    near = [e for e in events if e.profile and abs(e.step - step) <= _NEAR]
    lines = [
        f"{capital(e.source.replace(':', ' '))}, until step {e.step}: {e.profile}" for e in near
    ]
    return "\n".join(map(printable, lines))


def _attempt_label(ordinal: int, num: int) -> str:
    """Return the name of an attempt in the explanation of a step, such as first."""
    ordinals = ("First", "Second", "Third")
    name = f"{ordinals[ordinal - 1]} attempt" if ordinal <= len(ordinals) else f"Attempt {ordinal}"
    return name if ordinal == num else f"{name} (discarded)"


def _rank_loss_range(view: views.StepView, attempt: int) -> list[str]:
    """Explain how the ranks' losses of a step differ, if rows of ranks are stored."""
    losses: dict[int, float] = {}
    for row in view.rows:
        if row.attempt != attempt or not row.source.startswith("rank:"):
            continue
        value = row.values.get("rank_loss")
        is_lost = any(mark.startswith("rank_loss=") for mark in row.nonfinite)
        if value is not None or is_lost:
            rank = int(row.source.removeprefix("rank:"))
            losses[rank] = math.nan if value is None else float(value)
    bad = [rank for rank, loss in losses.items() if not math.isfinite(loss)]
    if len(losses) < 2:
        return []
    if len(bad) == 1 and any(row.values.get("culprit_rank") == bad[0] for row in view.rows):
        return []  # already named as the cause
    if bad:
        named = name_ranks(bad)
        return [f"The local loss was not finite on {len(bad)} of {len(losses)} ranks: {named}."]
    least, most = min(losses.values()), max(losses.values())
    where = max(losses, key=losses.__getitem__)
    return [f"Per-rank loss {least:.6g} to {most:.6g} (highest: rank {where})."]


def _nearest(step: int, ledger: Sequence[views.DecisionView]) -> list[str]:
    """Explain, for a step without a decision, which decision is closest to it."""
    nearest = min(
        (entry.decision for entry in ledger), key=lambda d: abs(d.step - step), default=None
    )
    if nearest is None:
        return ["Vitals took no action in this run."]
    away = abs(nearest.step - step)
    which = "later" if nearest.step > step else "earlier"
    distance = f"{humanize_count(away, 'step')} {which}"
    return [f"No action; the nearest is {nearest.action} at step {nearest.step}, {distance}."]


def _later_losses_line(after: views.SeriesReply | None) -> list[str]:
    """Explain what followed a step: the later losses on the attempt of the lineage."""
    if after is None or not after.num_total:
        return []
    finite = [value for value in after.value if value is not None]
    steps = "step" if after.num_total == 1 else f"{after.num_total} steps"
    name = after.metric.partition(".")[2]
    text = f"{name} over the next {steps}: "
    if finite:
        text += f"{min(finite):.6g}" + (
            f" to {max(finite):.6g}" if max(finite) > min(finite) else ""
        )
        lost = f", not finite in {after.num_nonfinite}" if after.num_nonfinite else ""
        return [f"{text}{lost}."]
    return [f"{text}not finite in any."]


def with_kept_samples(view: views.StepView, *run_dirs: str | Path) -> views.StepView:
    """Add the samples that the run directory stores for every step; the first match is read."""
    paths = (Path(path) for path in run_dirs)
    run_dir = next((p for p in paths if p.name == view.run_id and p.is_dir()), None)
    if run_dir is None:
        return view
    data = {(step_data.source, step_data.attempt): step_data for step_data in view.data}
    for line in samples_of(run_dir, view.step):
        key = (f"rank:{line.rank}", line.attempt)
        noted = data.get(key)
        batch = records.BatchNoted(
            epoch=line.epoch,
            first_batch=line.first_batch,
            num_batches=line.num_batches,
            sample_ids=line.sample_ids,
            num_samples=len(line.sample_ids),
            file="" if noted is None else noted.batch.file,
        )
        data[key] = views.StepData(source=key[0], attempt=key[1], batch=batch)
    return replace(view, data=tuple(data[key] for key in sorted(data)))


def completions_text(run_dirs: Sequence[Path], view: views.StepView) -> str:
    """Return the text of the completions that the run stored for a step; "" without any.

    They are read from the disk of this machine: a collector has none.
    """
    of_run = [path for path in run_dirs if path.name == view.run_id]
    by_samples: dict[tuple[Completion, ...], list[str]] = {}
    for stored in completions_of(of_run, view.step):
        began = f"where {printable(stored.finding).replace('_', ' ')} began"
        if stored.step != stored.onset_step:
            began = f"near step {stored.onset_step}, {began}"
        title = f"Completions of step {stored.step}, {began} ({printable(stored.name)}):"
        by_samples.setdefault(stored.samples, []).append(title)
    lines = []
    for samples, titles in by_samples.items():  # two problems may begin at one step
        lines += ["", *titles]
        for sample in samples:
            cut = f", {sample.num_cut} characters cut" if sample.num_cut else ""
            reward = "not a number" if sample.reward is None else f"{sample.reward:.6g}"
            lines += [
                f"- reward {reward}{cut}",
                *_text_block("prompt", sample.prompt),
                *_text_block("completion", sample.completion),
            ]
    return "".join(f"{line}\n" for line in lines)


def _text_block(name: str, text: str) -> list[str]:
    """Return the lines of a prompt or completion below a name, without control characters."""
    return [f"  {name}:", *(f"    {printable(line)}" for line in text.splitlines())]


def of_attempt(view: views.StepView, attempt: int) -> str:
    """Explain a step in one attempt: values, limits, verdict, outcome."""
    rows = [row for row in view.rows if row.attempt == attempt]
    head = next((row for row in rows if row.source == "rank:0"), rows[0])
    values = head.values
    turn = stepped_optimizer(head)
    at = f"/{turn}" if turn else ""
    clauses = [
        f"loss{at} {_format_value(head, 'loss' + at)}{_limit_text(head, 'loss_limit' + at)}, "
        f"gradient norm "
        f"{_format_value(head, 'grad_norm' + at)}{_limit_text(head, 'grad_norm_limit' + at)}"
    ]
    if "auto_max_norm" in values:
        clauses[0] += f", clipped to {_format_value(head, 'auto_max_norm')}"
    if rates := learning_rates(values):
        clauses[0] += f", learning rate{'s' if len(rates.split()) > 1 else ''} {rates}"
    bits = int(values.get("verdict") or 0)
    verdict, unknown_bits = [], bits
    for mask, text in _VERDICT:
        if unknown_bits & mask == mask:
            verdict.append(text)
            unknown_bits &= ~mask
    is_skipped = bool(values.get("skipped"))
    outcome = "the update was " + _update_outcome(bits, is_skipped=is_skipped)
    if verdict:
        so = ", so " if is_skipped else "; "
        outcome = " and ".join(verdict) + so + outcome
    clauses.append(outcome)
    culprit = int(values.get("culprit_rank", -1) or 0)
    if bits & ~records.CLIPS and culprit >= 0:
        clauses.append(f"caused by rank {culprit}{_culprit_details(rows, culprit)}")
    elif _has_unknown_rank(bits) and len({row.source for row in rows}) > 1:
        clauses.append("the rank is unknown: gradients are checked after all ranks are averaged")
    return clauses[0] + ". " + " ".join(f"{text[:1].upper()}{text[1:]}." for text in clauses[1:])


def _has_unknown_rank(bits: int) -> bool:
    """Return whether only the gradients of the explained step were non-finite, on all ranks."""
    return bool(bits & records.BAD_GRADIENTS) and not bits & records.BAD_LOSS


def stepped_optimizer(row: views.StepRow) -> str:
    """Return the only optimizer that the explained step moved; "" if it moved all."""
    names = [name.partition("/")[2] for name in row.values if name.startswith("skipped/")]
    return names[0] if names else ""


def loss_of(view: views.StepView) -> str:
    """Return the series of loss that a query about the step uses."""
    turn = next(filter(None, map(stepped_optimizer, view.rows)), "")
    return f"scalars.loss/{turn}" if turn else "steps.loss"


_MAX_RATES = 4
"""Maximum number of learning rates listed; for more groups, their range."""


def learning_rates(values: Mapping[str, float | int | None]) -> str:
    """Return the learning rates in the explanation of a step: of all parameter groups."""
    groups = [name for name in values if name.partition(".")[0] == "learning_rate"]
    groups.sort(key=lambda name: int(name.partition(".")[2] or 0))
    rates = [rate for name in groups if (rate := values[name]) is not None]
    shown = [f"{rate:.6g}" for rate in rates]
    if len(set(shown)) <= 1:
        return "".join(shown[:1])
    if len(shown) <= _MAX_RATES:
        return f"{', '.join(shown)} (of {len(shown)} groups)"
    return f"{min(rates):.6g} to {max(rates):.6g} (of {len(shown)} groups)"


def _update_outcome(bits: int, *, is_skipped: bool) -> str:
    """Explain what became of a step's update: applied, clipped, skipped or withheld."""
    if is_skipped:
        return (
            "withheld"
            if bits & records.WITHHELD and not bits & (_NOT_FINITE | records.OVERFLOW)
            else "skipped"
        )
    if (
        bits & (records.LOSS_OUTLIER | records.NORM_OUTLIER)
        and bits & records.CLIPS
        and not bits & records.WITHHELD
    ):
        return "applied after clipping"
    return "applied"


def _rolled_up_notes(view: views.StepView) -> list[str]:
    """Explain for which attempts of a step most ranks' rows were rolled up, with totals."""
    sentences = []
    for over in view.over_ranks:
        of_attempt = [row for row in view.rows if row.attempt == over.attempt]
        num_left = sum(row.source != "rank:0" for row in of_attempt)
        num_ranks = over.values.get("num_ranks") or 0
        if num_left >= num_ranks:
            continue
        longest = over.values.get("step_duration_seconds:max")
        text = "" if longest is None else f"; the slowest took {longest:.6g} s for the step"
        kept_ranks = f"{num_left} of {num_ranks} ranks besides rank 0 still have their own rows"
        sentences.append(f"Thinned: {kept_ranks}{text}.")
    return sentences


def _culprit_details(rows: Sequence[views.StepRow], rank: int) -> str:
    """Explain the bad value of a step by its rank's loss and batch."""
    row = next((row for row in rows if row.source == f"rank:{rank}"), None)
    if row is None:
        return ""
    clauses = []
    if "rank_loss" in row.values:  # if optimizers alternate, only in steps of the first one
        clauses.append(f"its local loss was {_format_value(row, 'rank_loss')}")
    if row.values.get("batch_index") is not None:
        batch, epoch = row.values["batch_index"], row.values.get("epoch", 0)
        clauses.append(f"from batch {batch} of epoch {epoch}")
    return f" ({', '.join(clauses)})" if clauses else ""


def samples_sentence(step_data: views.StepData, tells_attempt: bool) -> str:
    """Explain in a sentence which batches and samples a rank trained on in a step."""
    batch = step_data.batch
    sentence = step_data.source.replace(":", " ") + (
        f" in attempt {step_data.attempt}" if tells_attempt else ""
    )
    num = "batch" if batch.num_batches == 1 else f"{batch.num_batches} batches from"
    sentence += (
        f" trained on {num} {batch.first_batch} of epoch {batch.epoch}: {describe_samples(batch)}"
    )
    return sentence + (f"; saved in {batch.file}." if batch.file else ".")


def _format_value(row: views.StepRow, name: str) -> str:
    """Return a value of the explained step as text; NaN and infinity by name."""
    for mark in row.nonfinite:
        if mark.startswith(f"{name}="):
            return mark.partition("=")[2].replace("nan", "NaN")
    value = row.values.get(name)
    return "not measured" if value is None else f"{value:.6g}"


def _limit_text(row: views.StepRow, name: str) -> str:
    """Return the limit of a value in the explanation of a step."""
    return f" (limit {_format_value(row, name)})" if name in row.values else " (no limit yet)"


def decision_sentence(view: views.DecisionView) -> str:
    """Explain a decision in sentences: action, rule, reason and remaining budget."""
    decision = view.decision
    text = records.action_text(decision)
    parts = [f"Action: {text} (rule: {decision.rule}): {decision.reason}."]
    if decision.lr_factor != 1.0:
        parts.append(f"The learning rate was multiplied by {decision.lr_factor:g}.")
    if view.hindsight:
        parts.append(f"Hindsight: {HINDSIGHT_WORDS[view.hindsight]}.")
    budget_left = decision.budget_left
    if budget_left >= 0 and decision.mode == "heal":  # no other mode uses rollbacks
        num = f"{humanize_count(budget_left, 'rollback')} left"
        parts.append(f"{num}." if budget_left else "Rollback budget used up.")
    return " ".join(parts)


def _rolled_back(step: int, ledger: Sequence[views.DecisionView]) -> list[str]:
    """Explain which rollbacks about other steps discarded the step."""
    return [
        f"This step was discarded: the rollback for step {entry.decision.step} went back to step "
        f"{entry.decision.rollback_to_step}."
        for entry in ledger
        if entry.decision.action == "rollback"
        and entry.decision.acted
        and entry.decision.step != step
        and entry.decision.rollback_to_step <= step <= entry.decision.decided_at_step
    ]
