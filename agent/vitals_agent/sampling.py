"""Takes the samples of one round and writes them into every active run's spool."""

import logging
from collections.abc import Iterable

from trainvitals.catalog import GPU_SCHEMA, NODE_SCHEMA, PROCESS_SCHEMA
from trainvitals.records import Note
from trainvitals.rows import Value
from vitals_agent.faults import Faults
from vitals_agent.gpu import GpuReport, GpuSampler
from vitals_agent.host import HostSampler
from vitals_agent.run import ServedRun

log = logging.getLogger("vitals_agent")


class Sampling:
    """The three samplers; one that fails leaves the others' rows as they are.

    ``node`` and ``gpus`` hold the newest values; they are replaced, never changed.
    """

    def __init__(self, host: HostSampler, gpu: GpuSampler, faults: Faults) -> None:
        self.node: dict[str, Value] = {}
        self.gpus: dict[str, dict[str, Value]] = {}
        self._host = host
        self._gpu = gpu
        self._faults = faults
        self._said: dict[str, set[str]] = {}

    def sample(self, runs: Iterable[ServedRun]) -> None:
        """Sample once and write the rows. Without an active run, only the newest values change."""
        active = [run for run in runs if run.active]
        with self._faults.contained("sampler.node"):
            self.node = {}
            self.node = self._host.sample()
            for run in active:
                run.node_source.sample(NODE_SCHEMA, [self.node])
        with self._faults.contained("sampler.process"):
            for run in active:
                self._sample_ranks(run)
        with self._faults.contained("sampler.gpu"):
            self.gpus = {}
            report = self._gpu.sample()
            self.gpus = {sample.uuid: sample.values for sample in report.samples}
            for run in active:
                self._write_gpus(run, report)

    def forget(self, run_id: str) -> None:
        """Drop what is known of a run that is not served any more."""
        self._said.pop(run_id, None)

    def close(self) -> None:
        """Let go of the GPUs."""
        self._gpu.close()

    def _sample_ranks(self, run: ServedRun) -> None:
        rows: list[dict[str, Value]] = []
        for tail in run.tails.values():
            if not tail.removed:
                tail.process_values = tail.process.sample()
                who = tail.identity
                rows.append({"rank": who.rank, "pid": who.pid, **tail.process_values})
        run.node_source.sample(PROCESS_SCHEMA, rows)

    def _write_gpus(self, run: ServedRun, report: GpuReport) -> None:
        for sample in report.samples:
            run.gpu_source(sample.uuid).sample(GPU_SCHEMA, [sample.values])
        if self._gpu.absent:
            self._say_once(run, Note(code="no_gpu", text=f"no GPU samples: {self._gpu.absent}"))
        for text in self._gpu.unnamed:
            self._say_once(run, Note(code="gpu_lost", text=text, severity="error"))
        for uuid in report.lost:
            text = f"GPU {uuid} does not answer any more: it may have fallen off the bus"
            run.node_source.say(Note(code="gpu_lost", text=text, severity="error"))
        for uuid in report.back:
            run.node_source.say(Note(code="gpu_back", text=f"GPU {uuid} answers again"))

    def _say_once(self, run: ServedRun, note: Note) -> None:
        said = self._said.setdefault(run.run_id, set())
        if note.text not in said:
            run.node_source.say(note)
            said.add(note.text)
            log.info("%s run=%s", note.text, run.run_id)
