"""The table of torch's setters, and those that are accepted without effect."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dreamcomm.zero.units.module.no_ops import AcceptedSetters
from dreamcomm.zero.units.module.setters import METHODS, Effect, markdown, names


def methods(of: type) -> dict[str, Any]:
    return {name: one for name, one in vars(of).items() if inspect.isfunction(one)}


def test_each_method_of_torch_is_in_the_table_once() -> None:
    theirs = [name for name in methods(FSDPModule) if not name.startswith("_")]
    ours = [one.name for one in METHODS]
    assert sorted(theirs) == sorted(ours)


def test_what_does_nothing_is_accepted_and_what_takes_effect_is_not_overridden() -> None:
    accepted = {name for name in methods(AcceptedSetters) if not name.startswith("_")}
    assert accepted == set(names(Effect.NONE))


@pytest.mark.parametrize("name", [one for one in methods(AcceptedSetters) if one[:2] != "__"])
def test_signatures_are_torchs(name: str) -> None:
    def shape(of: type) -> list[tuple[Any, ...]]:
        found = inspect.signature(getattr(of, name)).parameters.values()
        return [(one.name, one.kind, one.default) for one in found]

    assert shape(AcceptedSetters) == shape(FSDPModule)


def test_each_row_has_a_reason() -> None:
    rows = markdown().split("\n")
    assert len(rows) == 2 + len(METHODS)
    assert all(row.count("|") == 4 for row in rows)
    assert "| `set_post_optim_event` | does nothing | CPUs have no streams to wait with |" in rows
    assert "| `set_all_reduce_hook` | takes effect | " in markdown()
    assert all(one.why and one.why == one.why.strip().rstrip(".") for one in METHODS)


class Sharded(AcceptedSetters, FSDPModule, nn.Module):
    _orig_cls_mro_index = 3

    def __init__(self) -> None:
        nn.Module.__init__(self)


def sharded() -> Sharded:
    return object.__new__(Sharded)


def test_setters_accept_what_torch_accepts() -> None:
    one = sharded()
    one.set_modules_to_forward_prefetch([one])
    one.set_modules_to_backward_prefetch([])
    one.set_custom_all_gather(object())
    one.set_custom_reduce_scatter(object())
    one.set_post_optim_event(torch.Event())
    one.set_force_sum_reduction_for_comms(True)
    one.set_reduce_scatter_unused_params(True, recurse=False)
    one.set_reduce_scatter_max_input_buffers(3, recurse=False)
    one.set_separate_reduce_scatter_group()
    one.set_unshard_in_backward(False)
    one.set_allocate_memory_from_process_group_for_comm(True)
    one.set_symm_mem_for_comm()
    one._set_unshard_async_op(True)


@pytest.mark.parametrize(
    ("name", "argument", "error", "words"),
    [
        ("set_modules_to_forward_prefetch", [nn.Linear(1, 1)], ValueError, "got a Linear"),
        ("set_modules_to_backward_prefetch", [None], ValueError, "got a NoneType"),
        ("set_reduce_scatter_max_input_buffers", True, TypeError, "got True, a bool"),
        ("set_reduce_scatter_max_input_buffers", 2.0, TypeError, "got 2.0, a float"),
        ("set_reduce_scatter_max_input_buffers", 0, ValueError, "got 0"),
        ("set_symm_mem_for_comm", "NVSHMEM", ValueError, "got 'NVSHMEM'"),
    ],
)
def test_setters_refuse_by_name(
    name: str, argument: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        getattr(sharded(), name)(argument)
    assert str(raised.value).startswith(f"{name}(): expected ")
    assert words in str(raised.value)
