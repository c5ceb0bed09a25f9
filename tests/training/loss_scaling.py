"""200 steps with a loss scale, in which gradients of some ranks get an infinity, in all ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import dreamcomm
from dreamcomm.pipeline import Pipeline
from dreamcomm.zero import ZeroOptimizer, fully_shard

STEPS, WIDTH, ROWS, MICRO = 200, 6, 12, 2
BAD = (0, 1, 17, 18, 40, 63, 64, 65, 90, 111, 130, 151, 170, 188, 199)
USES = ("0.first", "1.scalar", "2.weight", "3.last", "2.bias")
SCALING: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 9}
RATE = 0.02

Found = tuple[list[float], dict[str, Tensor]]  # scales after each step, and weights in the end


class Spoiled(torch.autograd.Function):
    """The tensor itself; one element of its gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, element: int, value: float) -> Tensor:
        ctx.element, ctx.value = element, value
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone()
        gradient.view(-1)[ctx.element % gradient.numel()] = ctx.value
        return gradient, None, None


@dataclass
class Spoiler:
    """Says where the gradients of a step are spoiled.

    Attributes:
        step: that runs; None: nothing is spoiled.
        is_mine: whether this rank is the one that a step spoils, among those that run a use.
    """

    is_mine: Callable[[int], bool]
    step: int | None = None

    def __call__(self, given: Tensor, use: str) -> Tensor:
        if self.step not in BAD or not torch.is_grad_enabled():
            return given
        turn = BAD.index(self.step)
        if USES[turn % len(USES)] != use or not self.is_mine(turn):
            return given
        value = float("nan") if turn % 2 else float("inf")
        made: Tensor = Spoiled.apply(given, 7 * turn, value)  # type: ignore[no-untyped-call]
        return made


