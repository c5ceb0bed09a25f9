"""Normalises by the statistics of all ranks' rows, and the gradient of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from dreamcomm.sync_batch_norm.calls import HEADER, Kind, LayerCalls
from dreamcomm.sync_batch_norm.replay import Recorder

__all__ = ["Forward", "normalise"]

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Forward:
    """What one forward pass of a layer needs besides its tensors.

    Attributes:
        calls: of the layer.
        eps: is added to the variance.
        found: is given the number of all ranks' rows, and each channel's mean and variance (the
            sum of squares over the number of rows), before they are used.
        recorder: notes the calls, or None.
        has_backward: whether there will be a backward call.
    """

    calls: LayerCalls
    eps: float
    found: Callable[[int, Tensor, Tensor], None]
    recorder: Recorder | None
    has_backward: bool


def normalise(input: Tensor, weight: Tensor | None, bias: Tensor | None, how: Forward) -> Tensor:
    """Batch norm by the statistics of all ranks' rows. Collective, as its backward pass is.

    Statistics are float64 for a float64 input, and float32 for others.

    Args:
        input: [N, C, ...], of any floating type; N may be 0, on all ranks even.
        weight: [C], of any floating type.
        bias: likewise.
        how: of the layer.

    Returns:
        As the input in shape, type and memory format.

    Raises:
        ValueError: the input has no C channels, or one value a channel on all ranks together.
        TypeError: it has no floating type.
        RuntimeError: as :meth:`LayerCalls.gather`.
    """
    made: Tensor = _Normalise.apply(input, weight, bias, how)  # type: ignore[no-untyped-call]
    return made


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, how: Forward
    ) -> Tensor:
        from dreamcomm import _C

        kind = Kind.WITH_BACKWARD if how.has_backward else Kind.PLAIN
        try:
            dense = _dense(_checked(input, how.calls))
            count, *statistics = _statistics(dense)
        except Exception:
            how.calls.gather(Kind.FAILED, 0)
            raise
        rows = how.calls.gather(kind, count, *statistics)
        if how.recorder is not None:
            how.recorder.note_forward(how.calls, kind)
        total, mean, variance = _C.join_statistics(rows, HEADER, _type_of_statistics(input))
        if total == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{input.size()}"
            )
        how.found(total, mean, variance)
        ctx.save_for_backward(dense, weight, mean, variance)
        ctx.how, ctx.total = how, total
        ctx.bias_dtype = None if bias is None else bias.dtype
        if not count:
            return torch.empty_like(dense)
        scale, shift = (_as(one, mean) for one in (weight, bias))
        return torch.batch_norm(dense, scale, shift, mean, variance, False, 0.0, how.eps, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from dreamcomm import _C

        input, weight, mean, variance = ctx.saved_tensors
        how: Forward = ctx.how
        has_rows = input.numel() > 0
        if has_rows:
            gradient = _like(gradient, input)
            products, sums = _sums(gradient, input, mean, variance, how.eps)
        else:
            products, sums = torch.zeros_like(mean), torch.zeros_like(mean)
        of_input = None
        if ctx.needs_input_grad[0]:
            both = how.calls.add(torch.cat([sums, products]).double())
            if how.recorder is not None:
                how.recorder.note_backward(how.calls)
            of_input = (
                _C.batch_norm_input_gradient(
                    gradient, input, weight, mean, variance, how.eps, both, ctx.total
                )
                if has_rows
                else torch.empty_like(input)
            )
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        of_weight = products.to(weight.dtype) if needs_weight else None
        return of_input, of_weight, sums.to(ctx.bias_dtype) if needs_bias else None, None


def _checked(input: Tensor, calls: LayerCalls) -> Tensor:
    if input.dim() < 2 or input.size(1) != calls.channels:
        raise ValueError(
            f"{calls.who}: expected an input [N, {calls.channels}, ...], got {list(input.shape)}"
        )
    if not input.is_floating_point():
        raise TypeError(f"{calls.who}: expected an input of a floating type, got {input.dtype}")
    return input


def _dense(input: Tensor) -> Tensor:
    """The tensor, or a copy in a memory format that torch's operators walk through in one go."""
    last = FORMATS.get(input.dim())
    is_last = last is not None and input.is_contiguous(memory_format=last)
    return input if is_last else input.contiguous()


def _like(gradient: Tensor, input: Tensor) -> Tensor:
    """The gradient in the input's memory format."""
    if input.is_contiguous():
        return gradient.contiguous()
    return gradient.contiguous(memory_format=FORMATS[input.dim()])


def _type_of_statistics(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _statistics(input: Tensor) -> tuple[int, Tensor | None, Tensor | None]:
    """The number of rows, each channel's mean, and the sum of squares over the number of rows."""
    channels = input.size(1)
    if input.numel() == 0:
        return 0, None, None
    # Without running statistics the operator would give a half input's in 16 bits.
    unused = input.new_zeros(2, channels, dtype=_type_of_statistics(input))
    mean, variance = torch.batch_norm_update_stats(input, unused[0], unused[1], 0.0)
    return input.numel() // channels, mean, variance


def _sums(
    gradient: Tensor, input: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Each channel's sums: of the gradient times the normalised input, and of the gradient.

    They are the weight's and the bias's gradients where statistics are given, as in evaluation.
    The operator asks for a weight and does not read it.
    """
    _, products, sums = torch.ops.aten.native_batch_norm_backward(
        gradient, input, mean, mean, variance, None, None, False, eps, [False, True, True]
    )
    return products, sums


def _as(parameter: Tensor | None, statistics: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.to(statistics.dtype)
