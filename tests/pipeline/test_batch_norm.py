"""Deferred batch norm: after a step the running statistics are the whole batch's."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dreamcomm.pipeline.compute.batch_norm import DeferredBatchNorm


def close(layer: nn.Module, other: nn.Module) -> None:
    for one, wanted in zip(layer.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-6, atol=1e-6)


def bits(module: nn.Module) -> list[Tensor]:
    return [one.clone() for one in module.buffers()]


def equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def parts_of(shape: tuple[int, ...], sizes: Sequence[int], offset: float = 3.0) -> list[Tensor]:
    torch.manual_seed(len(shape))
    return list((torch.randn(sum(sizes), *shape) * 2 + offset).split(list(sizes)))


@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
@pytest.mark.parametrize(
    ("make", "shape"),
    [(nn.BatchNorm1d, (4,)), (nn.BatchNorm2d, (4, 3, 5)), (nn.BatchNorm3d, (4, 1, 2, 3))],
)
def test_as_the_whole_batch(
    make: type[nn.BatchNorm1d], shape: tuple[int, ...], momentum: float | None
) -> None:
    whole = make(4, momentum=momentum)
    layer = copy.deepcopy(whole)
    deferred = DeferredBatchNorm([layer])
    for _ in range(3):
        parts = parts_of(shape, [5, 2, 9, 2])
        before = bits(layer)
        plain = copy.deepcopy(layer)
        with deferred.step():
            for index, part in enumerate(parts):
                with deferred.at(index):
                    assert torch.equal(layer(part), plain(part))
        assert equal(bits(layer), before)
        deferred.commit()
        whole(torch.cat(parts))
        close(layer, whole)
    assert int(layer.num_batches_tracked) == 3  # type: ignore[arg-type]


def test_far_from_zero() -> None:
    whole = nn.BatchNorm1d(4, momentum=1.0)
    layer = copy.deepcopy(whole)
    parts = parts_of((4,), [50] * 6, offset=200.0)
    collect(DeferredBatchNorm([layer]), layer, parts)
    reference = torch.cat(parts).double()
    assert layer.running_mean is not None
    assert layer.running_var is not None
    torch.testing.assert_close(layer.running_mean.double(), reference.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.running_var.double(), reference.var(0), rtol=1e-5, atol=0)


def collect(
    deferred: DeferredBatchNorm,
    module: nn.Module,
    parts: Sequence[Tensor],
    order: Sequence[int] | None = None,
) -> None:
    with deferred.step():
        for index in order or range(len(parts)):
            with deferred.at(index):
                module(parts[index])
    deferred.commit()


def test_bits_do_not_depend_on_the_order() -> None:
    parts = parts_of((4, 3), [3, 5, 2, 8, 4, 7])
    found = []
    for seed in range(5):
        layer = nn.BatchNorm1d(4)
        order = list(range(6))
        random.Random(seed).shuffle(order)
        collect(DeferredBatchNorm([layer]), layer, parts, order)
        found.append(bits(layer))
    assert all(equal(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    layer, whole = (nn.BatchNorm1d(4).to(dtype) for _ in range(2))
    parts = [part.to(dtype) for part in parts_of((4, 6), [8, 4])]
    collect(DeferredBatchNorm([layer]), layer, parts)
    whole(torch.cat(parts))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-2
    for one, wanted in zip(layer.buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(one, wanted, rtol=tolerance, atol=tolerance)


def test_a_layer_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            self.norm(x)
            out: Tensor = self.norm(x * 3 + 1)
            return out

    module, whole = Twice(), Twice()
    parts = parts_of((4,), [5, 6])
    collect(DeferredBatchNorm([module]), module, parts)
    whole(torch.cat(parts))
    close(module, whole)


def test_backward_and_recomputation() -> None:
    """A checkpoint repeats the layer in the backward pass: nothing is collected twice."""
    layer = nn.BatchNorm1d(4)
    module = nn.Sequential(nn.Linear(4, 4), layer, nn.ReLU(inplace=True))
    plain = copy.deepcopy(module)
    whole = copy.deepcopy(module)
    parts = parts_of((4,), [5, 6])
    deferred = DeferredBatchNorm([module])
    with deferred.step():
        for index, part in enumerate(parts):
            with deferred.at(index):
                out = checkpoint(module, part, use_reentrant=False)
            out.sum().backward()
    deferred.commit()
    for part in parts:
        plain(part).sum().backward()
    for one, wanted in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, wanted.grad)  # type: ignore[arg-type]
    whole(torch.cat(parts))
    close(module, whole)


def test_left_alone() -> None:
    layers = nn.ModuleList(
        [
            nn.BatchNorm1d(4).eval(),
            nn.BatchNorm1d(4, track_running_stats=False),
            nn.SyncBatchNorm(4),
            nn.InstanceNorm1d(4, track_running_stats=True),
        ]
    )
    plain = copy.deepcopy(layers)
    deferred = DeferredBatchNorm([layers])
    x = torch.randn(3, 4, 5)
    with deferred.step(), deferred.at(0):
        for layer, other in zip(layers, plain, strict=True):
            if not isinstance(layer, nn.SyncBatchNorm):
                assert torch.equal(layer(x), other(x))
    deferred.commit()
    assert equal(bits(layers), bits(plain))
    assert not layers[2]._forward_pre_hooks


def test_errors_leave_nothing_behind() -> None:
    layer = nn.BatchNorm1d(4)
    state, before = set(vars(layer)), bits(layer)
    own = list(layer.buffers())
    deferred = DeferredBatchNorm([layer])
    with deferred.step(), deferred.at(0):
        with pytest.raises(ValueError, match="expected 2D or 3D"):
            layer(torch.ones(4))
        assert layer.momentum == 0.1
        assert all(one is other for one, other in zip(layer.buffers(), own, strict=True))
        copy.deepcopy(layer)
    with pytest.raises(ValueError, match="expected 2D"), deferred.step(), deferred.at(0):
        nn.Sequential(layer, nn.Flatten(0), layer)(torch.randn(3, 4))
    deferred.commit()
    assert equal(bits(layer), before)
    assert set(vars(layer)) == state
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks
    assert not layer._forward_hooks_always_called
    pickle.loads(pickle.dumps(layer))
    with deferred.step():
        with deferred.at(0):
            layer(torch.randn(3, 4))
        deferred.discard()
        with pytest.raises(RuntimeError, match="within another"), deferred.step():
            pass
    deferred.commit()
    assert equal(bits(layer), before)
