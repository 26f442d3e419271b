"""`vitals audit`: what it says of logs that Vitals never watched, and of what is no log."""

import json
import random
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.plugins.bridges.wandb_files import call, framed
from tests.support.control import run_cli
from vitals_plugins.bridges.audit import audit as auditing
from vitals_plugins.bridges.importers import ColumnChoice

HOSTILE = '<img src=x onerror="alert(1)">&|`x`'


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VITALS_CONFIG", "VITALS_DIR"):
        monkeypatch.delenv(name, raising=False)


def losses(kind: str) -> list[tuple[int, float]]:
    """Return steps and losses of a run that is well, or goes wrong at step 400."""
    noise = random.Random(3)
    healthy = [(n, 2.0 + 2.0 / (n + 1) + noise.gauss(0, 0.02)) for n in range(400)]
    after = range(400, 700)
    match kind:
        case "nan":
            return healthy + [(n, float("nan")) for n in after]
        case "storm":  # the loop's own scaler skipped these, say
            bad = [(n, float("nan")) for n in range(400, 440)]
            return healthy + bad + [(n, 2.0 + noise.gauss(0, 0.02)) for n in range(440, 700)]
        case "diverges":
            return healthy + [(n, 8.0 + noise.gauss(0, 0.1)) for n in after]
        case "restarted":
            bad = [(n, float("nan")) for n in range(400, 500)]
            again = [(n, 2.0 + noise.gauss(0, 0.02)) for n in range(300, 700)]
            return healthy + bad + again
    return healthy + [(n, 2.0 + noise.gauss(0, 0.02)) for n in after]


def csv(folder: Path, kind: str, *, name: str = "train.csv", seconds: float | None = None) -> Path:
    path = folder / name
    head = "step,loss,grad_norm" + ("" if seconds is None else ",step_time")
    tail = "" if seconds is None else f",{seconds}"
    rows = [f"{n},{loss!r},1.0{tail}" for n, loss in losses(kind)]
    path.write_text("\n".join([head, *rows]))
    return path


