"""Connections that jump over blocks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from dreamcomm.pipeline.compute.skip import Skip, find_skips


class Down(nn.Module):
    def __init__(self, skip: Skip) -> None:
        super().__init__()
        self.linear, self.skip = nn.Linear(3, 3), skip

    def forward(self, x: Tensor) -> Tensor:
        self.skip.stash({"x": x, "name": "down", "pair": (x * 2, None)})
        out: Tensor = self.linear(x)
        return out


class Up(nn.Module):
    def __init__(self, skip: Skip) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(3, 3), nn.ModuleList([skip])

    def forward(self, x: Tensor) -> Tensor:
        skip = self.inner[0]
        assert isinstance(skip, Skip)
        value = skip.pop()
        out: Tensor = self.linear(x) + value["x"] + value["pair"][0]
        return out


def model() -> nn.Sequential:
    far, near = Skip(), Skip()
    return nn.Sequential(Down(far), Down(near), Up(near), Up(far))


def test_one_process() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    whole = model()
    downs, ups = whole[:2], whole[2:]
    a, b = downs[0].linear, downs[1].linear
    h = a(x)
    wanted = ups[1].linear(ups[0].linear(b(h)) + 3 * h) + 3 * x
    out = whole(x)
    torch.testing.assert_close(out, wanted)
    out.sum().backward()
    assert x.grad is not None
    assert not any(skip.holds for skip in find_skips(dict(whole.named_children())).values())


def test_misuse() -> None:
    skip = Skip()
    with pytest.raises(RuntimeError, match="without a stash"):
        skip.pop()
    with pytest.raises(RuntimeError, match="did not call stash"):
        skip.take()
    skip.stash(None)
    assert skip.holds
    with pytest.raises(RuntimeError, match="twice without a pop"):
        skip.stash(1)
    with pytest.raises(RuntimeError, match="held already"):
        skip.give(1)
    assert skip.pop() is None
    assert not skip.holds
    skip.give([1])
    skip.clear()
    skip.clear()
    assert not skip.holds


def test_moved_by_a_runner() -> None:
    """Two stages with copies of the model each, as on two ranks."""
    here, there = model(), model()
    there.load_state_dict(here.state_dict())
    x = torch.randn(2, 3)
    hidden = here[:2](x)
    sent = {n: s.take() for n, s in find_skips(dict(here.named_children())).items() if s.holds}
    assert list(sent) == ["0.skip", "1.skip"]
    skips = find_skips(dict(there.named_children()))
    for name, value in sent.items():
        skips[name].give(value)
    torch.testing.assert_close(there[2:](hidden), here(x))


def test_names_and_copies() -> None:
    whole = model()
    skip = whole[0].skip
    assert isinstance(skip, Skip)
    skip.stash(torch.ones(2, requires_grad=True) * 2)
    for other in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert other[0].skip is other[3].inner[0]
        assert not other[0].skip.holds
        assert list(find_skips(dict(other.named_children()))) == ["0.skip", "1.skip"]
        other(torch.ones(1, 3))
    assert skip.holds
    assert not any("skip" in name for name in whole.state_dict())
    assert list(find_skips({"a": skip, "b": whole[2]})) == ["a", "b.inner.0"]
    assert "full" in repr(skip)
