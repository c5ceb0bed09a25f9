"""The setters of torch's FSDPModule that the own form accepts and that do nothing there.

Scripts for torch's FSDP2 call them for streams, prefetching and buffers. Arguments that torch would
refuse are refused here, too. ``setters.py`` says why each does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FSDPModule

__all__ = ["AcceptedSetters"]


class AcceptedSetters:
    """Goes in front of torch's class, and has torch's signatures."""

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Does nothing: parameters are in place, or gathered in the order of the first step.

        Raises:
            ValueError: one of ``modules`` was not given to ``fully_shard``.
        """
        _check_modules("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Does nothing: parameters are in place, or gathered in the order of the first step.

        Raises:
            ValueError: one of ``modules`` was not given to ``fully_shard``.
        """
        _check_modules("set_modules_to_backward_prefetch", modules)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Does nothing: the group gathers parameters itself. ``comm`` is never called."""

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Does nothing: the group reduces gradients itself. ``comm`` is never called."""

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Does nothing: there are no streams to wait."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Does nothing: ranks are summed and divided in one pass either way."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Does nothing: a gradient that some rank does not have counts as zeros there anyway."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Does nothing: reductions have no input buffers.

        Raises:
            TypeError: ``max_input_buffers`` is no int.
            ValueError: it is below 1.
        """
        what = "set_reduce_scatter_max_input_buffers(): expected an int of at least 1, got "
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"{what}{max_input_buffers!r}, a {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"{what}{max_input_buffers}")

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Does nothing: gathers and reductions have a group each. Not collective here."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Does nothing: a backward pass gathers the units that it goes through."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Does nothing: parameters and gradients lie in the group's memory already."""

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Does nothing: it is NCCL's memory, for GPUs.

        Raises:
            ValueError: another ``backend``; torch has no other either.
        """
        if backend != "NCCL":
            raise ValueError(f"set_symm_mem_for_comm(): expected 'NCCL', got {backend!r}")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Does nothing: no parameter is gathered."""


def _check_modules(method: str, modules: Iterable[object]) -> None:
    for one in modules:
        if not isinstance(one, FSDPModule):
            raise ValueError(
                f"{method}(): expected modules that were given to fully_shard, got a "
                f"{type(one).__name__}: call fully_shard on it first"
            )
