"""Labels of a fine-tuning's first batches."""

import pytest
import torch

from trainer_hooks.measures.labels import LabelCounts, has_prompts

PAD, END, NONE = 0, 2, -100


def batch(*rows: list[int], labels: list[list[int]] | None = None, left: bool = False):
    width = max(map(len, rows))

    def pad(row, value):
        return [value] * (width - len(row)) + row if left else row + [value] * (width - len(row))

    texts = labels if labels is not None else rows
    return {
        "labels": torch.tensor([pad(row, NONE) for row in texts]),
        "attention_mask": torch.tensor([pad([1] * len(row), 0) for row in rows]),
    }


def shares(*batches, end_ids=(END,), max_length: int | None = None):
    counts = LabelCounts(end_ids, max_length)
    for each in batches:
        counts.add(each)
    return counts.shares()


ROWS = [[5, 6, 7, END], [5, END], [5, 6, END]] * 8


@pytest.mark.parametrize("left", [False, True])
def test_rows_with_an_end_and_without_labels_of_padding(left):
    assert {"labels/padding_share": 0.0, "labels/end_share": 1.0} == shares(batch(*ROWS, left=left))


@pytest.mark.parametrize("left", [False, True])
def test_labels_of_padding(left):
    spoiled = batch(*ROWS, left=left)
    spoiled["labels"] = spoiled["labels"].masked_fill(spoiled["labels"] == NONE, PAD)
    assert shares(spoiled)["labels/padding_share"] > 0.1


def test_the_first_padding_may_be_the_end_that_is_trained():
    ended = batch(
        [5, 6, 7, 8], [5, 6], [5, 6, 7], labels=[[5, 6, 7, 8], [5, 6, END], [5, 6, 7, END]]
    )
    assert 0.0 == shares(ended)["labels/padding_share"]


def test_rows_that_are_cut_need_no_end():
    rows = batch(*[[5, 6, 7, 8]] * 8)
    assert {"labels/padding_share": 0.0} == shares(rows)
    assert {"labels/padding_share": 0.0} == shares(rows, max_length=4)
    assert 0.0 == shares(rows, max_length=9)["labels/end_share"]
    assert 0.0 == shares(rows, max_length=0)["labels/end_share"]
    assert "labels/end_share" not in shares(rows, max_length=9, end_ids=())
    assert "labels/end_share" not in shares(batch(*[[5, 6, 7, 8]] * 7), max_length=9)


def test_any_end_token_counts_also_within_a_row():
    packed = batch(*[[5, END, 6, 7], [8, 9, 9, 9]] * 4)
    assert 0.5 == shares(packed, end_ids=(1, END), max_length=9)["labels/end_share"]
    masked = batch(*[[5, END, 6, 7]] * 8, labels=[[5, NONE, 6, 7]] * 8)
    assert 0.0 == shares(masked, max_length=9)["labels/end_share"]


def test_prompts_that_the_batch_or_the_dataset_marks():
    rows = batch(*[[5, 6, 7, END]] * 4)
    rows["completion_mask"] = torch.tensor([[0, 0, 1, 1]] * 4)
    assert 1.0 == shares(rows)["labels/prompt_share"]
    rows["labels"][:, :2] = NONE
    assert 0.0 == shares(rows)["labels/prompt_share"]


def test_prompts_that_only_the_dataset_marks_are_certain_if_no_token_is_masked():
    assert has_prompts({"completion_mask": [[1, 1], [0, 1]]})
    assert not has_prompts({"completion_mask": [[1, 1]]})
    assert not has_prompts({})
    whole = batch(*[[5, 6, 7, END]] * 4)
    masked = batch(*[[5, 6, 7, END]] * 4, labels=[[NONE, NONE, 7, END]] * 4)
    for counted, share in ((whole, 1.0), (masked, None)):
        counts = LabelCounts((END,), None)
        counts.add(counted)
        assert share == counts.shares(has_prompts=True).get("labels/prompt_share")
        assert "labels/prompt_share" not in counts.shares()


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"labels": torch.ones(4)},
        {"labels": torch.ones(2, 3)},
        {"labels": torch.ones(2, 3), "attention_mask": torch.ones(2, 4)},
        {"labels": [[1, 2]], "attention_mask": [[1, 1]]},
    ],
)
def test_a_batch_of_another_form_is_not_counted(other):
    assert {} == shares(other)
