"""How the ranks are started, and what is known of those that hang or die."""

import os

import msgspec
import pytest

from tests.plugins.lab.preflight.ranks import healthy
from trainvitals.errors import UsageError
from vitals_plugins.lab.preflight.cli import conclude
from vitals_plugins.lab.preflight.history import NodeHistory
from vitals_plugins.lab.preflight.judge import judge
from vitals_plugins.lab.preflight.launch import (
    PROGRAM,
    keep_latest,
    launch,
    launcher_command,
    local_words,
    parse_line,
)
from vitals_plugins.lab.preflight.report import (
    DONE,
    FIGURES,
    MARK,
    STAGES,
    ClockOffset,
    PairTime,
    report_lines,
    round_figure,
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 1", "torchrun --nproc-per-node 2 -m"),
        ("torchrun --nproc-per-node 2", "torchrun --nproc-per-node 2 -m"),
        ("torchrun", "torchrun -m"),
        ("torchrun --standalone -m app.train -m x", "torchrun --standalone -m"),
        ("torchrun --standalone -- train.py", "torchrun --standalone -m"),
        ("torchrun --standalone train.py torchrun --nnodes 2", "torchrun --standalone -m"),
        ("srun -N 2 /opt/torchrun --nnodes=2 t.py", "srun -N 2 /opt/torchrun --nnodes=2 -m"),
        ("srun -J torchrun torchrun --nnodes=2 t.py", "srun -J torchrun torchrun --nnodes=2 -m"),
        ("srun -c 8 --prolog=/x/torchrun --label --ntasks=2 torchrun --nnodes=2 t.py",
         "srun -c 8 --prolog=/x/torchrun --label --ntasks=2 torchrun --nnodes=2 -m"),
        ("docker run --rm example.org/train:1 torchrun --standalone t.py",
         "docker run --rm example.org/train:1 torchrun --standalone -m"),
        ("uv run -- torchrun --standalone t.py", "uv run -- torchrun --standalone -m"),
        ("python -m torch.distributed.run a.py b", "python -m torch.distributed.run -m"),
        ("srun -n 2 python3.11 -u -m torch.distributed.run --nnodes=2 a.py",
         "srun -n 2 python3.11 -u -m torch.distributed.run --nnodes=2 -m"),
        ("python /opt/bin/torchrun t.py", "python /opt/bin/torchrun -m"),
        ("torchrun -mr 3 app.train", "torchrun -mr 3 --redirects=0 -m"),
        ("torchrun --no-python bash -c x", "torchrun -m"),
        ("torchrun --no-py bash -c x", "torchrun -m"),
        ("torchrun --run-path --nnodes 1 /a/b.py", "torchrun --nnodes 1 -m"),
        ("torchrun --redirects 3 t.py", "torchrun --redirects 3 --redirects=0 -m"),
        ("torchrun -r 3 -t 3 t.py", "torchrun -r 3 -t 3 --redirects=0 --tee=0 -m"),
        ("torchrun --local-ranks-filter 1 t.py",
         "torchrun --local-ranks-filter 1 --local-ranks-filter= -m"),
    ],
)  # fmt: skip
def test_our_program_replaces_the_script_and_its_arguments(words, expected):
    assert [*expected.split(), PROGRAM, "{}"] == launcher_command(words.split(), "{}")


@pytest.mark.parametrize(
    "words",
    [
        "python train.py",
        "torchrun --no-such-option 2 train.py",
        # Each of them would start a script, which gets "torchrun" as an argument.
        "python train.py --launcher torchrun",
        "python train.py --launcher torchrun --standalone",
        "python train.py --launcher=slurm torchrun --standalone",
        "python -m app.train torchrun --standalone",
        "python -mapp torchrun --standalone",
        "python -c code torchrun --standalone",
        "python train.py -m torch.distributed.run --standalone",
        "bash run.sh torchrun",
        "bash run torchrun --standalone",
        "./run torchrun --standalone",
        "make torchrun",
        "sbatch job torchrun --standalone",
        "mpirun python main.py +launcher torchrun epochs=3",
        "mpirun python -m app torchrun --standalone",
        "srun main +launcher torchrun --standalone",
        "srun main --launcher torchrun --standalone",
        "srun main torchrun",
        "srun main torchrun epochs=3",
        "srun train.py torchrun --standalone",
        "srun /bin/cat torchrun --standalone",
        "timeout 60 cat torchrun --standalone",
        "srun torchrun train.py --launcher torchrun --standalone",
        "srun -l torchrun --nnodes=2 app --mode=x torchrun --standalone",
    ],
)
def test_words_that_may_start_the_training_are_a_usage_error(words):
    with pytest.raises(UsageError):
        launcher_command(words.split(), "{}")


def test_a_quoted_torchrun_has_its_own_hint():
    with pytest.raises(UsageError, match="without bash -c"):
        launcher_command(["bash", "-c", "cd x && torchrun train.py"], "{}")


