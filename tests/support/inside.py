"""State of a monitor that has no public name: the one module of the tests that knows its place."""


def run_of(monitor):
    """Return the run of a monitor or of what ``attach`` returned."""
    return monitor._run


def feature_of(monitor, kind):
    """Return the monitor's feature of a class; None if the run does not use it."""
    return run_of(monitor).features.get(kind)


def feature_named(monitor, name):
    """Return the monitor's feature by the name of its class."""
    return next(f for f in run_of(monitor).features if type(f).__name__ == name)


def device_of(monitor):
    """Return the parts of a monitor that work on the device."""
    return monitor._device


def events_of(monitor, *, keep=lambda event, **fields: event):
    """Return a list that gets ``keep(event, step=..., attempt=...)`` of each event written."""
    events, emitter = [], run_of(monitor).emitter
    write = emitter.event

    def event(written, **fields):
        events.append(keep(written, **fields))
        write(written, **fields)

    emitter.event = event
    return events


def acks_of(monitor):
    """Return a function that returns the acknowledgments of commands up to now."""
    acks = events_of(monitor, keep=lambda event, **_: getattr(event, "ack", None))
    return lambda: [ack for ack in acks if ack is not None]


def records_of(monitor, *, keep=lambda record: record):
    """Return a list that gets ``keep(record)`` of each step's record as its row is written."""
    records, emitter = [], run_of(monitor).emitter
    write = emitter.step

    def step(measured, record, extra):
        records.append(keep(record))
        write(measured, record, extra)

    emitter.step = step
    return records


def nonfinite_parameters_of(monitor):
    """Return a set that gets (step, parameter) of each that is written as non-finite."""
    bad, emitter = set(), run_of(monitor).emitter
    write = emitter.layers

    def layers(measured, reduced, samples, **options):
        names = () if samples is None else samples.nonfinite_parameters
        bad.update((measured.step, name) for name in names)
        write(measured, reduced, samples, **options)

    emitter.layers = layers
    return bad


def journal_directory(monitor):
    """Return the directory of this rank's journal and heartbeat."""
    return run_of(monitor).emitter.directory


def facts_of(monitor):
    """Return the policy's facts: skips, rollbacks, causes."""
    return run_of(monitor).judge.facts


def limits_of(monitor):
    """Return the limits of finite outliers."""
    return run_of(monitor).judge.limits()


def probe_of(monitor):
    """Return the probe."""
    return feature_named(monitor, "ProbeFeature").probe


def tokens_of(monitor):
    """Return the number of tokens seen, of the steps that the host has read."""
    return run_of(monitor).log.tokens.seen


def refs_of(monitor):
    """Return the snapshots and checkpoints that are known, latest first."""
    return run_of(monitor).recovery.refs()


def snapshots_of(monitor):
    """Return the ring of snapshots in memory."""
    return run_of(monitor).recovery.ring


def store_of(monitor):
    """Return the store of checkpoints on disk."""
    return run_of(monitor).recovery.store


def patience_of(monitor):
    """Return the state of early stopping."""
    return feature_named(monitor, "EarlyStoppingFeature").state_dict()


def is_paused(monitor):
    """Return whether an operator's pause holds the step."""
    return feature_named(monitor, "CommandsFeature").is_paused
