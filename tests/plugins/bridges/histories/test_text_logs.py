"""What trainings print, and JSON Lines: lines of the same form, with numbers of our own."""

import json
from pathlib import Path

import pytest

from trainvitals.errors import FormatError, UsageError
from vitals_plugins.bridges.importers import ColumnChoice, ImportedLog, read_history

TAB = "\t"
PRINTED = {
    "nanoGPT": (
        "number of parameters: 10.65M\nstep 0: train loss 4.2874, val loss 4.2823\n"
        "iter 0: loss 4.2649, time 31232.30ms, mfu -100.00%\n"
        "iter 10: loss nan, time 120.50ms, mfu 17.80%\n",
        [(0, 4.2649, None, None), (10, "nan", None, None)],
    ),
    "Megatron-LM": (
        "[after dataloaders are built] datetime: 2026-01-01 00:00:00 \n"
        " [2026-01-01 00:00:09] iteration      100/  500000 | consumed samples:        25600 | "
        "elapsed time per iteration (ms): 1500.0 | learning rate: 1.500E-04 | global batch size:  "
        " 256 | lm loss: 6.5E+00 | loss scale: 65536.0 | grad norm: 1.250 | number of skipped "
        "iterations:   0 | number of nan iterations:   0 |\n"
        " [2026-01-01 00:02:09] iteration      200/  500000 | consumed samples:        51200 | "
        "elapsed time per iteration (ms): 1500.0 | learning rate: 2.500E-04 | global batch size:  "
        " 256 | lm loss: 5.5E+00 | loss scale: 32768.0 | grad norm: nan | number of skipped "
        "iterations:   0 | number of nan iterations:   0 |\n"
        " validation loss at iteration 200 | lm loss value: 5.4E+00 | lm loss PPL: 2.2E+02 | \n",
        [(100, 6.5, 1.25, 1.5e-4), (200, 5.5, "nan", 2.5e-4)],
    ),
    "DeepSpeed": (
        "steps: 10 loss: 0.8945 iter time (s): 0.250 samples/sec: 64.0\n"
        "[2026-01-01 00:00:09,001] [INFO] [logging.py:96:log_dist] [Rank 0] step=20, skipped=0, "
        "lr=[1e-05], mom=[(0.9, 0.999)]\n"
        "steps: 20 loss: 0.7945 iter time (s): 0.250 samples/sec: 64.0\n",
        [(10, 0.8945, None, None), (20, 0.7945, None, None)],
    ),
    "fairseq": (
        "2026-01-01 00:00:09 | INFO | train_inner | epoch 001:    100 / 2500 loss=5.25, "
        "nll_loss=4.1, ppl=17.2, wps=1000, ups=2.5, wpb=400, bsz=16, num_updates=100, lr=1e-05, "
        "gnorm=2.5, loss_scale=64, train_wall=40, gb_free=10, wall=45\n"
        "2026-01-01 00:00:49 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 4.9 | "
        "num_updates 100\n"
        "2026-01-01 00:01:09 | INFO | train_inner | epoch 001:    200 / 2500 loss=4.75, "
        "nll_loss=3.6, ppl=12.1, wps=1000, ups=2.5, wpb=400, bsz=16, num_updates=200, lr=2e-05, "
        "gnorm=1.5, loss_scale=64, train_wall=40, gb_free=10, wall=85\n",
        [(100, 5.25, 2.5, 1e-5), (200, 4.75, 1.5, 2e-5)],
    ),
    "fairseq as JSON": (
        '2026-01-01 00:00:09 | INFO | train_inner | {"epoch": 1, "update": 0.04, "loss": "5.25", '
        '"nll_loss": "4.1", "num_updates": "100", "lr": "1e-05", "gnorm": "2.5"}\n'
        '2026-01-01 00:01:09 | INFO | train_inner | {"epoch": 1, "update": 0.08, "loss": "4.75", '
        '"nll_loss": "3.6", "num_updates": "200", "lr": "2e-05", "gnorm": "1.5"}\n',
        [(100, 5.25, 2.5, 1e-5), (200, 4.75, 1.5, 2e-5)],
    ),
    "ImageNet": (
        f"=> creating model 'resnet18'\nEpoch: [0][   1/100]{TAB}Time  0.500 ( 1.200){TAB}Data  "
        f"0.001 ( 0.300){TAB}Loss 6.9e+00 (7.0e+00){TAB}Acc@1   0.00 (  0.10)\n"
        f"Epoch: [1][  11/100]{TAB}Time  0.500 ( 0.600){TAB}Data  0.001 ( 0.100){TAB}"
        f"Loss 6.5e+00 (6.8e+00){TAB}Acc@1   0.00 (  0.10)\n"
        f"Test: [ 0/10]{TAB}Time  0.500 ( 0.600){TAB}Loss 6.5e+00 (6.8e+00)\n",
        [(1, 6.9, None, None), (111, 6.5, None, None)],
    ),
    "torchvision": (
        "Epoch: [0]  [ 10/625]  eta: 0:10:01  lr: 0.001  loss: 6.9 (6.95)  time: 0.5  data: 0.1\n"
        "Epoch: [0]  [ 20/625]  eta: 0:09:01  lr: 0.002  loss: 6.5 (6.75)  time: 0.5  data: 0.1\n",
        [(10, 6.9, None, 1e-3), (20, 6.5, None, 2e-3)],
    ),
    "MNIST": (
        f"Train Epoch: 1 [0/60000 (0%)]{TAB}Loss: 2.300039\n"
        f"Train Epoch: 1 [640/60000 (1%)]{TAB}Loss: 2.200039\n"
        f"Train Epoch: 2 [0/60000 (0%)]{TAB}Loss: 0.200039\n",
        [(0, 2.300039, None, None), (640, 2.200039, None, None), (60000, 0.200039, None, None)],
    ),
    "word_language_model": (
        "| epoch   1 |   200/ 2983 batches | lr 20.00 | ms/batch 12.50 | loss  7.63 | ppl  2056\n"
        "| epoch   1 |   400/ 2983 batches | lr 20.00 | ms/batch 12.50 | loss  6.63 | ppl  757.5\n",
        [(200, 7.63, None, 20.0), (400, 6.63, None, 20.0)],
    ),
    "OpenMMLab": (
        "2026-01-01 00:00:09,494 - mmdet - INFO - Epoch [1][50/2500]\tlr: 0.00125, eta: 4:44:04, "
        "time: 0.593, data_time: 0.031, memory: 6836, loss_cls: 0.18, acc: 94.06, loss: 0.46\n"
        "2026-01-01 00:00:39,494 - mmdet - INFO - Epoch [2][50/2500]\tlr: 0.00225, eta: 4:44:04, "
        "time: 0.593, data_time: 0.031, memory: 6836, loss_cls: 0.17, acc: 94.06, loss: 0.45\n",
        [(50, 0.46, None, 0.00125), (2550, 0.45, None, 0.00225)],
    ),
    "torchtitan": (
        "[titan] 2026-01-01 00:00:09,1 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.10  "
        "\x1b[38;2;180;60;0mgrad_norm:  1.50  \x1b[33mmemory:  1.2GiB(3.1%)  \x1b[34mtps: 1,234\n"
        "[titan] 2026-01-01 00:00:19,1 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.10  "
        "\x1b[38;2;180;60;0mgrad_norm:  1.25  \x1b[33mmemory:  1.2GiB(3.1%)  \x1b[34mtps: 1,234\n",
        [(1, 8.1, 1.5, None), (10, 7.1, 1.25, None)],
    ),
    "Trainer": (
        "{'loss': 2.5, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.1}\n"
        "{'eval_loss': 2.4, 'eval_runtime': 9.9, 'epoch': 0.1}\n"
        "{'loss': 2.25, 'grad_norm': nan, 'learning_rate': 4e-05, 'epoch': 0.2}\n",
        [(1, 2.5, 1.5, 5e-5), (2, 2.25, "nan", 4e-5)],
    ),
    "anybody's": (
        "2026-01-01 00:00:09 INFO Step 1: loss=10.25 lr=0.001\n"
        "2026-01-01 00:00:10 INFO Step 2: loss=5.25 lr=0.001\n",
        [(1, 10.25, None, 1e-3), (2, 5.25, None, 1e-3)],
    ),
}


