"""What a call of replicas cannot stand within."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from dreamcomm.one_process.scatter import map_tensors

__all__ = ["check_modes"]

transforms = cast(Any, torch)._C._functorch.peek_interpreter_stack
saved_tensor_hooks = cast(Any, torch)._C._autograd._top_saved_tensors_default_hooks


def check_modes(arguments: Any, module: nn.Module) -> None:
    """Refuses what would give wrong numbers in threads.

    Raises:
        RuntimeError: the call is within a transform of torch.func, or a segment of a checkpoint,
            which numbers saved tensors in the order of one thread; or arguments or parameters have
            tangents.
    """
    if transforms() is not None:
        raise RuntimeError(
            "DataParallel: transforms of torch.func do not reach threads; call the module itself "
            "there"
        )
    hooks = saved_tensor_hooks(True)
    if hooks and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
        raise RuntimeError(
            "DataParallel: a checkpoint around replicas would mix up what they save; checkpoint "
            "parts inside of the module, or take use_reentrant=True"
        )
    if cast(Any, forward_ad)._current_level >= 0:
        map_tensors([arguments, [*module.parameters()]], _check_tangent)


def _check_tangent(tensor: Tensor) -> Tensor:
    if cast(Any, forward_ad).unpack_dual(tensor).tangent is not None:
        raise RuntimeError(
            "DataParallel: tangents of forward-mode differentiation do not reach threads; call the "
            "module itself there"
        )
    return tensor