class Layer(nn.Module):
    def __init__(self, linear: nn.Linear, spoil: Spoiler, weight: str, bias: str = "") -> None:
        super().__init__()
        self.linear, self.spoil, self.uses = linear, spoil, (weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.uses
        one = self.spoil(self.linear.weight, weight)
        return F.linear(x, one, self.spoil(self.linear.bias, bias))


class Scalar(nn.Module):
    def __init__(self, spoil: Spoiler) -> None:
        super().__init__()
        self.factor, self.spoil = nn.Parameter(torch.tensor(0.9)), spoil

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * self.spoil(self.factor, "1.scalar")


def net(spoil: Spoiler) -> nn.Sequential:
    """The first and the last layer are one."""
    torch.manual_seed(1)
    tied, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(
        Layer(tied, spoil, "0.first"),
        Scalar(spoil),
        Layer(other, spoil, "2.weight", "2.bias"),
        Layer(tied, spoil, "3.last"),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    return x, y


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def weights(named: Any) -> dict[str, Tensor]:
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in named
    }


def one_process() -> Found:
    spoil = Spoiler(lambda _: True)
    module = net(spoil)
    optimizer, scaler = sgd(module.parameters()), torch.amp.GradScaler("cpu", **SCALING)
    scales = []
    for step in range(STEPS):
        spoil.step = step
        x, y = batch(step)
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(module(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, weights(module.named_parameters(remove_duplicate=False))


# Ways of training: the module, its optimizers, and what clips.


def ddp(module: nn.Module) -> Any:
    model = dreamcomm.DistributedDataParallel(module, bucket_cap_mb=1e-4)
    return model, [sgd(model.parameters())], model


def partial(module: Any) -> Any:
    """The scalar is left out, and each rank steps its own."""
    module._ddp_params_and_buffers_to_ignore = ["1.factor"]
    model = dreamcomm.DistributedDataParallel(module)
    return model, [sgd(model.parameters())], model


def replicated(module: nn.Module) -> Any:
    dreamcomm.replicate(module)
    return module, [sgd(module.parameters())], module


def zero(module: nn.Module, stage: int) -> Any:
    optimizer = ZeroOptimizer(
        module.parameters(), torch.optim.SGD, stage=stage, lr=RATE, momentum=0.9
    )
    return module, [optimizer], optimizer


def under_ddp(module: nn.Module, stage: int) -> Any:
    model = dreamcomm.DistributedDataParallel(module)
    _, optimizers, clips = zero(model, stage)
    return model, optimizers, clips


def sharded(module: Any, **options: Any) -> Any:
    fully_shard(module[2], **options)
    made = fully_shard(module, **options)
    return made, [sgd(made.parameters())], made


def sharded_zero(module: nn.Module) -> Any:
    made, _, _ = sharded(module)
    _, optimizers, clips = zero(made, 1)
    return made, optimizers, clips


def hybrid(module: nn.Module) -> Any:
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    return sharded(module, mesh=mesh)


WAYS: dict[str, Callable[[Any], Any]] = {
    "ddp": ddp,
    "partial": partial,
    "replicate": replicated,
    "zero1": lambda module: zero(module, 1),
    "zero2": lambda module: zero(module, 2),
    "ddp-zero1": lambda module: under_ddp(module, 1),
    "ddp-zero2": lambda module: under_ddp(module, 2),
    "sharded": sharded,
    "gathered": lambda module: sharded(module, gather=True),
    "sharded-zero": sharded_zero,
    "hybrid": hybrid,
}


def on_ranks(way: str, unscales: bool, fused: bool = False) -> tuple[Found, Found]:
    """What the ranks have found, and one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    spoil = Spoiler(lambda turn: turn % world == rank)
    module, (optimizer,), clips = WAYS[way](net(spoil))
    if fused:
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE, fused=True)
    scaler, scales = dreamcomm.GradScaler(**SCALING), []
    for step in range(STEPS):
        spoil.step = step
        x, y = (one.chunk(world)[rank] for one in batch(step))
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(module(x), y)).backward()
        if unscales:
            scaler.unscale_(optimizer)
            clips.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    named = module.named_parameters()
    return (scales, weights((n.removeprefix("module."), one) for n, one in named)), one_process()


def in_pipelines(schedule: str, how: str, pipes: int) -> tuple[Found, Found]:
    """Two stages, or four on two ranks; several pipelines side by side."""
    mesh = init_device_mesh("cpu", (2, pipes), mesh_dim_names=("pipe", "data"))
    group, share = mesh["data"].get_group(), mesh.get_local_rank("data")
    spoil = Spoiler(lambda turn: turn % pipes == share)
    scaler = dreamcomm.GradScaler(**SCALING)
    layers = net(spoil)
    loss_fn: Any = F.mse_loss
    if how == "idle":  # the first stage has nothing to train
        layers = nn.Sequential(nn.Identity(), *layers)
    pipe = Pipeline(
        layers,
        MICRO,
        schedule=schedule,
        split=[1] if how == "idle" else "cost",
        loss_fn=loss_fn,
        mesh=mesh,
        loss="all",
        scaler=scaler,
    )
    optimizers: list[Any] = []
    keep: Any = None
    parameters = list(pipe.parameters())
    if how.startswith("zero"):
        optimizers = [
            ZeroOptimizer(
                parameters, torch.optim.SGD, group, stage=int(how[-1]), lr=RATE, momentum=0.9
            )
        ]
    elif parameters:
        keep = dreamcomm.DistributedDataParallel(pipe.module, process_group=group)
        optimizers = [sgd([one]) for one in parameters] if how == "many" else [sgd(parameters)]
    scales = []
    for step in range(STEPS):
        spoil.step = step
        x, y = (one.chunk(pipes)[share] for one in batch(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        pipe.step(x, target=y)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        pipe.clip_grad_norm_(1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    del keep
    found = weights(pipe.named_parameters())
    if how == "idle":
        found = {f"{int(name[0]) - 1}{name[1:]}": one for name, one in found.items()}
    return (scales, found), one_process()