def audited(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert 0 == run_cli("audit", *map(str, arguments)), capsys.readouterr().err
    return capsys.readouterr().out.replace("\\", "")


def test_of_a_healthy_log_it_says_that_nothing_would_have_been_done(tmp_path: Path, capsys):
    said = audited(capsys, csv(tmp_path, "healthy"))
    assert "700 records, steps 0 to 699. Vitals would have done nothing, and told nothing." in said
    assert "## Alarms" not in said


def test_a_run_that_stays_nan_is_an_alarm_that_looks_right_with_what_it_would_have_saved(
    tmp_path: Path, capsys
):
    said = audited(capsys, csv(tmp_path, "nan", seconds=36.0), "--gpus", 8)
    (row,) = [line for line in said.splitlines() if line.startswith("| 400 to ")][:1]
    assert "roll back to step 300; if that changed nothing: roll back " in row
    assert "loss not back by the end, step 699" in row
    assert "| Notice |" in row  # a page comes only with the stop, which is supposed
    assert "looks right" in row
    (saved,) = re.findall(r"Saved in all: about (\d+) steps \((.*)\)\.", said)
    assert 299 - 131 == int(saved[0])  # 400 to 699, less 431 back to 300
    assert "1 h 40 min, 13.4 GPU-hours on 8 GPUs" == saved[1]
    assert "rolled back once, stopped the run never" in said


def test_what_passed_by_itself_looks_wrong_and_saves_nothing(tmp_path: Path, capsys):
    said = audited(capsys, csv(tmp_path, "storm"))
    assert "1 alarm looks wrong" in said
    assert "looks wrong: it passed by itself" in said
    assert "loss back at step 440" in said
    assert "It would have saved" not in said


def test_a_run_that_was_started_again_counts_from_where_it_went_back_to(tmp_path: Path, capsys):
    said = audited(capsys, csv(tmp_path, "restarted"))
    assert "continued to step 499, then restarted from step 300" in said
    (row,) = [line for line in said.splitlines() if re.match(r"\| 400 to \d+ \|.*\| 199 \|", line)]
    assert "| 199 | 131 | 68 |" in row  # steps 300 to 499, less 431 back to 300


def test_without_a_gradient_norm_nothing_is_said_about_it(tmp_path: Path, capsys):
    path = tmp_path / "bare.csv"
    path.write_text("step,loss\n" + "".join(f"{n},{x!r}\n" for n, x in losses("nan")))
    said = audited(capsys, path)
    assert "It has no gradient norm: the gradients cannot be judged." in said
    assert "gradient norm:" not in said.partition("## What this log cannot tell")[0]
    assert "The log has no times, so there are no hours." in said


def test_of_a_coarse_log_the_onset_is_known_to_its_distance_only(tmp_path: Path, capsys):
    path = tmp_path / "coarse.csv"
    path.write_text("step,loss\n" + "".join(f"{n * 50},{x!r}\n" for n, x in losses("nan")))
    said = audited(capsys, path)
    assert "It was logged every 50 steps: an onset is known to that many steps only" in said


FORMS = {
    "train.csv": lambda rows: "\n".join(["step,loss", *(f"{n},{x!r}" for n, x in rows)]).encode(),
    "trainer_state.json": lambda rows: json.dumps(
        {"log_history": [{"step": n, "loss": x} for n, x in rows]}
    ).encode(),
    "run-a.wandb": lambda rows: framed(
        [call({"loss": x if x == x else "NaN", "_step": n}) for n, x in rows]
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_kind_of_log_is_audited_alike(tmp_path: Path, capsys, name: str):
    path = tmp_path / name
    path.write_bytes(FORMS[name](losses("nan")))
    said = audited(capsys, path)
    assert "rolled back once" in said
    assert "| 400 to " in said


def test_tensorboards_files_are_audited_alike(tmp_path: Path, capsys):
    pytest.importorskip("tensorboard", reason="needs tensorboard, which writes and reads the files")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    for step, loss in losses("nan"):
        value = Summary.Value(tag="train/loss", simple_value=loss)
        writer.add_event(Event(step=step, summary=Summary(value=[value])))
    writer.close()
    assert "rolled back once" in audited(capsys, tmp_path)


def test_the_page_stands_alone_and_a_strangers_name_is_only_text(tmp_path: Path, capsys):
    name = HOSTILE.replace("/", "_") + ".csv"
    source, page = csv(tmp_path, "nan", name=name), tmp_path / "audit.html"
    assert f"{page}\n" == audited(capsys, source, "--html", page)
    html = page.read_text()
    assert "<script" not in html
    assert "<img" not in html
    assert not re.search(r"(?:src|href)\s*=", re.sub(r"<[^>]*>", "", html)) or "&lt;img" in html
    assert "default-src 'none'" in html
    assert "&lt;img src=x onerror=" in html
    assert str(tmp_path) not in html
    assert 2 == html.count("<svg")
    void = re.sub(r"<(meta)([^>]*)>", r"<\1\2/>", html.removeprefix("<!doctype html>\n"))
    assert "html" == ElementTree.fromstring(void).tag


def test_a_page_that_is_there_is_overwritten_only_by_force(tmp_path: Path, capsys):
    source, page = csv(tmp_path, "nan"), tmp_path / "audit.html"
    page.write_text("mine")
    assert 2 == run_cli("audit", str(source), "--html", str(page))
    assert "mine" == page.read_text()
    audited(capsys, source, "--html", page, "--force")
    assert "mine" != page.read_text()


def two_runs(folder: Path) -> Path:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "trainer_state.json").write_text("{}")
    return folder


def junk(folder: Path) -> Path:
    path = folder / "junk.bin"
    path.write_bytes(random.Random(1).randbytes(5_000))
    return path


def unknown(folder: Path) -> Path:
    path = folder / "unknown.csv"
    path.write_text("when,what\n1,2\n")
    return path


def no_numbers(folder: Path) -> Path:
    path = folder / "words.csv"
    path.write_text("step,loss\n1,high\n")
    return path


@pytest.mark.parametrize(
    ("make", "said", "code"),
    [
        (lambda folder: folder, "holds no log", 2),
        (junk, "looked for a CSV file with a header", 1),
        (two_runs, "holds 2 logs", 2),
        (unknown, "no column is the step", 2),
        (no_numbers, "it must be a number", 1),
        (lambda folder: folder / "nowhere.csv", "there is no file or folder", 2),
    ],
)
def test_what_is_no_log_is_said_with_the_way_out(
    tmp_path: Path, capsys, make, said: str, code: int
):
    assert code == run_cli("audit", str(make(tmp_path)))
    error = capsys.readouterr().err
    assert said in error
    assert "hint: " in error or code == 1


def test_a_run_of_vitals_itself_is_sent_to_its_post_mortem(tmp_path: Path, capsys):
    (tmp_path / ("01JD" + "0" * 22)).mkdir()
    assert 2 == run_cli("audit", str(tmp_path))
    assert "`vitals postmortem RUN`" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_records_are_audited(tmp_path: Path, capsys):
    path = tmp_path / "long.csv"
    noise = random.Random(5)
    with path.open("w") as file:
        file.write("step,loss\n")
        for step in range(1_000_000):
            loss = "nan" if 900_000 <= step < 900_040 else f"{2.0 + noise.gauss(0, 0.02):.6f}"
            file.write(f"{step},{loss}\n")
    said = audited(capsys, path)
    assert "1,000,000 records, steps 0 to 999,999." in said
    assert "loss back at step 900040" in said


def test_a_loss_is_back_only_where_it_stays():
    from trainvitals.judged_log import LoggedStep

    def is_back(logged: LoggedStep) -> bool:
        return logged.loss is not None and logged.loss <= 2.0

    restless = [LoggedStep(n, n, 1.0 if n % 3 else 5.0) for n in range(30)]
    assert auditing._find_recovery(restless, 0, 30, is_back) is None
    calm = [LoggedStep(n, n, 5.0 if n < 6 else 1.0) for n in range(30)]
    assert 6 == auditing._find_recovery(calm, 0, 30, is_back)


def test_no_option_of_the_columns_is_missing():
    """What `replay` can be told of a log's columns `audit` can be told, too."""
    from vitals_collector.cli.replay import ReplayLogOptions

    without_option = {"time", "evaluation_seconds", "task", "scalars"}
    names = ColumnChoice.__dataclass_fields__.keys() - without_option
    assert names == ReplayLogOptions().columns().keys()


def test_of_a_log_too_short_to_be_judged_it_says_so(tmp_path: Path, capsys):
    path = tmp_path / "one.csv"
    path.write_text("step,loss\n5,2.0\n")
    said = audited(capsys, path)
    assert "1 record, steps 5 to 5." in said
    assert "a short log: spikes are judged once 10 clean records are known" in said
    assert "a short log" not in audited(capsys, csv(tmp_path, "healthy"))


def test_a_log_whose_newest_record_comes_first_is_read_from_its_end(tmp_path: Path, capsys):
    path = csv(tmp_path, "nan")
    forwards = audited(capsys, path)
    head, *rows = path.read_text().splitlines()
    path.write_text("\n".join([head, *rows[::-1]]))
    backwards = audited(capsys, path)
    assert alarms_of(forwards) == alarms_of(backwards)
    assert "| 400 to " in alarms_of(backwards)
    assert "newest record comes first: it was read from the end" in backwards
    assert "newest record" not in forwards


def alarms_of(said: str) -> str:
    return said.partition("## Alarms")[2].partition("##")[0]


LEARNED = [2.0 + 5.0 * 0.98**n for n in range(600)]
ENDINGS = {
    "never learns": ([6.9] * 700, "plateau", "loss did not fall by the end, step 699"),
    "learns late": ([6.9] * 600 + [3.0] * 100, "plateau", "loss fell at step 600"),
    "lost": (
        LEARNED + [min(7.0, 2.0 + 0.03 * n) for n in range(500)],
        "lost_progress",
        "loss not back by the end, step 1099",
    ),
    "lost and back": (
        LEARNED + [min(7.0, 2.0 + 0.03 * n) for n in range(400)] + [2.0] * 100,
        "lost_progress",
        "loss back at step 1000",
    ),
    "diverges slowly": (
        LEARNED + [2.0 + 0.002 * n for n in range(700)],
        "divergence",
        "loss not back by the end, step 1299",
    ),
    "collapses": (LEARNED + [0.1] * 100, "collapse", "loss not back by the end, step 699"),
    "NaN from the start": ([float("nan")] * 100, "nonfinite", "not back by the end, step 99"),
    "a last spike": (LEARNED + [9.0] * 4, "spike", "the log ends too soon"),
    "back for a few records": (LEARNED + [9.0] * 30 + [2.0] * 4, "spike", "ends too soon"),
}


@pytest.mark.parametrize(("course", "kind", "ending"), ENDINGS.values(), ids=ENDINGS)
def test_how_trouble_ended_is_held_against_the_time_before_its_onset(
    tmp_path: Path, capsys, course: list[float], kind: str, ending: str
):
    noise = random.Random(3)
    path = tmp_path / "log.csv"
    rows = [f"{n},{loss * (1.0 + noise.gauss(0, 0.01))!r}" for n, loss in enumerate(course)]
    path.write_text("\n".join(["step,loss", *rows]))
    alarms = [row for row in alarms_of(audited(capsys, path)).splitlines() if kind in row]
    assert alarms
    assert all(ending in row for row in alarms)
    assert not any("looks wrong" in row or "harmless" in row for row in alarms)


def test_what_trainer_logs_as_a_loss_of_zero_beside_a_norm_of_nan_is_not_back(tmp_path, capsys):
    log = [{"step": n, "loss": 2.0 + 2.0 / (n + 1), "grad_norm": 1.0} for n in range(30)]
    log += [{"step": n, "loss": 0.0, "grad_norm": float("nan")} for n in range(30, 130)]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": log}))
    (row,) = [row for row in alarms_of(audited(capsys, path)).splitlines() if "nonfinite" in row]
    assert "loss not back by the end, step 129" in row and "looks right" in row


def test_the_silence_of_a_short_log_is_qualified(tmp_path: Path, capsys):
    path = tmp_path / "short.csv"
    path.write_text("step,loss\n" + "".join(f"{n},6.9\n" for n in range(100)))
    said = audited(capsys, path)
    assert "Vitals would have done nothing, and told nothing. That says nothing of " in said
    assert "a slow rise (needs 512 records, has 100)" in said
    assert "a loss that never falls (needs 500 records, has 100)" in said
    assert "spikes (needs" not in said


# ------------------------------------------------------------------- post-training

TRL_NAMES = ("reward", "entropy", "completions/clipped_ratio")
VERL_NAMES = ("critic/score/mean", "actor/entropy", "response_length/clip_ratio")


def collapse() -> list[tuple[float, float, float]]:
    """Return reward, entropy and share of cut completions of a policy that collapses."""
    noise = random.Random(11)
    learns = [(0.02 * n + noise.gauss(0, 0.02), 2.0, 0.0) for n in range(40)]
    return learns + [(noise.gauss(0, 0.02), 0.01, 0.0) for _ in range(60)]


def trainer_state(folder: Path) -> Path:
    log = [
        {"step": n, "loss": 0.0, **dict(zip(TRL_NAMES, row, strict=True))}
        for n, row in enumerate(collapse(), start=1)
    ]
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"log_history": log}))
    return path


