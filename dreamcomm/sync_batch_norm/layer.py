"""SyncBatchNorm for CPUs."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dreamcomm._torch.ddp import unseen_by_dynamo
from dreamcomm._torch.groups import given_group, shared_group_like
from dreamcomm.sync_batch_norm.calls import LayerCalls
from dreamcomm.sync_batch_norm.function import Forward, normalise
from dreamcomm.sync_batch_norm.replay import Recorder

__all__ = ["SyncBatchNorm"]

GRAPH_ENDS = "SyncBatchNorm calls other ranks in training, which is not part of a graph"


@unseen_by_dynamo
def _outside_of_graphs(layer: SyncBatchNorm, input: Tensor) -> Tensor:
    """Ends torch.compile's graph before a layer that makes calls."""
    return layer._normalise_together(input)


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the rows of all ranks (Ioffe and Szegedy 2015), as torch's, and on CPUs.

    In training it is ``nn.BatchNorm`` on the rows of all ranks together, in rank order: outputs,
    running statistics and the input's gradient; gradients of weight and bias are this rank's part.
    All ranks get the same statistics, bit for bit. Ranks may have different numbers of rows, or
    none. Evaluation, and training without process groups, is nn.BatchNorm's.

    Forward and backward make one small call each, in a group that the layers of a process group
    share. There is no backward call where the input needs no gradient, which is so on all ranks or
    on none. Ranks run the same layers in the same order.

    On a CUDA device torch's own class is made, and an input there is torch's own layer's.

    Shape:
        [N, C, ...], of 2 dimensions or more, in any memory format; the output likewise.

    Args:
        num_features: the number of channels, C.
        eps: is added to the variance.
        momentum: the share of a new batch in the running statistics; None: all batches count alike.
        affine: has a weight and a bias.
        track_running_stats: has running statistics; without them evaluation is by the batch's.
        process_group: whose ranks' rows are normalised together; None: all ranks.
        device: of the parameters.
        dtype: of the parameters. Statistics are computed in float64 for an input of that type,
            and else in float32; so 16-bit inputs and parameters go with float32 ones.
        bias: False: no bias.

    Raises:
        ValueError: the input has other channels, or one value a channel on all ranks together: on
            all ranks.
        RuntimeError: ranks are in different layers, or do not agree on whether the input needs a
            gradient: on all ranks.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """On a CUDA device torch's own class."""
        device = kwargs.get("device", args[6] if len(args) > 6 else None)
        given = torch.get_default_device() if device is None else torch.device(device)
        if cls is SyncBatchNorm and given.type == "cuda":
            return nn.SyncBatchNorm(*args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device=device,
            dtype=dtype,
            bias=bias,
        )
        self.process_group = process_group
        self._set_apart()

    def _set_apart(self) -> None:
        """What a layer has besides torch's.

        Attributes:
            name: of the layer, for errors; "" is none.
            recorder: notes calls, under join().
            rows: of all ranks, in the latest pass with calls.
        """
        self.name = ""
        self.recorder: Recorder | None = None
        self.rows = 0
        self._calls: tuple[dist.ProcessGroup, LayerCalls] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalises. Collective in training.

        Args:
            input: [N, C, ...].

        Returns:
            As the input.
        """
        together = self.training and dist.is_available() and dist.is_initialized()
        if not together or input.device.type == "meta":
            return super().forward(input)
        if input.device.type != "cpu":
            return nn.SyncBatchNorm.forward(cast(Any, self), input)
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=GRAPH_ENDS)
            return _outside_of_graphs(self, input)
        return self._normalise_together(input)

    def _normalise_together(self, input: Tensor) -> Tensor:
        has_backward = torch.is_grad_enabled() and input.requires_grad
        how = Forward(self.calls(), self.eps, self._update, self.recorder, has_backward)
        return normalise(input, self.weight, self.bias, how)

    def calls(self) -> LayerCalls:
        """The layer's calls. The first layer of a process group makes their group: collective."""
        group = given_group(self.process_group)
        if self._calls is None or self._calls[0] is not group:
            alone = dist.get_world_size(group) == 1
            own = None if alone else shared_group_like(group, desc=type(self).__name__)
            self._calls = group, LayerCalls(self.name, self._who(), self.num_features, own)
        return self._calls[1]

    def _who(self) -> str:
        if self.name:
            return f"SyncBatchNorm {self.name!r}"
        return f"SyncBatchNorm({self.num_features})"

    def set_name(self, name: str) -> None:
        """Gives the layer a name, for errors."""
        self.name, self._calls = name, None

    @torch.no_grad()
    def _update(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """Takes a batch of all ranks into the running statistics."""
        from dreamcomm import _C

        self.rows = count
        if not self.track_running_stats:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        if count:
            share = momentum or 0.0
            _C.take_into_running(self.running_mean, mean, 1.0, share)
            _C.take_into_running(self.running_var, variance, count / (count - 1), share)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _check_non_zero_input_channels(self, input: Tensor) -> None:
        """For torch's forward on a GPU."""
        if input.size(1) == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """A copy with the same process group."""
        made: SyncBatchNorm = type(self).__new__(type(self))
        memo[id(self)] = made
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group
        made.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "recorder": None, "_calls": None}

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """As :func:`dreamcomm.convert_sync_batchnorm`."""
        from dreamcomm.sync_batch_norm.convert import convert_sync_batchnorm

        return convert_sync_batchnorm(module, process_group)
