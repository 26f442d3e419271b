"""What ``/metrics`` says, computed at scrape time from the agent's parts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from trainvitals.catalog import GPU_METRICS, NODE_METRICS, PROCESS_METRICS, STEP_METRICS, MetricSpec
from trainvitals.rows import Value
from vitals_agent.command_delivery import CommandDelivery
from vitals_agent.exposition import Reading
from vitals_agent.faults import Faults
from vitals_agent.run import ServedRun
from vitals_agent.sampling import Sampling
from vitals_agent.shipper import Shipper
from vitals_agent.tailer import JournalTail


def _from_columns(
    specs: Iterable[MetricSpec], values: Mapping[str, Value], labels: tuple[str, ...]
) -> Iterator[Reading]:
    for spec in specs:
        value = values.get(spec.column)
        if isinstance(value, int | float):  # what was not measured has no sample at all
            yield Reading(name=spec.name, value=float(value), labels=labels)


def agent_readings(
    runs: Sequence[ServedRun],
    *,
    counted: Mapping[str, int],
    relay: CommandDelivery,
    shipper: Shipper | None,
    faults: Faults,
) -> Iterator[Reading]:
    """Yield the agent's own numbers; ``counted`` is of the runs that are served no more."""
    numbers: dict[str, float] = {
        "agent_spool_bytes": sum(run.spool.num_bytes for run in runs),
        "agent_spooled_rows_total": counted["rows"] + sum(run.num_rows for run in runs),
        "agent_dropped_rows_total": counted["dropped"] + sum(run.num_dropped for run in runs),
        "agent_corrupt_rows_total": counted["corrupt"] + sum(r.spool.corrupt for r in runs),
        "agent_commands_total": relay.num_delivered,
    }
    if shipper is not None:
        numbers["agent_shipped_rows_total"] = shipper.num_rows
        numbers["agent_ship_errors_total"] = shipper.num_errors
        numbers["agent_corrupt_rows_total"] += shipper.num_refused_rows
    for name, value in numbers.items():
        yield Reading(name=name, value=value)
    for part, count in faults.counts.items():
        yield Reading(name="agent_part_failures_total", value=count, labels=(part,))


def sample_readings(sampling: Sampling, node: str) -> Iterator[Reading]:
    """Yield the newest node and GPU samples."""
    yield from _from_columns(NODE_METRICS, sampling.node, (node,))
    for uuid, values in sampling.gpus.items():
        yield from _from_columns(GPU_METRICS, values, (node, uuid))


_RUN_METRICS = tuple(m for m in STEP_METRICS if m.scope == "run")
_RANK_METRICS = tuple(m for m in STEP_METRICS if m.scope == "rank")


def run_readings(run: ServedRun) -> Iterator[Reading]:
    """Yield the last step's values of the ranks here: of each rank only its newest start."""
    newest: dict[int, JournalTail] = {}
    for tail in list(run.tails.values()):
        other = newest.get(tail.identity.rank)
        if other is None or other.identity.started_unix_ns <= tail.identity.started_unix_ns:
            newest[tail.identity.rank] = tail
    for rank, tail in newest.items():
        labels = (run.run_id, str(rank))
        yield from _from_columns(PROCESS_METRICS, tail.process_values, labels)
        yield from _from_columns(_RANK_METRICS, tail.last.values, labels)
    if 0 in newest:  # what is equal on all ranks is written by rank 0 only
        yield from _run_scope(run, newest[0])


def _run_scope(run: ServedRun, tail: JournalTail) -> Iterator[Reading]:
    last, label = tail.last, (run.run_id,)
    yield from _from_columns(_RUN_METRICS, last.values, label)
    if last.step >= 0:
        yield Reading(name="train_step", value=last.step, labels=label)
    # Counters are summed over the starts of rank 0: a restarted rank must not set them back.
    lasts = [t.last for t in list(run.tails.values()) if t.identity.rank == 0]
    steps = sum(each.num_steps for each in lasts)
    yield Reading(name="train_steps_total", value=steps, labels=label)
    bad = sum(each.num_nonfinite for each in lasts)
    yield Reading(name="train_nonfinite_total", value=bad, labels=label)
    for name, counts in (
        ("train_skipped_steps_total", [each.skips for each in lasts]),
        ("train_rollbacks_total", [each.rollbacks for each in lasts]),
    ):
        for cause in sorted({cause for count in counts for cause in count}):
            total = sum(count.get(cause, 0) for count in counts)
            yield Reading(name=name, value=total, labels=(*label, cause))