def exported_csv(folder: Path) -> Path:
    path = folder / "export.csv"
    head = ",".join(["step", *(name.replace("/", "_") for name in VERL_NAMES)])
    rows = [f"{n},{r},{e},{c}" for n, (r, e, c) in enumerate(collapse(), start=1)]
    path.write_text("\n".join([head, *rows]))
    return path


def trainer_output(folder: Path) -> Path:
    path = folder / "train.log"
    lines = [
        f"  1%|#  | {n}/100\r{{'loss': '0', 'reward': '{r:.4g}', 'entropy': '{e:.4g}'}}"
        for n, (r, e, _) in enumerate(collapse(), start=1)
    ]
    path.write_text("\n".join(lines))
    return path


def verl_output(folder: Path) -> Path:
    path = folder / "verl.log"
    lines = [
        f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{n} - actor/entropy:{e} - actor/pg_loss:0.0 - "
        f"actor/grad_norm:np.float64(0.5) - critic/score/mean:np.float64({r:.6f})"
        for n, (r, e, _) in enumerate(collapse(), start=1)
    ]
    path.write_text("\n".join(lines))
    return path


def minimind_output(folder: Path) -> Path:
    path = folder / "minimind.log"
    lines = [
        f"Epoch:[1/1]({n}/100), Reward: {r:.4f}, entropy: {e:.4f}, Actor Loss: 0.0000"
        for n, (r, e, _) in enumerate(collapse(), start=1)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    "write", [trainer_state, exported_csv, trainer_output, verl_output, minimind_output]
)
def test_a_collapse_is_found_in_a_log_whose_task_is_declared(tmp_path: Path, capsys, write):
    path = write(tmp_path)
    report = audited(capsys, path, "--task", "grpo")
    assert "policy_collapse" in alarms_of(report)
    assert "its entropy fell from 2 to 0.01" in report
    assert "not visible in the loss" in alarms_of(report)
    assert "entropy, logarithmic: 100 steps" in report
    if write is not exported_csv:  # without a loss only a declared task gives it something to judge
        assert "policy_collapse" not in audited(capsys, path)


