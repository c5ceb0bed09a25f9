"""What one_process/test_model_parallel.py runs on the tests' accelerator, in its own process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dreamcomm
from helpers import device_hooks
from helpers.device_hooks import NAME
from helpers.devices import device_module, on_host

FIRST, SECOND = f"{NAME}:0", f"{NAME}:1"


def install() -> None:
    """Once in a process."""
    device_module()
    device_hooks.install()


class Scale(nn.Module):
    """Multiplies and adds: what the accelerator can compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        out = x * self.weight + self.bias
        return out if plus is None else out + plus


class Model(nn.Module):
    """Two branches, a decoder with a keyword argument, and a head that no part names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.other = Scale(), nn.Sequential(Scale(), Scale())
        self.decoder, self.head = Scale(), Scale()

    def forward(self, x: Tensor) -> dict[str, Any]:
        out = self.decoder(self.encoder(x), plus=self.other(x))
        return {"out": self.head(out), "raw": (out, "text")}


def make() -> Model:
    torch.manual_seed(4)
    return Model()


def device_of(module: nn.Module) -> str:
    (device,) = {str(p.device) for p in module.parameters()}
    return device


def gradients(module: nn.Module) -> list[Tensor]:
    grads = [p.grad for p in module.parameters()]
    assert all(grad is not None for grad in grads)
    return [
        grad if grad.device.type == "cpu" else on_host(grad) for grad in grads if grad is not None
    ]


def train(model: nn.Module, call: Any, steps: int = 3) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    seen: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, generator=torch.Generator().manual_seed(step)).requires_grad_()
        out = call(x)["out"]
        loss = (out * torch.arange(4.0)).sum()
        loss.backward()
        seen += [loss.detach(), x.grad, *gradients(model)]
        optimizer.step()
    return seen


def parts_train_as_on_one_device() -> None:
    alone, model = make(), make()
    devices = {"encoder": FIRST, "other": SECOND, "decoder": torch.device(SECOND)}
    assert dreamcomm.model_parallel(model, devices, output_device="cpu") is model
    assert device_of(model.encoder) == FIRST
    assert device_of(model.other) == device_of(model.decoder) == SECOND
    assert device_of(model.head) == "cpu"
    expected, found = train(alone, alone), train(model, model)
    assert all(map(torch.equal, found, expected))


def outputs_go_where_they_are_asked_for() -> None:
    model = make()
    dreamcomm.model_parallel(model, {"decoder": FIRST})
    out = model(torch.ones(4))
    assert str(out["raw"][0].device) == FIRST
    assert out["out"].device.type == "cpu", "the head is in no part, and stays"
    assert out["raw"][1] == "text"
    dreamcomm.model_parallel(model, {"decoder": FIRST}, output_device=SECOND)
    out = model(torch.ones(4))
    assert {str(one.device) for one in (out["raw"][0], out["out"])} == {SECOND}


def another_call_takes_the_place_of_the_first() -> None:
    model, alone = make(), make()
    dreamcomm.model_parallel(model, {"encoder": FIRST, "other": SECOND}, output_device=FIRST)
    hooks = sum(len(one._forward_pre_hooks) + len(one._forward_hooks) for one in model.modules())
    dreamcomm.model_parallel(model, {"encoder": SECOND, "other": FIRST}, output_device="cpu")
    assert device_of(model.encoder) == SECOND
    again = sum(len(one._forward_pre_hooks) + len(one._forward_hooks) for one in model.modules())
    assert again == hooks
    assert all(map(torch.equal, train(model, model), train(alone, alone)))


def parts_that_are_moved_later_are_followed() -> None:
    model, alone = make(), make()
    dreamcomm.model_parallel(model, {"encoder": FIRST}, output_device="cpu")
    model.encoder.to(SECOND)
    model.head.to(FIRST)
    assert all(map(torch.equal, train(model, model), train(alone, alone)))


class Layered(nn.Module):
    """Layers in a list, of which nobody calls the list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scale()
        self.layers = nn.ModuleList([Scale(), nn.ModuleDict({"inner": Scale()})])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.layers[1]["inner"](self.layers[0](self.first(x)))}


def lists_of_layers_are_parts() -> None:
    torch.manual_seed(1)
    alone = Layered()
    for devices in ({"layers": FIRST}, {"first": FIRST}, {"layers.1": SECOND, "layers.0": FIRST}):
        torch.manual_seed(1)
        model = Layered()
        dreamcomm.model_parallel(model, devices, output_device="cpu")
        torch.manual_seed(1)
        alone = Layered()
        assert all(map(torch.equal, train(model, model), train(alone, alone)))


def tied_to_the_rest_is_refused() -> None:
    model = make()
    model.head.weight = model.encoder.weight
    with pytest.raises(
        ValueError, match=r"head\.weight, which is in no part and on cpu, is one ten"
    ):
        dreamcomm.model_parallel(model, {"encoder": FIRST})
    assert device_of(model) == "cpu"
    assert not model.encoder._forward_pre_hooks
    dreamcomm.model_parallel(model, {"encoder": "cpu"})
