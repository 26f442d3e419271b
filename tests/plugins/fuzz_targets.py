"""Decoders of plugins that are fuzzed: logs and messages of other tools."""

import gzip
import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from tests.collector.rows import RUN
from tests.fuzz.target import Target
from tests.plugins.bridges.otlp_requests import encoded, gauge, point, request
from tests.plugins.bridges.wandb_files import call, framed
from vitals_plugins.bridges.importers import ColumnChoice, read_history
from vitals_plugins.bridges.mirrors.follow import Cursor
from vitals_plugins.bridges.mirrors.worker import MirrorState, MirrorStateFile
from vitals_plugins.bridges.mirrors.worker import TrackerTarget as MirrorTarget
from vitals_plugins.bridges.otlp import decode_otlp_request


def read_log(name: str, folder: Path, raw: bytes) -> None:
    (folder / name).write_bytes(raw)
    read_history(folder / name, ColumnChoice())


def csv_file() -> bytes:
    return b"step,loss,grad_norm\n" + b"".join(b"%d,%d.5,1e-3\n" % (i, i) for i in range(5))


def trainer_state() -> bytes:
    log = [{"step": i, "loss": 1.5, "grad_norm": 0.5, "epoch": 0.1} for i in range(4)]
    return json.dumps({"log_history": log, "logging_steps": 1}).encode()


def wandb_file() -> bytes:
    return framed([call({"train/loss": 0.5 * i, "lr": 1e-3}, step=i) for i in range(4)])


def tensorboard_file() -> bytes:
    """An event file of scalars, framed as TensorBoard frames it, by its published format."""
    version = b"\x09" + struct.pack("<d", 1.7e9) + b"\x1a\x0dbrain.Event:2"
    return struct.pack("<QI", len(version), 0) + version + struct.pack("<I", 0)


def otlp_request():
    return request(gauge("depth", point(1.5, step=3, disk="a"), point(2)))


OTLP = json.dumps(otlp_request()).encode()
MIRROR = msgspec.json.encode(
    MirrorState(target="wandb", run_id=RUN, cursor=Cursor(attempts={1: 7}, scalars={"x": {1: 3}}))
)


def read_otlp(is_json: bool, _folder: Path, raw: bytes) -> None:
    decode_otlp_request(raw, is_json=is_json)


def read_mirror_state(folder: Path, raw: bytes) -> None:
    state = MirrorStateFile(folder, RUN, MirrorTarget("wandb", ""))
    state.path.write_bytes(raw)
    state.load()


def gzipped(raw: bytes) -> bytes:
    return gzip.compress(raw, mtime=0)


def of_log(name: str, sample: Callable[[], bytes]) -> Target:
    """Return the target that is one file of another logger."""
    return Target(name=name, samples=lambda: [sample()], read=partial(read_log, name))


TARGETS = [
    of_log("log.csv", csv_file),
    of_log("log.csv.gz", lambda: gzipped(csv_file())),
    of_log("trainer_state.json", trainer_state),
    of_log("run-x.wandb", wandb_file),
    Target(
        name="tensorboard",
        samples=lambda: [tensorboard_file()],
        read=partial(read_log, "events.out.tfevents.1.host.1.0"),
        is_partial=True,
    ),
    Target(name="otlp", samples=lambda: [encoded(otlp_request())], read=partial(read_otlp, False)),
    Target(name="otlp-json", samples=lambda: [OTLP], read=partial(read_otlp, True)),
    Target(name="mirror", samples=lambda: [MIRROR], read=read_mirror_state),
]
