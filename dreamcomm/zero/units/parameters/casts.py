"""In which types a unit computes, and sums its gradients: torch's MixedPrecisionPolicy.

local      the parameter's own type: an optimizer steps it, and gradients are shown in it
whole      param_dtype: made of local when ranks begin to read
gradient   as sums are: autograd casts each to it before it adds
sum        of the ranks, and of what accumulates: never of 16 bits, where a policy is given
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map

__all__ = ["Casts"]


@dataclass(frozen=True)
class Casts:
    """The types of one unit.

    Attributes:
        policy: what fully_shard was given.
    """

    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009 - it is frozen

    def whole_dtype(self, local: torch.dtype) -> torch.dtype:
        """The type of parameters that passes use."""
        return self.policy.param_dtype or local

    def sum_dtype(self, local: torch.dtype) -> torch.dtype:
        """The type of gradients, from where autograd adds them up to the ranks' average."""
        policy = self.policy
        if policy.param_dtype is None and policy.reduce_dtype is None:
            return local
        wide = torch.promote_types(policy.reduce_dtype or local, torch.float32)
        return torch.promote_types(wide, local) if policy.reduce_dtype is None else wide

    def of_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments of a forward pass, their tensors of floating point in ``param_dtype``."""
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        return tree_map(lambda one: _cast(one, dtype), (args, kwargs))

    def of_output(self, output: Any) -> Any:
        """What a forward pass returns, its tensors of floating point in ``output_dtype``."""
        dtype = self.policy.output_dtype
        return output if dtype is None else tree_map(lambda one: _cast(one, dtype), output)


def _cast(one: Any, dtype: torch.dtype) -> Any:
    is_other = isinstance(one, Tensor) and one.is_floating_point() and one.dtype != dtype
    return one.to(dtype) if is_other else one
