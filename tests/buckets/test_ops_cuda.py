"""pack() and unpack() on CUDA tensors: the CPU's bits. Skipped where there is no GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from dreamcomm import ops

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((3, 5), (0,), (1,), (1000,), (257, 33), ())


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in SHAPES]


def same(on_gpu: torch.Tensor, on_cpu: torch.Tensor) -> bool:
    """To the last bit. A tensor of no dimension cannot be seen as bytes."""
    return torch.equal(bits(on_gpu.cpu()), bits(on_cpu))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_the_bits_of_any_shape_can_be_compared() -> None:
    for shape in SHAPES:
        zero = torch.zeros(shape)
        assert same(zero, zero.clone())
        assert zero.numel() == 0 or not same(zero, -zero)


@on_a_gpu
@pytest.mark.parametrize(("source", "to"), product(DTYPES, DTYPES))
def test_pack_and_residual_are_the_cpus(source: torch.dtype, to: torch.dtype) -> None:
    given = tensors(source)
    there = [t.cuda() for t in given]
    count = sum(t.numel() for t in given)
    residual = torch.linspace(-1e-3, 1e-3, count)
    residual_there = residual.cuda()
    out = torch.empty(count, dtype=to)
    out_there = torch.empty(count, dtype=to, device="cuda")
    expected = ops.pack(given, out, scale=1 / 3, residual=residual)
    assert ops.pack(there, out_there, scale=1 / 3, residual=residual_there) == expected
    assert same(out_there, out)
    assert same(residual_there, residual)


@on_a_gpu
@pytest.mark.parametrize(("source", "to"), product(DTYPES, DTYPES))
def test_unpack_and_sums_are_the_cpus(source: torch.dtype, to: torch.dtype) -> None:
    count = sum(t.numel() for t in tensors(to))
    buffer = torch.randn(count, dtype=torch.float64).to(source)
    found, found_there = tensors(to), [t.cuda() for t in tensors(to)]
    done = ops.unpack(buffer, found, divisor=3, factor=0.7, inspect=True)
    done_there = ops.unpack(buffer.cuda(), found_there, divisor=3, factor=0.7, inspect=True)
    for mine, theirs in zip(found, found_there, strict=True):
        assert same(theirs, mine)
    assert isinstance(done_there.squared_norm, torch.Tensor)
    assert done_there.squared_norm.item() == done.squared_norm
    assert bool(done_there.finite) == done.finite


@on_a_gpu
def test_a_graph_replays_both() -> None:
    given = [torch.randn(5000, device="cuda"), torch.randn(77, device="cuda")]
    buffer = torch.empty(5077, dtype=torch.bfloat16, device="cuda")
    back = [torch.empty_like(t) for t in given]

    def step() -> torch.Tensor:
        ops.pack(given, buffer)
        norm = ops.unpack(buffer, back, inspect=True).squared_norm
        assert isinstance(norm, torch.Tensor)
        return norm

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = step()
    for t in given:
        t.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert same(back[0], given[0].bfloat16().float().cpu())
    expected = sum(t.bfloat16().double().square().sum().item() for t in given)
    assert norm.item() == pytest.approx(expected)


@on_a_gpu
def test_devices_must_be_one() -> None:
    with pytest.raises(ValueError, match=r"on cuda:0 like 'out', got a tensor on cpu"):
        ops.pack([torch.zeros(3)], torch.zeros(3, device="cuda"))
