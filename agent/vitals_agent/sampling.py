"""Takes the samples of one round and writes them into every active run's spool.

A call into the driver of a broken GPU may never return: it is made on a separate thread, without
waiting for it.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from trainvitals.catalog import GPU_SCHEMA, NODE_SCHEMA, PROCESS_SCHEMA
from trainvitals.records import Note
from trainvitals.rows import Value
from vitals_agent.faults import Faults
from vitals_agent.gpu import GpuReport, GpuSampler
from vitals_agent.host import HostSampler
from vitals_agent.run import ServedRun

log = logging.getLogger("vitals_agent")

T = TypeVar("T")

Spawn = Callable[[str, Callable[[], None]], None]
"""Starts a function and returns at once; also takes its name."""


def on_a_thread(name: str, function: Callable[[], None]) -> None:
    """Run a sample or another call that may hang on a daemon thread of the agent."""
    threading.Thread(target=function, name=name, daemon=True).start()


class DetachedCall(Generic[T]):
    """Makes one call at a time; the caller polls for the result.

    For one owner. If a call never returns, no other one is started: at most one thread is lost.

    Args:
        name: name of the thread.
        call: may take any time.
        spawn: replaced in tests by a function that calls at once.
    """

    def __init__(self, name: str, call: Callable[[], T], *, spawn: Spawn = on_a_thread) -> None:
        self._name = name
        self._call = call
        self._spawn = spawn
        self._begun: float | None = None
        self._outcome: tuple[T | None, Exception | None] | None = None

    def start(self, now: float) -> bool:
        """Start a sample that may hang; return False while the last one is in progress."""
        if self._begun is not None:
            return False
        self._begun = now
        try:
            self._spawn(self._name, self._run)
        except BaseException:
            self._begun = None  # no thread was available: the next call may retry
            raise
        return True

    def pop_result(self) -> T | None:
        """Return a finished GPU sample once, or raise its error; None if there is none."""
        if self._outcome is None:
            return None
        (result, error), self._outcome, self._begun = self._outcome, None, None
        if error is not None:
            raise error
        return result

    def seconds_out(self, now: float) -> float:
        """Return for how long a GPU sample has been in progress; 0 if none is."""
        return 0.0 if self._begun is None or self._outcome is not None else now - self._begun

    def _run(self) -> None:
        """Call the GPU driver, and store the sample or the error for the agent."""
        try:
            self._outcome = (self._call(), None)
        except Exception as error:  # noqa: BLE001 - raised by ``pop_result``
            self._outcome = (None, error)


# ------------------------------------------------------------------------------------- the samplers


HUNG_SECONDS = 10.0
"""Eight GPUs that measure PCIe need a third of a second; a broken one may block forever."""


_HUNG = "the GPU driver does not respond"


class Sampling:
    """The three samplers; one that fails does not affect the others' rows.

    The GPUs are queried on a separate thread, because a call into the driver of a broken GPU may
    never return. Then their rows are missing, which is reported once, and the rest continues.

    ``node`` and ``gpus`` hold the latest values; they are replaced, never changed.
    """

    def __init__(
        self, host: HostSampler, gpu: GpuSampler, faults: Faults, *, spawn: Spawn = on_a_thread
    ) -> None:
        self.node: dict[str, Value] = {}
        self.gpus: dict[str, dict[str, Value]] = {}
        self.hung = ""
        """Description of the GPU that blocks the driver; empty while the driver responds."""
        self._host = host
        self._gpu = gpu
        self._faults = faults
        self._spawn = spawn
        self._asking = DetachedCall("vitals-agent-gpu", gpu.sample, spawn=spawn)
        self._noted: dict[str, set[str]] = {}

    def sample(self, runs: Iterable[ServedRun], now: float) -> None:
        """Sample once and write the rows. Without an active run, only the latest values change.

        The GPUs are only queried here: ``write_gpu_samples`` writes their values.
        """
        active = [run for run in runs if run.has_open_journals]
        with self._faults.contained("sampler.node"):
            self.node = {}
            self.node = self._host.sample()
            for run in active:
                run.node_source.sample(NODE_SCHEMA, [self.node])
        with self._faults.contained("sampler.process"):
            for run in active:
                self._sample_ranks(run)
        with self._faults.contained("sampler.gpu"):
            self._asking.start(now)

    def write_gpu_samples(self, runs: Iterable[ServedRun], now: float) -> None:
        """Write the GPU samples since the last call, or report that the driver hangs."""
        with self._faults.contained("sampler.gpu"):
            active = [run for run in runs if run.has_open_journals]
            try:
                report = self._asking.pop_result()
            except Exception:
                self.gpus = {}
                raise
            if report is not None:
                self._report_driver_back(active)
                self.gpus = {sample.uuid: sample.values for sample in report.samples}
                for run in active:
                    self._write_gpus(run, report)
            elif self._asking.seconds_out(now) >= HUNG_SECONDS:
                self._report_driver_hang(active)

    def forget(self, run_id: str) -> None:
        """Discard the sampling state of a run that the agent released."""
        self._noted.pop(run_id, None)

    def close(self) -> None:
        """Release the GPUs at the agent's end, without waiting: that call may hang too."""
        if not self.hung:
            self._spawn("vitals-agent-gpu-close", self._gpu.close)

    def _sample_ranks(self, run: ServedRun) -> None:
        """Write a sample of each rank's process on this node: CPU time, memory, I/O."""
        rows: list[dict[str, Value]] = []
        for tail in run.tails.values():
            if not tail.removed:
                tail.process_values = tail.process.sample()
                who = tail.identity
                rows.append({"rank": who.rank, "pid": who.pid, **tail.process_values})
        run.node_source.sample(PROCESS_SCHEMA, rows)

    def _write_gpus(self, run: ServedRun, report: GpuReport) -> None:
        """Write a round of GPU samples into the run; report lost GPUs and Xid errors."""
        for sample in report.samples:
            source = run.gpu_source(sample.uuid)
            source.sample(GPU_SCHEMA, [sample.values], taken=report.taken)
        for note in self._gpu.notes:
            self._report_once(run, note)
        for uuid, code in report.xids:
            text = f"GPU {uuid} reported Xid {code}"
            run.node_source.write_event(Note(code="gpu_xid", text=text, severity="warning"))
        for uuid in report.lost:
            text = f"GPU {uuid} stopped responding: it may have fallen off the bus"
            run.node_source.write_event(Note(code="gpu_lost", text=text, severity="error"))
        for uuid in report.back:
            run.node_source.write_event(Note(code="gpu_back", text=f"GPU {uuid} responds again"))

    # ------------------------------------------------------------------------ a driver that hangs

    def _report_driver_hang(self, active: Iterable[ServedRun]) -> None:
        """Report to the runs of this node that the GPU driver hangs."""
        if not self.hung:
            self.gpus = {}  # the latest values are outdated
            asking = self._gpu.asking
            self.hung = f"asked for GPU {asking}" if asking else "asked which GPUs there are"
        text = f"{_HUNG}, {self.hung}: there are no GPU samples until it does"
        for run in active:
            self._report_once(run, Note(code="gpu_hung", text=text, severity="error"))

    def _report_driver_back(self, active: Iterable[ServedRun]) -> None:
        """Report to the runs of this node that the GPU driver responds again."""
        if self.hung:
            self.hung = ""
            for run in active:
                run.node_source.write_event(
                    Note(code="gpu_back", text="the GPU driver responds again")
                )
            for texts in self._noted.values():
                texts -= {text for text in texts if text.startswith(_HUNG)}

    def _report_once(self, run: ServedRun, note: Note) -> None:
        """Write a note of the GPU sampler into a run, unless it was written before."""
        texts = self._noted.setdefault(run.run_id, set())
        if note.text not in texts:
            run.node_source.write_event(note)
            texts.add(note.text)
            log.info("%s run=%s", note.text, run.run_id)
