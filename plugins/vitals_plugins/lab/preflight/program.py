"""Measures one rank: ``torchrun ... -m vitals_plugins.lab.preflight.program SETTINGS``.

After each measurement it prints the results so far as one line, so that the parent knows the stage
of a rank that hangs or dies. It ends before its deadline, whatever a device or a peer does. The
paths for CUDA never ran on a GPU yet.
"""

from __future__ import annotations

import time

_STARTED = time.monotonic()  # before torch is loaded, which takes seconds on a busy machine

import ctypes  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import resource  # noqa: E402
import secrets  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from contextlib import suppress  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402

import msgspec  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from trainvitals import __version__  # noqa: E402
from trainvitals.io.private import is_memory_backed  # noqa: E402
from vitals_plugins.lab.preflight.report import (  # noqa: E402
    DONE,
    NUM_LOCAL,
    NUM_WORKERS,
    STAGES,
    ClockOffset,
    PairTime,
    PreflightReport,
    clock_offset,
    num_turns,
    pair_of,
    report_lines,
    round_figure,
)
from vitals_plugins.lab.selftest import all_reduce, gemm  # noqa: E402

MAX_TURNS = 16
"""Turns of the tournament: with more than 17 ranks, each meets 16 others."""
NUM_WINDOWS = 5
NUM_PINGS = 8
NUM_EXCHANGES = (2, 8)
"""Exchanges of a pair in each tournament; the fastest counts, because a disturbance rarely lasts
that long. The first is short: with a slow link, all pairs must be measured to compare them."""
NUM_SYNCS = 8
MAX_SUMS = 50
LATE_SECONDS = 3.0
"""Time before the end in which an error of a collective follows from the timeout of a rank."""
MAX_MEMORY_BYTES = 16 << 20
MIN_WRITE_BYTES = 1 << 20
_CHUNK_BYTES = 8 << 20
_MAX_NODE = 253
_MAX_TEXT = 80
_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1


class PreflightSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and times, the same for all ranks."""

    seconds: float
    """Time from the start of this process to its end."""
    directory: str
    """Directory of the checkpoint write."""
    checkpoint_bytes: int
    """Bytes that each rank writes."""


class ComputedSamples(Dataset[torch.Tensor]):
    """Samples of 256 KiB that a worker computes."""

    def __len__(self) -> int:
        """Return a number that no share of the budget reaches."""
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one sample."""
        return torch.full((1 << 16,), float(index % 997)).sqrt_()