def read(tmp_path: Path, content: str, **wanted: str) -> ImportedLog:
    path = tmp_path / "train.log"
    path.write_text(content)
    return read_history(path, ColumnChoice(**wanted))


def values(history: ImportedLog) -> list[tuple[object, ...]]:
    """Return the records, with nan as a word: it is not equal to itself."""
    numbers = [(s.step, s.loss, s.grad_norm, s.learning_rate) for s in history.steps]
    return [tuple("nan" if x != x else x for x in row) for row in numbers]


@pytest.mark.parametrize(("content", "records"), PRINTED.values(), ids=PRINTED)
def test_what_trainings_print_is_read(tmp_path, content, records):
    assert records == values(read(tmp_path, content))


def test_times_of_a_step_are_seconds_whatever_is_printed(tmp_path):
    seconds = {
        name: read(tmp_path, PRINTED[name][0]).steps[-1].step_seconds
        for name in ("nanoGPT", "Megatron-LM", "DeepSpeed", "ImageNet", "word_language_model")
    }
    assert {
        "nanoGPT": 0.1205,
        "Megatron-LM": 1.5,
        "DeepSpeed": 0.25,
        "ImageNet": 0.5,
        "word_language_model": 0.0125,
    } == {name: pytest.approx(value) for name, value in seconds.items()}


