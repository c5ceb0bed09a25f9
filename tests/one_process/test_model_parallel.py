"""Parts of a module on different devices."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import dreamcomm
from helpers import model_parallel

pytest.importorskip("dreamcomm_test_device", reason="built by `make build`")


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., None]]:
    """Calls a function in a process in which autograd knows the accelerator."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawned, initializer=model_parallel.install) as executor:
        yield lambda function: executor.submit(function).result(timeout=120)


@pytest.mark.parametrize(
    "case",
    [
        model_parallel.parts_train_as_on_one_device,
        model_parallel.outputs_go_where_they_are_asked_for,
        model_parallel.another_call_takes_the_place_of_the_first,
        model_parallel.parts_that_are_moved_later_are_followed,
        model_parallel.lists_of_layers_are_parts,
        model_parallel.tied_to_the_rest_is_refused,
    ],
    ids=lambda case: case.__name__,
)
def test_on_devices(run: Callable[..., None], case: Any) -> None:
    run(case)


def tied() -> nn.Module:
    model = model_parallel.make()
    model.decoder.bias = model.encoder.weight
    return model


@pytest.mark.parametrize(
    ("make", "devices", "words"),
    [
        (model_parallel.make, {}, "name at least one part"),
        (
            model_parallel.make,
            {"wrong": "cpu"},
            "no part 'wrong'; its children are: encoder, other, decoder, head",
        ),
        (model_parallel.make, {"": "cpu"}, "no part ''"),
        (model_parallel.make, {"encoder": "cuda:7"}, "part 'encoder' cannot be on cuda:7: "),
        (model_parallel.make, {"encoder": "gpu"}, "part 'encoder': .*gpu"),
        (
            model_parallel.make,
            {"other.0": "cpu", "other": "cpu"},
            "part 'other.0' is inside part 'other'",
        ),
        (
            tied,
            {"encoder": "cpu", "decoder": "cpu"},
            "encoder.weight and decoder.bias are one tensor",
        ),
    ],
)
def test_what_is_refused_changes_nothing(make: Any, devices: Any, words: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=words):
        dreamcomm.model_parallel(model, devices, output_device="cpu")
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in model.modules())


def test_an_output_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="output_device cannot be on cuda:7"):
        dreamcomm.model_parallel(model_parallel.make(), {"encoder": "cpu"}, output_device="cuda:7")


def test_a_module_twice_is_inside_both() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    with pytest.raises(ValueError, match=r"a\.0\.weight and b\.0\.weight are one tensor"):
        dreamcomm.model_parallel(model, {"a": "cpu", "b": "cpu"})


def test_copies_and_saved_ones_keep_their_parts() -> None:
    model = dreamcomm.model_parallel(model_parallel.make(), {"encoder": "cpu"})
    x = torch.ones(4)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(one(x)["out"], model(x)["out"])
        assert len(one.encoder._forward_pre_hooks) == 1
