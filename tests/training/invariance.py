"""Ways of training with invariant_shards, whose bits do not depend on the number of ranks."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import dreamcomm
from ddp.models import CONTEXT, FEATURES, TOKENS, Block, make
from dreamcomm.zero import ZeroOptimizer
from zero.units.sharding import BatchNormCnn, shard

SHARDS = 8
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
ROWS = 3  # of a shard


class DroppingGpt(nn.Module):
    """With dropout, and a parameter that every third batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 96, _weight=torch.randn(TOKENS, 96) / 8)
        self.blocks = nn.Sequential(*(Block(96) for _ in range(2)))
        self.drop = nn.Dropout(0.2)
        self.rare = nn.Parameter(torch.randn(96, 96) / 8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :CONTEXT].abs() * 1000).long() % TOKENS
        hidden = self.drop(self.blocks(self.drop(self.embedding(tokens))))
        if int(tokens[0, 0]) % 3 == 0:
            hidden = hidden + hidden @ self.rare
        return (hidden @ self.embedding.weight.T).mean(1)[:, :5]


def made(name: str) -> nn.Module:
    torch.manual_seed(7)
    if name == "gpt":
        return DroppingGpt()
    if name == "cnn":
        return BatchNormCnn()
    if name == "half":  # rows that fill no vector
        layers = nn.Linear(FEATURES, 301), nn.Tanh(), nn.Linear(301, 303), nn.Linear(303, 5)
        return nn.Sequential(*layers).to(torch.bfloat16)
    return make("mlp")


@dataclass(frozen=True)
class Way:
    model: Any  # has shards() and mean()
    optimizer: Any
    clips: Any


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
}


def ddp(module: nn.Module, kind: str, **options: Any) -> Way:
    model = dreamcomm.DistributedDataParallel(module, invariant_shards=SHARDS, **options)
    optimizer, arguments = OPTIMIZERS[kind]
    return Way(model, optimizer(model.parameters(), **arguments), model)


def replicated(module: nn.Module, kind: str) -> Way:
    model: Any = dreamcomm.replicate(module, invariant_shards=SHARDS)
    optimizer, arguments = OPTIMIZERS[kind]
    return Way(model, optimizer(model.parameters(), **arguments), model)


def zero(module: nn.Module, kind: str, stage: int) -> Way:
    model = dreamcomm.DistributedDataParallel(module, invariant_shards=SHARDS)
    kind_of, arguments = OPTIMIZERS[kind]
    optimizer = ZeroOptimizer(model.parameters(), kind_of, stage=stage, **arguments)
    return Way(model, optimizer, optimizer)


def unclipped(module: nn.Module, kind: str, stage: int) -> Way:
    """Steps read the gradients themselves, which a norm would have reduced before."""
    way = zero(module, kind, stage)
    return Way(way.model, way.optimizer, None)


def sharded(module: nn.Module, kind: str, **options: Any) -> Way:
    model = shard(module, **options)
    kind_of, arguments = OPTIMIZERS[kind]
    return Way(model, ZeroOptimizer(model.parameters(), kind_of, **arguments), model)


WAYS: dict[str, Callable[[nn.Module, str], Way]] = {
    "ddp": ddp,
    "replicate": replicated,
    "zero1": lambda module, kind: zero(module, kind, 1),
    "zero1-unclipped": lambda module, kind: unclipped(module, kind, 1),
    "zero2": lambda module, kind: zero(module, kind, 2),
    "zero3": lambda module, kind: sharded(module, kind, invariant_shards=SHARDS),
    "gathered": lambda module, kind: sharded(module, kind, invariant_shards=SHARDS, gather=True),
}


def batch(step: int, number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + number)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return x.to(dtype), torch.randn(ROWS, 5, generator=generator)


def digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    data = whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def one_step(way: Way, name: str, step: int) -> tuple[str, str]:
    """The loss and the norm of a step, in bits."""
    dtype = torch.bfloat16 if name == "half" else torch.float32
    way.optimizer.zero_grad()
    losses = []
    for number in way.model.shards():
        x, y = batch(step, number, dtype)
        loss = nn.functional.mse_loss(way.model(x).float(), y)
        loss.backward()
        losses.append(loss.detach())
    mean = float(way.model.mean(losses)).hex()
    norm = float(way.clips.clip_grad_norm_(0.5)).hex() if way.clips is not None else ""
    way.optimizer.step()
    return mean, norm


Bits = list[Any]


def bits_of(way: Way) -> Bits:
    return [digest(one) for one in (*way.model.parameters(), *way.model.buffers())]