def lines(*objects: object) -> str:
    return "".join(json.dumps(each) + "\n" for each in objects)


JSON_LINES = {
    "LLaMA-Factory": (
        lines(
            {"current_steps": 10, "total_steps": 20, "loss": 2.5, "eval_loss": None, "lr": 1e-4,
             "epoch": 0.5, "percentage": 50.0, "elapsed_time": "0:00:10"},
            {"current_steps": 20, "total_steps": 20, "loss": 2.25, "eval_loss": None, "lr": 2e-4,
             "epoch": 1.0, "percentage": 100.0, "elapsed_time": "0:00:20"},
            {"current_steps": 20, "total_steps": 20, "loss": None, "eval_loss": None, "lr": None,
             "epoch": 1.0, "percentage": 100.0, "elapsed_time": "0:00:20"},
        ),
        [(10, 2.5, None, 1e-4), (20, 2.25, None, 2e-4)],
        "",
    ),
    "MAE": (
        lines(
            {"train_lr": 1e-4, "train_loss": 0.5, "epoch": 0},
            {"train_lr": 2e-4, "train_loss": 0.25, "epoch": 1},
        ),
        [(0, 0.5, None, 1e-4), (1, 0.25, None, 2e-4)],
        "it has no step: the epoch is in its place",
    ),
    "OpenMMLab": (
        lines(
            {"env_info": "sys.platform: linux", "seed": 0, "exp_name": "mask.py"},
            {"mode": "train", "epoch": 1, "iter": 50, "lr": 0.01, "loss": 1.5, "grad_norm": 2.5},
            {"mode": "train", "epoch": 1, "iter": 100, "lr": 0.01, "loss": 1.25, "grad_norm": 2.5},
            {"mode": "val", "epoch": 1, "iter": 890, "lr": 0.01, "loss": 9.0},
            {"mode": "train", "epoch": 2, "iter": 50, "lr": 0.01, "loss": 1.0, "grad_norm": 2.5},
        ),
        [(50, 1.5, 2.5, 0.01), (100, 1.25, 2.5, 0.01), (150, 1.0, 2.5, 0.01)],
        "its iterations restart in each epoch: steps are numbered continuously",
    ),
    "OpenMMLab by iterations": (
        lines(
            {"lr": 0.01, "loss": 1.5, "epoch": 1, "iter": 50, "step": 50},
            {"lr": 0.01, "loss": 1.0, "epoch": 2, "iter": 100, "step": 100},
        ),
        [(50, 1.5, None, 0.01), (100, 1.0, None, 0.01)],
        "",
    ),
    "without a step": (
        lines({"loss": 2.5}, {"loss": 2.25}),
        [(0, 2.5, None, None), (1, 2.25, None, None)],
        "it has no step: the line number is in its place",
    ),
    "nested, and cut off": (
        lines({"step": 1, "train": {"loss": 2.5}}, {"step": 2, "train": {"loss": 2.25}})
        + '{"step": 3, "train": {"lo',
        [(1, 2.5, None, None), (2, 2.25, None, None)],
        "its last line is cut off",
    ),
    "NaN": (
        '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": NaN}\n',
        [(1, 2.5, None, None), (2, "nan", None, None)],
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "records", "note"), JSON_LINES.values(), ids=JSON_LINES)
def test_json_lines_are_read(tmp_path, content, records, note):
    history = read(tmp_path, content)
    assert records == values(history)
    assert [note] * bool(note) == [each for each in history.notes if "skipped" not in each]


