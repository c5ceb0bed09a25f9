"""Reads torch's FSDP2: the parameter groups of a tree, and the gradients that wait in them.

What is private in torch is read here alone::

    FSDPModule -- FSDPState -- FSDPParamGroup -- FSDPParam
                               one all-gather    sharded_param               DTensor, for optimizers
                                                 _unsharded_param.grad       whole: what has
                                                 unsharded_accumulated_grad  accumulated here
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

__all__ = [
    "accumulated",
    "forget_gradients",
    "fsdp_modules",
    "groups_of",
    "no_reduction",
    "reduce_accumulated",
]

Group = Any  # torch's FSDPParamGroup


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """The module and those below that have a call of ``fully_shard`` of their own."""
    return [one for one in module.modules() if isinstance(one, FSDPModule)]


def groups_of(module: nn.Module) -> list[Group]:
    """The groups of a tree, each once, in the order of its modules: the same on all ranks."""
    found: dict[int, Group] = {}
    for one in fsdp_modules(module):
        state: Any = one._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there was one
        for group in [state._fsdp_param_group] if several is None else several:
            if group is not None:
                found[id(group)] = group
    return list(found.values())


def accumulated(group: Group) -> list[Tensor]:
    """The whole gradients of this rank that no pass has reduced yet."""
    found = []
    for one in group.fsdp_params:
        if one.unsharded_accumulated_grad is not None:
            found.append(one.unsharded_accumulated_grad)
        unsharded = getattr(one, "_unsharded_param", None)
        if unsharded is not None and unsharded.grad is not None:
            found.append(unsharded.grad)
    return found


def forget_gradients(groups: Sequence[Group], set_to_none: bool) -> None:
    """Clears the gradients of all forms of the parameters, or sets them to zero."""
    for group in groups:
        for one in group.fsdp_params:
            one.unsharded_accumulated_grad = None
            unsharded = getattr(one, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None
            gradient = one.sharded_param.grad
            if set_to_none or gradient is None:
                one.sharded_param.grad = None
            else:
                gradient.detach_().zero_()
        group._partial_reduce_output = None


@contextmanager
def no_reduction(groups: Sequence[Group]) -> Iterator[None]:
    """Backward passes inside leave each rank its own gradients. At the end all is as before."""
    with _set(groups, False):
        yield


@torch.no_grad()
def reduce_accumulated(groups: Sequence[Group]) -> None:
    """Reduces what has accumulated into the sharded gradients, outside of a pass. Collective."""
    if not any(_waits(group) for group in groups):
        return
    # A rank that has not used a parameter takes part where the others are set to expect zeros.
    taken = [one for one in groups if _waits(one) or _counts_unused(one)]
    with _set(taken, True):
        for group in reversed(taken):  # as a backward pass
            _reduce(group)
    for group in taken:
        group.finalize_backward()
    for context in {id(one.comm_ctx): one.comm_ctx for one in taken}.values():
        _release(context)


def _waits(group: Group) -> bool:
    """Whether gradients are not reduced, or not all-reduced, after `set_requires_all_reduce`."""
    return bool(accumulated(group)) or group._partial_reduce_output is not None


def _counts_unused(group: Group) -> bool:
    return bool(getattr(group, "reduce_scatter_unused_params", False))  # not in torch 2.11


def _reduce(group: Group) -> None:
    counts_unused = _counts_unused(group)
    # torch adds a partial sum to whole gradients. Zeros are given to it where there are none.
    group.reduce_scatter_unused_params = counts_unused or not accumulated(group)
    try:
        group.post_backward()
    finally:
        group.reduce_scatter_unused_params = counts_unused
        group._training_state = TrainingState.IDLE


def _release(context: Any) -> None:
    """Lets go of the buffers that reductions have read."""
    several = getattr(context, "reduce_scatter_states", None)  # torch 2.11 has one
    states = [context.reduce_scatter_state] if several is None else several
    for state in states:
        if state is not None and state.event is not None:
            context.device_handle.current_stream().wait_event(state.event)
    if several is None:
        context.reduce_scatter_state = None
    else:
        several.clear()


@contextmanager
def _set(groups: Sequence[Group], reduces: bool) -> Iterator[None]:
    before = [(one, one.reduce_grads, one.all_reduce_grads) for one in groups]
    for one in groups:
        one.reduce_grads = one.all_reduce_grads = reduces
    try:
        yield
    finally:
        for one, reduce, all_reduce in before:
            one.reduce_grads, one.all_reduce_grads = reduce, all_reduce