def test_variables_do_not_change_how_our_program_is_started():
    names = ("PET_RUN_PATH", "PET_NO_PYTHON", "PET_MODULE", "PET_REDIRECTS", "PET_NNODES")
    environ = {**os.environ, **dict.fromkeys(names, "1")}
    launched = launch(["sh", "-c", "env | grep ^PET_"], environ, seconds=60.0)
    assert ("PET_NNODES=1",) == launched.tail


def test_a_report_survives_the_label_of_srun_and_other_lines_are_none():
    (report,) = healthy(1)
    raw = MARK + msgspec.json.encode(report) + b"\n"
    assert report == parse_line(b"0: " + raw)
    assert parse_line(b"W1129 torch\n") is None
    assert parse_line(raw[:40]) is None


def test_lines_of_the_largest_job_are_shorter_than_the_parts_of_slurm():
    (report, *_) = [
        msgspec.structs.replace(
            each,
            rank=99_999,
            world_size=100_000,
            node="x" * 63,
            rack="s" * 80,
            device="NVIDIA H100 80GB HBM3",
            versions=dict.fromkeys(
                ("vitals", "python", "torch", "kernel", "cuda", "nccl", "driver"), "9" * 30
            ),
            limits=dict.fromkeys(each.limits, 1 << 62),
            figures={name: round_figure(value * 1e4) for name, value in each.figures.items()},
            offset=ClockOffset(-1234.567891, 0.123456),
            ring_bytes_per_second=round_figure(123456789.1),
            pairs=tuple(
                PairTime(99_900 + pair.peer, round_figure(pair.bytes_per_second))
                for pair in each.pairs
            ),
        )
        for each in healthy(17)
    ]
    assert 16 == len(report.pairs)
    lines = report_lines(report, has_facts=True).splitlines(keepends=True)
    assert [] == [line for line in lines if len(line) >= 1000]
    reports = {}
    for line in lines:
        keep_latest(reports, parse_line(line))
    assert {99_999: report} == reports
    keep_latest(reports, parse_line(report_lines(report, has_facts=False)))
    assert {99_999: report} == reports


def test_a_report_is_final_after_an_error_of_a_collective_or_a_timeout():
    (report,) = healthy(1)
    assert report.is_final
    report = msgspec.structs.replace(report, stage=STAGES.index("disk"), errors={"disk": "full"})
    assert not report.is_final
    assert msgspec.structs.replace(report, timed_out=True).is_final
    assert msgspec.structs.replace(report, errors={"pairs": "closed"}).is_final


def test_an_earlier_report_from_another_node_does_not_replace_a_later_one():
    (report,) = healthy(1)
    reports = {}
    keep_latest(reports, report)
    keep_latest(reports, msgspec.structs.replace(report, stage=2))
    assert {0: report} == reports


def test_a_rank_that_never_ends_is_stopped_and_named(tmp_path):
    reports = [msgspec.structs.replace(r, stage=STAGES.index("join")) for r in healthy(2)]
    reports[1] = msgspec.structs.replace(reports[1], stage=STAGES.index("disk"))
    lines = b"".join(MARK + msgspec.json.encode(each) + b"\n" for each in reports)
    (tmp_path / "lines").write_bytes(lines)
    command = ["sh", "-c", f"cat {tmp_path}/lines; exec sleep 6000"]
    launched = launch(command, os.environ, seconds=10.0)
    assert launched.exit_code is None
    assert [("no_answer", (1,))] == [(each.kind, each.ranks) for each in judge(launched.reports)]


def test_the_last_lines_of_a_launcher_that_fails_are_kept():
    launched = launch(["sh", "-c", "echo no such host; exit 1"], os.environ, seconds=60.0)
    assert (1, ("no such host",)) == (launched.exit_code, launched.tail)


def test_a_command_that_does_not_exist_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError):
        launch([str(tmp_path / "torchrun")], os.environ, seconds=60.0)


@pytest.mark.dist
def test_two_real_ranks_measure_all_and_the_skewed_clock_is_found(tmp_path):
    settings = {"seconds": 100.0, "directory": str(tmp_path), "checkpoint_bytes": 1 << 20}
    command = launcher_command(
        local_words(),
        msgspec.json.encode(settings).decode(),
        "tests.plugins.lab.preflight.skewed_rank",
    )
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    launched = launch(command, environ, seconds=200.0)
    assert [DONE, DONE] == [each.stage for each in launched.reports], launched
    first, second = launched.reports
    assert ({}, {}) == (first.errors, second.errors)
    assert {spec.name for spec in FIGURES} == first.figures.keys()
    assert all(value > 0 for value in first.figures.values())
    assert [1] == [pair.peer for pair in first.pairs]
    assert first.check_id == second.check_id != ""
    assert second.offset is not None
    assert abs(second.offset.seconds - 60) <= second.offset.uncertainty + 1
    history = NodeHistory(tmp_path)
    result = conclude(launched, history, now_unix_ns=1)
    assert "clock_skew" in [each.kind for each in result.findings]
    assert {"n0", "n1"} == history.read_all().keys()
    assert [] == list(tmp_path.glob(".preflight-*"))
