"""The code of docs/data_parallel.md runs, and the texts of its errors are what is raised."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dreamcomm

PAGE = (Path(__file__).parents[2] / "docs" / "data_parallel.md").read_text()


class Calls(nn.Module):
    """Calls a function with a layer and the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4))
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.layers[0], *inputs)


def test_the_code() -> None:
    replicas, parts = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    names = {
        "dreamcomm": dreamcomm,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "inputs": torch.ones(4, 4),
        "targets": torch.zeros(4, 4),
        "loss_fn": F.mse_loss,
    }
    exec(compile(replicas, "page", "exec"), names)
    assert all(p.grad is not None for p in model.parameters())
    names["model"] = nn.ModuleDict({"encoder": nn.Linear(4, 4), "decoder": nn.Linear(4, 4)})
    exec(compile(parts.replace("cuda:0", "cpu"), "page", "exec"), names)
    assert len(names["model"]["encoder"]._forward_pre_hooks) == 1


kept: list[Tensor] = []


def lose(layer: nn.Module, x: Tensor) -> Tensor:
    kept.append(layer(x))
    return kept[-1].detach() + 0 * layer(x)


def clamp(layer: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.bias.clamp_(0, 1)
    return x


def call(function: Callable[..., Any], *inputs: Tensor) -> Callable[[], Any]:
    return lambda: dreamcomm.DataParallel(Calls(function), 2)(*inputs)


def hold(inner: nn.Module) -> Callable[[], Any]:
    return lambda: dreamcomm.DataParallel(inner, 2)(torch.ones(6, 4))


def compiled() -> nn.Module:
    module = nn.Linear(4, 4)
    module.compile()
    return module


RAISING: dict[str, Callable[[], Any]] = {
    "argument 0 of shape [8, 2] into 2 parts for its 2 replicas, but argument 1 of shape [1, 2] "
    "into 1": call(lambda _, x, y: x, torch.ones(8, 2), torch.ones(1, 2)),
    "argument 0 has shape []; pass a Python number": call(lambda _, x: x, torch.ones(())),
    "cannot join the output": call(lambda _, x: "text", torch.ones(4)),
    "forward has changed argument 0 of shape [6, 4] in place": call(
        lambda _, x: x.add_(1), torch.ones(6, 4)
    ),
    "a backward pass reaches a replica from a tensor that its forward did not return": lambda: (
        call(lose, torch.ones(6, 4))(),
        kept[0].sum().backward(),  # type: ignore[no-untyped-call]
    ),
    "is compiled": hold(compiled()),
    "is a SyncBatchNorm": hold(dreamcomm.SyncBatchNorm(4)),
    "Caught KeyError in replica 1 of 2 of DataParallel, in its forward pass": call(
        lambda _, x: {0.0: x}[x[0].item()], torch.arange(2.0)
    ),
}


@pytest.mark.parametrize("words", RAISING)
def test_errors(words: str) -> None:
    assert f"`{words}`" in PAGE
    with pytest.raises((RuntimeError, ValueError, TypeError, KeyError)) as caught:
        RAISING[words]()
    said = caught.value.args[0] if caught.value.args else ""
    assert words in str(getattr(caught.value, "msg", said))


def test_a_parameter_that_is_changed() -> None:
    words = "forward has changed parameter '0.bias' in place"
    assert f"`{words}`" in PAGE
    with pytest.raises(
        RuntimeError, match=r"forward has changed parameter 'layers\.0\.bias' in pl"
    ):
        call(clamp, torch.ones(6, 4))()