def test_the_findings_of_a_declared_task_are_in_the_json_document(tmp_path: Path, capsys):
    body = json.loads(
        audited(capsys, trainer_state(tmp_path), "--task", "grpo", "--format", "json")
    )
    (alarm,) = body["alarms"]
    assert ["policy_collapse"] == alarm["kinds"]
    assert 41 <= alarm["onset_step"] <= alarm["first_step"] <= 60


def test_an_announced_change_is_not_a_loss_of_reward_in_an_audited_log(tmp_path: Path, capsys):
    path = trainer_state(tmp_path)
    assert "policy_collapse" not in audited(capsys, path, "--task", "grpo", "--expect", 41)


def test_a_resumed_log_is_judged_without_the_rewards_it_trained_again(tmp_path: Path, capsys):
    noise = random.Random(2)
    rewards = [noise.gauss(0.0, 0.02) + 0.02 * n for n in range(40)]
    rows = [(n, r, 2.0) for n, r in enumerate(rewards)]
    rows += [(n, noise.gauss(0.4, 0.02), 2.0) for n in range(20, 80)]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["step,reward,entropy", *(f"{s},{r},{e}" for s, r, e in rows)]))
    report = audited(capsys, path, "--task", "grpo")
    assert "## Alarms" not in report
    assert "the steps go back once" in report


