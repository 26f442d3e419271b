"""Counts of the labels in the first batches of a fine-tuning: padding, ends and prompts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PROMPT_MASKS = ("completion_mask", "assistant_masks")
"""Columns that are 0 at the tokens of prompts."""
_IGNORED = -100
_LEAST_ROWS = 8
"""Rows that are not cut, before it is certain that none has an end."""


class LabelCounts:
    """Adds up the labels of batches.

    Args:
        end_ids: end-of-sequence tokens; none: unknown.
        max_length: length at which rows are cut; 0: they are not. None: unknown, so only rows that
            are shorter than their batch were certainly not cut.
    """

    def __init__(self, end_ids: Collection[int], max_length: int | None) -> None:
        self._end_ids = tuple(end_ids)
        self._max_length = max_length
        self._counts = [0.0] * 7

    def add(self, batch: Mapping[str, Any]) -> None:
        """Add a batch; without 2-dim labels and attention mask it is ignored.

        Reading the counts waits for the device of the labels.
        """
        labels, mask = batch.get("labels"), batch.get("attention_mask")
        if not isinstance(labels, Tensor) or not isinstance(mask, Tensor) or labels.dim() != 2:
            return
        if mask.shape != labels.shape:
            return
        prompts = _prompts_of(batch, mask)
        tensors = [*self._labels_of(labels, mask), *_labels_among(labels, prompts)]
        counts = torch.stack([number.double() for number in tensors]).tolist()
        self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]

    def _labels_of(self, labels: Tensor, mask: Tensor) -> list[Tensor]:
        """Return the numbers of labels, those of padding, masked tokens, whole rows, and ends."""
        # The first label is never predicted. The first padding after a row may stand for its end.
        has_label = (labels != _IGNORED) & (torch.arange(labels.shape[1], device=labels.device) > 0)
        is_real = mask != 0
        is_padding = (is_real.cumsum(1) == 0) | (is_real.flip(1).cumsum(1) == 0).flip(1)
        is_end = torch.zeros_like(has_label)
        for number in self._end_ids:
            is_end |= labels == number
        follows_row = torch.zeros_like(is_real)
        follows_row[:, 1:] = is_real[:, :-1]
        num_padding = (has_label & is_padding & ~(is_end & follows_row)).sum()
        lengths = is_real.sum(1)
        limit = labels.shape[1] if self._max_length is None else self._max_length
        is_whole = has_label.any(1) if limit == 0 else has_label.any(1) & (lengths < limit)
        has_end = (is_end & has_label).any(1)
        num_masked = (is_real & (labels == _IGNORED))[:, 1:].sum()
        ends = [is_whole.sum(), (is_whole & has_end).sum()]
        return [has_label.sum(), num_padding, num_masked, *ends]

    def shares(self, has_prompts: bool = False) -> dict[str, float]:
        """Return the shares as scalars; one is missing if it is unknown.

        Args:
            has_prompts: whether the dataset marks prompts. The collator may mask them without
                passing its mask on: only if no token is masked, it is certain that they are not.
        """
        num_labels, num_padding, num_masked, num_rows, num_ends, num_prompts, num_labeled = (
            self._counts
        )
        shares = {}
        if num_labels:
            shares["labels/padding_share"] = num_padding / num_labels
        if self._end_ids and num_rows >= _LEAST_ROWS:
            shares["labels/end_share"] = num_ends / num_rows
        if num_prompts:
            shares["labels/prompt_share"] = num_labeled / num_prompts
        elif has_prompts and num_labels and not num_masked:
            shares["labels/prompt_share"] = 1.0
        return shares


def _prompts_of(batch: Mapping[str, Any], mask: Tensor) -> Tensor | None:
    """Return a mask of the prompts' tokens, if the batch marks the completions; otherwise None."""
    for name in PROMPT_MASKS:
        marked = batch.get(name)
        if isinstance(marked, Tensor) and marked.shape == mask.shape:
            return (marked == 0) & (mask != 0)
    return None


def _labels_among(labels: Tensor, prompts: Tensor | None) -> list[Tensor]:
    """Return the number of the prompts' tokens, and of those with a label."""
    if prompts is None:
        return [torch.zeros((), device=labels.device)] * 2
    return [prompts[:, 1:].sum(), (prompts & (labels != _IGNORED))[:, 1:].sum()]


def has_prompts(rows: Mapping[str, Sequence[Sequence[int]]]) -> bool:
    """Return whether rows of a dataset mark tokens of prompts."""
    return any(not all(mask) for name in PROMPT_MASKS for mask in rows.get(name, ()))
