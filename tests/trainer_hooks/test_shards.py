"""Names that the user knows, and shares from what the ranks say they hold; no ranks needed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer_hooks.tensors.gradients import (
    GradNorms,
    clean_name,
    flat_pieces,
    named_parameters,
    num_elements,
    shards_of,
    shares,
)
from trainvitals.errors import UsageError


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("blocks.0.up.weight", "blocks.0.up.weight"),
        ("_orig_mod.blocks.0.weight", "blocks.0.weight"),
        ("_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.weight", "blocks.0.weight"),
        ("blocks.0._checkpoint_wrapped_module._orig_mod.weight", "blocks.0.weight"),
        ("_fsdp_wrapped_module._flat_param", "_flat_param"),
        ("blocks.0._checkpoint_wrapped_module", "blocks.0"),
        ("_orig_mod", ""),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_a_name_is_freed_of_what_wrappers_put_into_it(wrapped, plain):
    assert plain == clean_name(wrapped)


def test_a_compiled_model_has_the_names_of_the_bare_one():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert ["0.weight", "0.bias", "1.weight", "1.bias"] == list(
        named_parameters(compiled, [optimizer])
    )


def test_no_parameter_is_lost_where_two_names_would_be_one():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2))
    model._checkpoint_wrapped_module = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert ["weight", "optimizer0.group0.1"] == list(named_parameters(model, [optimizer]))


def test_a_parameter_that_other_ranks_hold_whole_is_compared_by_name():
    params = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(0))}
    pieces = {id(params["a"]): ((0,), (2,)), id(params["b"]): ((-1,), (0,))}  # as ZeRO has them
    here = shards_of(params, pieces)
    there = [("a", ((-1,), (0,))), ("b", ((0,), (4,)))]
    ranks = SimpleNamespace(gather=lambda mine: [mine, there])
    assert ("a", "b") == GradNorms(params, ranks, pieces).names
    assert here != there


def test_ranks_that_hold_the_same_share_its_square_and_others_keep_theirs():
    replica, first, second = ("a", ((), (4,))), ("b", ((0,), (3,))), ("b", ((1,), (3,)))
    everyone = [[replica, first], [replica, second]]
    assert [0.5, 1.0] == shares(everyone[0], everyone)
    assert [0.5, 1.0] == shares(everyone[1], everyone)


def test_each_element_is_counted_once_whoever_holds_it():
    replica, first, second = ("a", ((), (2, 2))), ("b", ((0,), (3,))), ("b", ((1,), (2,)))
    assert 4 + 3 + 2 == num_elements([[replica, first], [replica, second]])


def test_parts_of_one_shape_are_told_apart_by_their_place():
    weight = nn.Parameter(torch.ones(3))
    here = shards_of({"weight": weight}, {id(weight): ((3,), (3,))})
    there = shards_of({"weight": weight}, {id(weight): ((0,), (3,))})
    assert [1.0] == shares(here, [here, there])


def test_the_old_fsdp_over_tensor_parallelism_is_refused_with_a_way_out():
    model = nn.Linear(2, 2)
    model._handle = SimpleNamespace(flat_param=model.weight, _fsdp_extension=object())
    with pytest.raises(UsageError, match="tensor parallelism") as refused:
        flat_pieces(model)
    assert "fully_shard" in refused.value.hint