def test_an_evaluation_in_an_entry_of_its_own_belongs_to_its_step(tmp_path: Path, capsys):
    noise = random.Random(7)
    log: list[dict[str, float]] = []
    for n in range(1, 201):
        log.append({"step": n, "loss": 0.0, "reward": 0.005 * n + noise.gauss(0, 0.01)})
        if n % 10 == 0:
            held_out = 0.05 * n / 10 if n <= 100 else 0.5 - 0.05 * (n - 100) / 10
            log.append({"step": n, "eval_reward": held_out + noise.gauss(0, 0.005)})
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": log}))
    report = audited(capsys, path, "--task", "grpo")
    assert "200 records" in report
    assert "reward_hacking" in alarms_of(report)


def test_a_scalar_with_a_name_of_its_own_is_named_by_an_option(tmp_path: Path, capsys):
    path = tmp_path / "own.csv"
    rows = [f"{n},{r},{e}" for n, (r, e, _) in enumerate(collapse())]
    path.write_text("\n".join(["step,mean_score,policy_entropy", *rows]))
    options = ["--scalar", "reward=mean_score", "--scalar", "entropy=policy_entropy"]
    report = audited(capsys, path, "--task", "grpo", *options)
    assert "policy_collapse" in alarms_of(report)
    assert "reward = mean_score" in report


def test_a_log_without_a_known_scalar_is_named_as_such(tmp_path: Path, capsys):
    path = csv(tmp_path, "healthy")
    assert "no post-training scalar with a known name" in audited(capsys, path, "--task", "grpo")
    assert "post-training scalar" not in audited(capsys, path)


def test_a_log_of_a_policy_without_a_reward_is_named_as_such(tmp_path: Path, capsys):
    path = tmp_path / "own.csv"
    path.write_text("\n".join(["step,my_reward,entropy", *(f"{n},0.5,2" for n in range(40))]))
    lacking = "no reward with a known name"
    assert lacking in audited(capsys, path, "--task", "grpo")
    assert lacking not in audited(capsys, path, "--task", "dpo")
    options = ["--task", "grpo", "--scalar", "reward=my_reward"]
    assert lacking not in audited(capsys, path, *options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--scalar", "reward=loss"], "--scalar needs --task"),
        (["--task", "grpo", "--scalar", "reward"], "it must be NAME=COLUMN"),
        (["--task", "grpo", "--scalar", "wealth=loss"], "it must be NAME=COLUMN"),
        (["--task", "grpo", "--scalar", "reward=missing"], "there is no such column"),
    ],
)
def test_a_wrong_option_for_a_scalar_is_an_error(tmp_path: Path, capsys, options, error):
    path = csv(tmp_path, "healthy")
    assert 2 == run_cli("audit", str(path), *options)
    assert error in capsys.readouterr().err