METRICS = "".join(f'{{"step": {step}, "loss": {2.5 - step}}}\n' for step in (0, 1))


def test_json_lines_in_a_folder_are_found_among_data_and_settings(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"config": {"loss": "L1"}}\n' + METRICS)
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "empty.jsonl").touch()
    history = read_history(tmp_path, ColumnChoice())
    assert str(tmp_path / "log.jsonl") == history.source
    assert [(0, 2.5, None, None), (1, 1.5, None, None)] == values(history)


def test_json_lines_beside_another_log_of_the_run_are_not_read(tmp_path):
    (tmp_path / "trainer_log.jsonl").write_text(METRICS)
    records = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": records}))
    assert "trainer_state.json" in read_history(tmp_path, ColumnChoice()).source


def test_two_json_lines_in_a_folder_are_one_too_many(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(METRICS)
    with pytest.raises(UsageError, match="holds 2 logs"):
        read_history(tmp_path, ColumnChoice())


def test_a_list_of_objects_is_read(tmp_path):
    content = json.dumps([{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0}], indent=1)
    assert [(1, 2.5, None, None), (2, 2.0, None, None)] == values(read(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (
            "[2026-01-01 00:00:09,001] [INFO] [logging.py:96:log_dist] [Rank 0] step=20, "
            "skipped=0, lr=[1e-05], mom=[(0.9, 0.999)]\n" * 3,
            FormatError,
            "is DeepSpeed's own lines, which have no loss",
        ),
        (
            "Epoch 0:  10%|#         | 10/100 [00:01<00:10,  9.80it/s, v_num=0]\n" * 3,
            FormatError,
            "is a progress bar",
        ),
        ("Dear all,\n\nplease find the log, and the plots.\n", FormatError, "is text, but no line"),
        ("0,3.5\n1,3.4\n", UsageError, "has no header: its first line is '0,3.5'"),
        ("0 3.5\n1 3.4\n", FormatError, "is text, but no line names a step and a loss"),
    ],
)
def test_what_cannot_be_read_is_named_for_what_it_is(tmp_path, content, error, words):
    with pytest.raises(error) as caught:
        read(tmp_path, content)
    assert words in str(caught.value)
    assert "CSV file whose first line is step,loss" in str(caught.value) or error is UsageError


def test_a_hint_has_whole_names_and_those_that_may_be_meant_come_first(tmp_path):
    long = "model/decoder/layers/0/self_attention/output_projection/training_loss_weighted"
    others = ",".join(f"metric_{n}" for n in range(50))
    with pytest.raises(UsageError) as caught:
        read(tmp_path, f"step,{others},{long}\n" + ",".join(["1"] * 52) + "\n")
    assert f"it has: '{long}', 'step'" in str(caught.value)