def saved_and_resumed(name: str, way_name: str, path: str, steps: int) -> Bits:
    """The bits of further steps of a run that was saved at another world size, or begins here."""
    way = WAYS[way_name](made(name), "adamw")
    if not Path(path).exists():
        for step in range(steps):
            one_step(way, name, step)
        state = {
            "model": get_model_state_dict(way.model, options=WHOLE),
            "optimizer": get_optimizer_state_dict(way.model, way.optimizer, options=WHOLE),
            "shards": way.model.shards.state_dict(),
        }
        if dist.get_rank() == 0:
            torch.save(state, path)
    else:
        state = torch.load(path, weights_only=True)
        set_model_state_dict(way.model, state["model"], options=WHOLE)
        set_optimizer_state_dict(way.model, way.optimizer, state["optimizer"], options=WHOLE)
        way.model.shards.load_state_dict(state["shards"])
    done = way.model.shards.step
    found: Bits = [one_step(way, name, step) for step in range(done, done + steps)]
    return found + bits_of(way)


def trained(name: str, way_name: str, kind: str, steps: int) -> Bits:
    """Losses, norms, weights and running statistics, in bits."""
    way = WAYS[way_name](made(name), kind)
    found: Bits = [one_step(way, name, step) for step in range(steps)]
    return found + bits_of(way)


# What random data does not show.

USERS = [(0,), (0, 1), (0, 1, 2, 3), (3, 4), (7,), tuple(range(SHARDS)), ()]  # shards


class Signs(nn.Module):
    """Gradients of -0, which some shards have, and others lack."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.ParameterList(nn.Parameter(torch.ones(64, 3)) for _ in USERS)
        self.large = nn.ParameterList(nn.Parameter(torch.ones(64, 700)) for _ in USERS)

    def forward(self, number: int) -> Tensor:
        total = torch.zeros((), requires_grad=True)
        for users, small, large in zip(USERS, self.used, self.large, strict=True):
            if number in users:
                total = total + (small * -0.0).sum() + (large * -0.0).sum()
        return total


def signs_of_zero(way_name: str) -> Bits:
    """The momentum after a first step is the gradient."""
    way = WAYS[way_name](Signs(), "sgd")
    for number in way.model.shards():
        way.model(number).backward()
    way.optimizer.step()
    state = get_optimizer_state_dict(way.model, way.optimizer, options=WHOLE)
    if dist.get_rank() > 0:
        return []  # it is on rank 0
    buffers = {name: one.get("momentum_buffer") for name, one in state["state"].items()}
    return [(name, None if one is None else digest(one)) for name, one in sorted(buffers.items())]


def random_numbers(way_name: str) -> list[float]:
    """Those of this rank's shards in two steps, and one from outside."""
    way = WAYS[way_name](made("mlp"), "sgd")
    torch.manual_seed(3)
    found = []
    for step in range(2):
        way.optimizer.zero_grad()
        for number in way.model.shards():
            found.append(float(torch.rand(())))
            x, y = batch(step, number, torch.float32)
            nn.functional.mse_loss(way.model(x), y).backward()
    return [*found, float(torch.rand(()))]


def mean_of(values: list[float]) -> float:
    way = WAYS["ddp"](made("mlp"), "sgd")
    local = way.model.shards.local
    return float(way.model.mean(torch.tensor(values[local.start : local.stop]).double()))


def copied() -> tuple[Bits, Bits]:
    """The state after a step, and random numbers of the next one; of the model and of its copy."""
    way = WAYS["ddp"](made("mlp"), "sgd")
    one_step(way, "mlp", 0)
    found: list[Bits] = []
    for model in (way.model, copy.deepcopy(way.model)):
        state = model.shards.state_dict()
        model.zero_grad()
        numbers = []
        for number in model.shards():
            numbers.append(float(torch.rand(())))
            x, y = batch(1, number, torch.float32)
            nn.functional.mse_loss(model(x), y).backward()
        found.append([state, numbers])
    return found[0], found[1]


COUNTS = [1, 2, 3, 4, 5, 6, 7, 8]
WEIGHTS = [0.5, 2, 1e16, 1, 1, 3, 1e16, 0.25]  # added in another order they are another sum


def over_tokens(way_name: str, counts: list[float]) -> Bits:
    """Losses are sums, and each shard counts; the bits of gradients, and how far they are off."""
    module = made("mlp").double()
    alone = made("mlp").double()
    options: dict[str, Any] = {"reduce": "tokens"}
    model: Any
    if way_name == "zero3":
        model = shard(module, invariant_shards=SHARDS, **options)
    elif way_name == "replicate":
        model = dreamcomm.replicate(module, invariant_shards=SHARDS, **options)
    else:
        model = dreamcomm.DistributedDataParallel(module, invariant_shards=SHARDS, **options)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    if way_name in ("zero1", "zero2"):
        stage = int(way_name[-1])
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, stage=stage, lr=1.0)
    for number in model.shards():
        x, y = batch(0, number, torch.float64)
        model.count(counts[number])
        (model(x) - y).square().sum().backward()
    optimizer.step()
    for number in range(SHARDS):
        x, y = batch(0, number, torch.float64)
        ((alone(x) - y).square().sum() / sum(counts)).backward()
    off = 0.0
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
        assert theirs.grad is not None
        off = max(off, float((whole.detach() - (theirs.detach() - theirs.grad)).abs().max()))
    return [off < 1e-12, *(digest(one) for one in model.parameters())]