class Rank:
    """Measurements of this process."""

    def __init__(
        self,
        settings: PreflightSettings,
        environ: Mapping[str, str],
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._environ = environ
        self._wall_clock = wall_clock
        self._local_rank = int(environ["LOCAL_RANK"])
        self._rank, self._world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        errors = _select_gpu(self._local_rank, environ)
        is_gpu = torch.cuda.is_available() and not errors
        self._device = torch.device("cuda", self._local_rank) if is_gpu else torch.device("cpu")
        name = torch.cuda.get_device_name(self._device) if is_gpu else _processor()
        self._end = _STARTED + settings.seconds
        self.report = PreflightReport(
            rank=self._rank,
            world_size=self._world_size,
            node=node_name(environ, socket.gethostname())[:_MAX_NODE],
            device=name[:_MAX_TEXT],
            is_gpu=is_gpu,
            rack=rack_name(environ)[-_MAX_TEXT:],
            versions=_versions(is_gpu),
            limits=_limits(),
            errors=errors,
        )
        self._store: TCPStore | None = None

    def _publish_in_store(self) -> None:
        """Connect to the store in which the preflight's ranks share their reports."""
        # torchrun hosts the store in its agent, unless the environment says otherwise.
        is_hosted = self._environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store = self._connect(is_master=self._rank == 0 and not is_hosted)

    def _connect(self, *, is_master: bool = False) -> TCPStore:
        """Return a connection to the store of the preflight's ranks."""
        return TCPStore(
            self._environ["MASTER_ADDR"],
            int(self._environ["MASTER_PORT"]),
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(self._left(), 1.0)),
        )

    def _left(self) -> float:
        """Return the seconds that are left for the preflight."""
        return self._end - time.monotonic()

    # -------------------------------------------------------------------------------- reporting

    def publish(self) -> None:
        """Print the preflight's report of this rank, and store it for the other nodes."""
        self._write(self.report)
        self._share_report()

    def _share_report(self) -> None:
        """Store the preflight's report of this rank for the other nodes."""
        if self._store is None:
            return
        # Without the store, the other nodes report this rank as missing.
        with suppress(RuntimeError):
            self._store.set(self._key(self._rank), msgspec.json.encode(self.report).decode())

    def _key(self, rank: int) -> str:
        """Return the store's key for a rank's preflight report."""
        return f"vitals-preflight/{self._environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{rank}"

    def _write(self, report: PreflightReport) -> None:
        """Print a preflight report for the launcher."""
        # One call, so that lines of several ranks do not mix (up to 4 KiB in a pipe).
        is_first = report.stage == 0 or report.rank != self._rank
        os.write(1, report_lines(report, has_facts=is_first))

    def print_others(self) -> None:
        """Print other nodes' preflight reports, for a parent that sees only this one's ranks."""
        if self._local_rank:
            return
        with suppress(RuntimeError):  # the store ended with its node; the rest is reported
            store = self._connect()
            pending = set(range(self._world_size)) - {self._rank}
            while pending:
                is_last = self._left() < 1.0
                for rank in sorted(pending):
                    if not store.check([self._key(rank)]):
                        continue
                    report = msgspec.json.decode(store.get(self._key(rank)), type=PreflightReport)
                    if report.is_final or is_last:
                        self._write(report)
                        pending.discard(rank)
                if is_last:
                    break
                time.sleep(_POLL_SECONDS)

    def end_at_deadline(self) -> None:
        """Start a thread that ends this preflight process if a measurement does not."""

        def end() -> None:
            while (left := self._left()) > 0:  # the ranks may agree on an earlier end
                time.sleep(min(left, _POLL_SECONDS))
            self.report = msgspec.structs.replace(self.report, timed_out=True)
            self._write(self.report)
            # The store may be on a node that does not respond.
            sharing = threading.Thread(target=self._share_report, daemon=True)
            sharing.start()
            sharing.join(1.0)
            os._exit(0)

        threading.Thread(target=end, daemon=True).start()

    # ----------------------------------------------------------------------------- measurements

    def measure(self) -> None:
        """Run the preflight's measurements. An error ends only those that need the other ranks."""
        stages: dict[str, Callable[[], None]] = {
            "start": self._publish_in_store,
            "loader": self._measure_loader,
            "gemm": self._measure_gemm,
            "memory": self._measure_memory,
            "disk": self._measure_disk,
            "join": self._join,
            "clock": self._measure_clock,
            "all-reduce": self._measure_ring,
            "pairs": self._measure_pairs,
            "loader again": self._measure_loader,
        }
        for index, stage in enumerate(STAGES):
            self.report = msgspec.structs.replace(self.report, stage=index)
            self.publish()
            try:
                stages[stage]()
            except (OSError, RuntimeError) as error:  # reported; the parent decides
                errors = {**self.report.errors, stage: _first_line(error)}
                # At the end, an error only shows that another rank ended first.
                timed_out = index >= NUM_LOCAL and self._left() < LATE_SECONDS
                self.report = msgspec.structs.replace(
                    self.report, errors=errors, timed_out=timed_out
                )
                if index >= NUM_LOCAL:
                    self.publish()
                    return
        self.report = msgspec.structs.replace(self.report, stage=DONE)
        self.publish()

    def _set_figure(self, name: str, value: float) -> None:
        """Add a measured figure to the preflight's report."""
        figures = {**self.report.figures, name: round_figure(value)}
        self.report = msgspec.structs.replace(self.report, figures=figures)

    def _share(self, part: float) -> float:
        """Return the seconds for a measurement, as a part of the preflight's."""
        return part * self._settings.seconds

    def _best_rate(self, work: Callable[[], object], amount: float, seconds: float) -> float:
        """Return the preflight's rate in the best window; a lasting fault slows all of them.

        A window is longer than the 0.1 s period of a control group, so that it contains the pauses
        of a throttled one.
        """
        work()
        self._synchronize()
        best = 0.0
        for _ in range(NUM_WINDOWS):
            start, num = time.monotonic(), 0
            while time.monotonic() - start < max(seconds / NUM_WINDOWS, 0.01):
                work()
                self._synchronize()
                num += 1
            best = max(best, num * amount / (time.monotonic() - start))
        return best

    def _synchronize(self) -> None:
        """Wait until the GPU has done the measured work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _measure_loader(self) -> None:
        """Measure the bytes per second of a data loader on this rank; the better of two counts.

        The first time, other ranks may still start or have ended their loader, so that ranks of
        equal cores differ. After an exchange all ranks measure at once, but some never get there.
        """
        batches = iter(DataLoader(ComputedSamples(), batch_size=16, num_workers=NUM_WORKERS))
        num_bytes = next(batches).nbytes
        rate = self._best_rate(lambda: next(batches), num_bytes, self._share(0.06))
        before = self.report.figures.get("loader_bytes_per_second", 0.0)
        self._set_figure("loader_bytes_per_second", max(rate, before))

    def _measure_gemm(self) -> None:
        """Measure this rank's FLOP/s in a matrix product, and check one with a known result."""
        dtype = torch.bfloat16 if self.report.is_gpu else torch.float32
        wrong = gemm(self._device, dtype, self._rank)
        if wrong is not None:
            self._add_wrong(str(wrong))
        size = 8192 if self.report.is_gpu else 512
        left = torch.ones((size, size), dtype=dtype, device=self._device)
        right = torch.ones_like(left)
        product = torch.empty_like(left)
        rate = self._best_rate(
            lambda: torch.mm(left, right, out=product), 2.0 * size**3, self._share(0.1)
        )
        self._set_figure("gemm_flops_per_second", rate)

    def _add_wrong(self, text: str) -> None:
        """Add a wrong result to the preflight's report."""
        wrong = (*self.report.wrong, text)
        self.report = msgspec.structs.replace(self.report, wrong=wrong)

    def _measure_memory(self) -> None:
        """Measure the bytes per second that this rank's device copies in memory."""
        # Larger than the caches.
        num_bytes = 1 << 30 if self.report.is_gpu else 64 << 20
        source = torch.ones(num_bytes // 4, device=self._device)
        target = torch.empty_like(source)
        rate = self._best_rate(lambda: target.copy_(source), 2.0 * num_bytes, self._share(0.06))
        self._set_figure("memory_bytes_per_second", rate)

    def _measure_disk(self) -> None:
        """Measure how fast this rank writes and syncs a file, like a checkpoint."""
        directory = Path(self._settings.directory)
        directory.mkdir(parents=True, exist_ok=True)
        num_bytes = bytes_to_write(
            self._settings.checkpoint_bytes,
            free=shutil.disk_usage(directory).free,
            num_ranks=self._world_size,
            is_memory=is_memory_backed(directory),
        )
        if not num_bytes:
            return  # the missing figure is reported
        path = directory / f".preflight-{secrets.token_hex(8)}"
        chunk = os.urandom(min(_CHUNK_BYTES, num_bytes))  # not zeros: file systems compress
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            path.unlink()  # nothing is left if this process is killed
            start, written = time.monotonic(), 0
            until = start + self._share(0.1)
            while written < num_bytes and time.monotonic() < until:
                written += os.write(fd, chunk[: num_bytes - written])
                os.fsync(fd)  # each chunk: one sync at the end could take minutes
            self._set_figure("disk_bytes_per_second", written / (time.monotonic() - start))
            syncs: list[float] = []
            until = time.monotonic() + self._share(0.05)
            while len(syncs) < NUM_SYNCS and (not syncs or time.monotonic() < until):
                start = time.monotonic()
                os.pwrite(fd, chunk[:4096], 0)
                os.fsync(fd)
                syncs.append(time.monotonic() - start)
            self._set_figure("fsync_seconds", max(sorted(syncs)[len(syncs) // 2], 1e-6))
        finally:
            os.close(fd)

    def _join(self) -> None:
        """Join the process group of the preflight's ranks."""
        # Its own connection: a blocked call holds the lock of the connection of ``publish``.
        store = PrefixStore(self._key(-1), self._connect())
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.report.is_gpu else "gloo",
            store=store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=max(self._left(), 1.0)),
        )
        if self._rank == 0:
            store.set("id", secrets.token_hex(8))
        check_id = store.get("id").decode()
        self.report = msgspec.structs.replace(self.report, check_id=check_id)
        # One end for all, so that none of them ends while the others still wait for it.
        (left,) = self._least(self._left())
        self._end = time.monotonic() + left

    @staticmethod
    def _least(*values: float) -> list[float]:
        """Return the least of each value over all ranks of the preflight."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        least: list[float] = tensor.tolist()
        return least

    def _measure_clock(self) -> None:
        """Compare the clock with rank 0 for a preflight; it responds to each rank in turn."""
        best = None
        times = torch.zeros(2, dtype=torch.float64)
        if self._rank == 0:
            for rank in range(1, self._world_size):
                for _ in range(NUM_PINGS):
                    dist.recv(times, src=rank)
                    received = self._wall_clock()
                    times[0], times[1] = received, self._wall_clock()
                    dist.send(times, dst=rank)
            best = clock_offset(0.0, 0.0, 0.0, 0.0)
        else:
            for _ in range(NUM_PINGS):
                sent = self._wall_clock()
                dist.send(times, dst=0)
                dist.recv(times, src=0)
                returned = self._wall_clock()
                received, replied = times.tolist()
                offset = clock_offset(sent, received, replied, returned)
                # The fastest exchange has the smallest error.
                if best is None or offset.uncertainty < best.uncertainty:
                    best = ClockOffset(round(offset.seconds, 6), round(offset.uncertainty, 6))
        self.report = msgspec.structs.replace(self.report, offset=best)

    def _measure_ring(self) -> None:
        """Measure the bytes per second of an all-reduce over the preflight's ranks."""
        if self._world_size < 2:
            return
        wrong = all_reduce(self._rank, self._world_size, self._device, 0, reduce=dist.all_reduce)
        if wrong is not None:
            self._add_wrong(str(wrong))
        tensor = torch.zeros((64 << 20 if self.report.is_gpu else 4 << 20) // 4).to(self._device)
        start = time.monotonic()
        self._reduce(tensor)
        (slowest,) = self._least(start - time.monotonic())  # all ranks must agree on the number
        num = int(min(max(self._share(0.04) / max(-slowest, 1e-6), 1), MAX_SUMS))
        seconds = min(self._reduce(tensor) for _ in range(num))
        # As nccl-tests: the bytes that each link carries.
        moved = 2 * (self._world_size - 1) / self._world_size * tensor.nbytes
        rate = round_figure(moved / seconds)
        self.report = msgspec.structs.replace(self.report, ring_bytes_per_second=rate)

    def _reduce(self, tensor: torch.Tensor) -> float:
        """Sum a tensor over the preflight's ranks; return the seconds that it took."""
        start = time.monotonic()
        dist.all_reduce(tensor)
        self._synchronize()
        return max(time.monotonic() - start, 1e-9)

    def _measure_pairs(self) -> None:
        """Measure pairs of ranks: each sends its tensor to the other and adds the received one.

        That is an all-reduce of two ranks, without a process group for each pair.
        """
        tensor = torch.zeros((32 << 20 if self.report.is_gpu else 2 << 20) // 4).to(self._device)
        received = torch.empty_like(tensor)
        best: dict[int, float] = {}
        until = time.monotonic() + self._share(0.25)
        longest = 0.0  # exchange
        turns = range(min(num_turns(self._world_size), MAX_TURNS))
        for num, turn in ((num, turn) for num in NUM_EXCHANGES for turn in turns):
            # Also a barrier: all pairs share the links of a node at the same time, as in training.
            left, slowest = self._least(until - time.monotonic(), -longest)
            if left < -slowest * num:  # the turn would end too late
                break
            peer = pair_of(self._rank, self._world_size, turn)
            if peer is None:
                continue
            start = time.monotonic()
            seconds = min(self._exchange(tensor, received, peer) for _ in range(num))
            longest = max(longest, (time.monotonic() - start) / num)
            best[peer] = max(best.get(peer, 0.0), round_figure(tensor.nbytes / seconds))
            pairs = tuple(PairTime(each, rate) for each, rate in best.items())
            self.report = msgspec.structs.replace(self.report, pairs=pairs)
        dist.barrier()

    def _exchange(self, tensor: torch.Tensor, received: torch.Tensor, peer: int) -> float:
        """Exchange and add tensors with another rank; return the seconds that it took."""
        start = time.monotonic()
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, received, peer)]
        ):
            work.wait()
        tensor.add_(received)
        self._synchronize()
        return max(time.monotonic() - start, 1e-9)


def _first_line(error: Exception) -> str:
    """Return the first line of a measurement's error, cut to a length, for the report."""
    return (str(error) or type(error).__name__).splitlines()[0][:_MAX_TEXT]


def _select_gpu(local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Select this rank's GPU for a preflight; return errors by stage: a rank must always report."""
    num_gpus = torch.cuda.device_count()
    if local_rank < num_gpus:
        try:
            torch.cuda.set_device(local_rank)
        except RuntimeError as error:  # reported
            return {"gemm": _first_line(error)}
    elif num_gpus or (torch.version.cuda is not None and has_unused_gpu(environ)):
        return {"start": f"CUDA finds {num_gpus} GPUs, none for local rank {local_rank}"}
    return {}


def bytes_to_write(limit: int, *, free: int, num_ranks: int, is_memory: bool) -> int:
    """Return a rank's bytes to write to disk: all together use a quarter of the free space.

    Less than 1 MiB would not be a measurement, so the result is 0 then. In a file system in memory,
    the bytes count as memory of the container.
    """
    num_bytes = min(limit, free // (4 * num_ranks), MAX_MEMORY_BYTES if is_memory else limit)
    return num_bytes if num_bytes >= MIN_WRITE_BYTES else 0


def node_name(environ: Mapping[str, str], host_name: str) -> str:
    """Return the name of this node as its scheduler knows it, for the preflight's report.

    Slurm names a node by its short host name.
    """
    name = environ.get("VITALS_NODE") or environ.get("SLURMD_NODENAME")
    if name:
        return name
    is_address = host_name.replace(".", "").isdigit()
    return (host_name if is_address else host_name.partition(".")[0]) or "node"


def rack_name(environ: Mapping[str, str]) -> str:
    """Return the place of this node in the network, for the preflight's report; "" if unknown.

    Slurm with a network topology names the switches above the node, and then the node.
    """
    switches = environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    return environ.get("VITALS_RACK") or switches


def has_unused_gpu(environ: Mapping[str, str], devices: Path = Path("/dev")) -> bool:
    """Return whether the rank may use a GPU of NVIDIA, according to the files of its driver."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return False
    for path in devices.glob("nvidia[0-9]*"):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        except (FileNotFoundError, PermissionError):  # a GPU of another job
            continue
        except OSError:  # the GPU does not respond
            return True
        return True
    return False


def _processor() -> str:
    """Return the processor's name for the preflight's report."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions(is_gpu: bool) -> dict[str, str]:
    """Return this node's software versions for a preflight to compare."""
    versions = {
        "vitals": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
    }
    if is_gpu:
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with suppress(OSError):
            driver = Path("/proc/driver/nvidia/version").read_text(errors="replace").split("  ")
            versions["driver"] = driver[1].split()[0] if len(driver) > 1 else "unknown"
    return {name: version[:_MAX_TEXT] for name, version in versions.items()}


def _limits() -> dict[str, int]:
    """Return this rank's limits for a preflight: open files, bytes of memory, cores."""
    limits = {
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }
    if hasattr(os, "sched_getaffinity"):  # macOS binds no thread
        limits["cores"] = len(os.sched_getaffinity(0))
    with suppress(OSError):  # no shared memory
        limits["shared_bytes"] = shutil.disk_usage("/dev/shm").free
    return limits


def _end_with_launcher() -> None:
    """Let the kernel kill this rank when its launcher ends; a stopped process cannot itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(raw_settings: str, *, wall_clock: Callable[[], float] = time.time) -> None:
    """Measure this rank for a preflight, and end the process with exit code 0."""
    _end_with_launcher()
    torch.set_num_threads(1)
    settings = msgspec.json.decode(raw_settings, type=PreflightSettings)
    rank = Rank(settings, os.environ, wall_clock=wall_clock)
    rank.end_at_deadline()
    rank.measure()
    rank.print_others()
    # Rank 0 may host the store that others still read.
    if rank.report.stage == DONE:
        with suppress(RuntimeError):
            dist.barrier()
    os._exit(0)  # a thread that hangs in a device must not keep the process alive


if __name__ == "__main__":
    main(sys.argv[1])
