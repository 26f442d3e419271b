"""A run as a run of MLflow: metrics by step, its configuration as parameters, decisions as tags.

The run is identified by the tag ``vitals.run_id``. A step that was trained twice appears twice,
because MLflow deletes nothing: ``vitals/attempt`` at the same step, with the same time,
distinguishes them.

A server or a database ignores a value that exists already; a directory does not. So after a kill
the history of the metrics is read first.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from trainvitals.views import RunState
from vitals_plugins.bridges.mirrors.follow import ActionNote, Entry, TrackerRow
from vitals_plugins.bridges.mirrors.worker import RunDescription, TrackerTarget

_RUN_TAG = "vitals.run_id"
_METRICS_AT_ONCE, _OTHERS_AT_ONCE = 1_000, 100
"""MLflow's own limits of one request."""
MAX_NOTES = 500
"""Maximum number of decisions with a tag; later only rollbacks and halts have one."""
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]", re.ASCII)
_STATES = {"finished": "FINISHED", "failed": "FAILED", "lost": "FAILED", "halted": "FAILED"}

Point = tuple[str, int, int]
"""Name, step and time of a value."""


class MLflow:
    """Writes one run; see ``worker.Tracker``."""

    def __init__(
        self,
        target: TrackerTarget,
        about: RunDescription,
        saved_state: dict[str, Any],
        unclean: bool,
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self._metric, self._param, self._tag = Metric, Param, RunTag
        self._client: Any = MlflowClient(tracking_uri=target.where)
        self._unclean = unclean
        self._run_id = (
            saved_state.get("run_id") or self._find_run_id(about) or self._create_run(about)
        )
        self._client.update_run(self._run_id, status="RUNNING")
        self.kept: dict[str, Any] = {
            "run_id": self._run_id,
            "num_notes": saved_state.get("num_notes", 0),
        }
        self._describe(about)

    def _get_or_create_experiment(self, about: RunDescription) -> str:
        """Return the id of the run's experiment in MLflow, created if it is missing."""
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        name = MLFLOW_EXPERIMENT_NAME.get() or about.project or "vitals"
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(name))

    def _find_run_id(self, about: RunDescription) -> str:
        """Return MLflow's id of the run; "" if it does not exist yet."""
        runs = self._client.search_runs(
            [self._get_or_create_experiment(about)],
            f"tags.`{_RUN_TAG}` = '{about.run_id}'",
            max_results=1,
        )
        return str(runs[0].info.run_id) if runs else ""

    def _create_run(self, about: RunDescription) -> str:
        """Create the run in MLflow; return its id there."""
        run = self._client.create_run(
            self._get_or_create_experiment(about),
            start_time=about.started_unix_ns // 1_000_000,
            run_name=about.name,
            tags={_RUN_TAG: about.run_id},
        )
        return str(run.info.run_id)

    def _describe(self, about: RunDescription) -> None:
        """Log the configuration to MLflow; an existing parameter never changes."""
        there = self._client.get_run(self._run_id).data.params
        params = [
            self._param(name, str(value))
            for name, value in ((_allowed(key), value) for key, value in about.config.items())
            if name not in there
        ]
        tags = [self._tag(name, str(value)) for name, value in about.facts.items()]
        tags += [self._tag(f"vitals.tag.{_allowed(tag)}", "true") for tag in about.tags]
        for part in _split_into_chunks(params, _OTHERS_AT_ONCE):
            self._client.log_batch(self._run_id, params=part, synchronous=True)
        self._log_tags(tags)

    def _log_tags(self, tags: Sequence[Any]) -> None:
        """Log the tags of the MLflow run, in requests of an allowed size."""
        for part in _split_into_chunks(tags, _OTHERS_AT_ONCE):
            self._client.log_batch(self._run_id, tags=part, synchronous=True)

    def write(self, entries: Sequence[Entry]) -> None:
        """Write the entries to MLflow; each request returns once it is stored."""
        metrics = [
            self._metric(_allowed(name), value, entry.time_unix_ns // 1_000_000, entry.step)
            for entry in entries
            if isinstance(entry, TrackerRow)
            for name, value in entry.values.items()
        ]
        if self._unclean:
            there = self._logged_points({metric.key for metric in metrics})
            metrics = [m for m in metrics if (m.key, m.step, m.timestamp) not in there]
            self._unclean = False
        for part in _split_into_chunks(metrics, _METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=part, synchronous=True)
        self._log_tags([tag for entry in entries for tag in self._entry_tags(entry)])

    def _logged_points(self, names: Iterable[str]) -> set[Point]:
        """Return the points of these metrics that MLflow has already."""
        return {
            (metric.key, metric.step, metric.timestamp)
            for name in names
            for metric in self._client.get_metric_history(self._run_id, name)
        }

    def _entry_tags(self, entry: Entry) -> list[Any]:
        """Return an entry's tag for MLflow; none for values, or for too many notes."""
        if isinstance(entry, TrackerRow):
            return []
        if not isinstance(entry, ActionNote):
            return [self._tag(f"vitals.attempt-{entry.attempt:04d}", entry.text)]
        self.kept["num_notes"] += 1
        if self.kept["num_notes"] > MAX_NOTES and entry.level == "info":
            return []
        return [self._tag(f"vitals.{entry.key}", entry.text)]

    def close(self, state: RunState) -> None:
        """Set the run's end in MLflow."""
        self._client.set_terminated(self._run_id, _STATES.get(state, "KILLED"))


def _allowed(name: str) -> str:
    """Return a name for MLflow: ``_`` replaces each invalid character."""
    return _NOT_ALLOWED.sub("_", name).strip("/. ") or "_"


def _split_into_chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """Return the items in parts that MLflow accepts in one request."""
    return (items[at : at + size] for at in range(0, len(items), size))
