"""The calls of layers, and what ranks are told that make other ones."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dreamcomm
from dreamcomm.sync_batch_norm.layer import SyncBatchNorm
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("counts calls of dreamcomm's groups")


def net(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4, **options),
        nn.ReLU(),
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4, **options),
    )
    made = dreamcomm.convert_sync_batchnorm(module)
    assert isinstance(made, nn.Sequential)
    return made


def images(rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(rows, 2, 5, 5, generator=generator)


def calls_of(module: nn.Module) -> dict[str, int]:
    """How often the layers' group has gathered and added."""
    layer = next(one for one in module.modules() if isinstance(one, SyncBatchNorm))
    found = dreamcomm.stats(layer.calls().group)
    return {name: found[name]["calls"] for name in found if found[name]["calls"]}


def new_calls(module: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    before = calls_of(module)
    run()
    after = calls_of(module)
    return {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)}


def counted(how: str) -> tuple[dict[str, int], dict[str, int]]:
    """New calls of the layers' group, and of the default one."""
    module = net()
    x = images()
    module(x)  # makes the group
    run = {
        "step": lambda: module(x).sum().backward(),
        "eval": lambda: module.eval()(x).sum().backward(),
        "no grad": lambda: torch.no_grad()(module)(x),
        "inference": lambda: torch.inference_mode()(module)(x),
        "first layer": lambda: module[1](x.repeat(1, 2, 1, 1)).sum().backward(),
        "frozen": lambda: module.requires_grad_(False)(x),
        "checkpoint": lambda: checkpoint(module, x, use_reentrant=False).sum().backward(),
        "twice": lambda: (module(x) + module(x)).sum().backward(),
    }[how]
    whole = dict(dreamcomm.stats())
    found = new_calls(module, run)
    now = dreamcomm.stats()
    return found, {
        one: now[one]["calls"] - whole[one]["calls"] for one in now if now[one] != whole[one]
    }


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("step", {"all_gather": 2, "all_reduce": 2}),
        ("eval", {}),
        ("no grad", {"all_gather": 2}),
        ("inference", {"all_gather": 2}),
        ("first layer", {"all_gather": 1}),
        ("frozen", {"all_gather": 2}),
        ("checkpoint", {"all_gather": 4, "all_reduce": 2}),
        ("twice", {"all_gather": 4, "all_reduce": 4}),
    ],
)
def test_a_step_has_two_calls_a_layer(pool: Pool, how: str, expected: dict[str, int]) -> None:
    assert pool.run(counted, how) == [(expected, {})] * 2


def groups() -> list[str]:
    first, second = net(), net()
    half = dreamcomm.convert_sync_batchnorm(nn.BatchNorm2d(2), dist.new_group([0, 1]))
    for module in (first, second, copy.deepcopy(first), half):
        module(images())
    found = [one.group_desc for one in dist.distributed_c10d._world.pg_map]
    return sorted(one.partition(" of ")[0] for one in found)


def test_layers_of_a_process_group_share_one_of_their_own(pool: Pool) -> None:
    assert pool.run(groups) == [["SyncBatchNorm", "SyncBatchNorm", "default_pg", "undefined"]] * 2


def in_halves() -> Tensor:
    made = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = dreamcomm.SyncBatchNorm(2, process_group=made[dist.get_rank() // 2])
    layer(images() + dist.get_rank() // 2)
    assert layer.running_mean is not None
    return layer.running_mean


def test_groups_side_by_side(pool: Pool) -> None:
    found = pool.run(in_halves, world=4)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2])


# Errors: on all ranks, and the next step works.


def told(how: str) -> str:
    module = net()
    x, rank = images(), dist.get_rank()
    inputs: dict[str, Callable[[], Tensor]] = {
        "order": lambda: module[4 if rank == 1 else 1](x.repeat(1, 2, 1, 1)),
        "gradient": lambda: module[1](x.repeat(1, 2, 1, 1).requires_grad_(rank == 1)),
        "channels": lambda: module[1](x if rank == 1 else x.repeat(1, 2, 1, 1)),
        "type": lambda: module[1](x.repeat(1, 2, 1, 1).to(torch.int64 if rank == 1 else x.dtype)),
    }
    text = ""
    try:
        if how == "no_grad":
            with torch.set_grad_enabled(rank != 1):
                module(x)
        elif how == "backward":
            y = x.repeat(1, 2, 1, 1).requires_grad_()
            first, second = module[1](y), module[4](y)
            (second if rank == 1 else first).sum().backward()
        else:
            inputs[how]()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    assert torch.isfinite(module(x)).all()
    return text


@pytest.mark.parametrize(
    ("how", "on_rank_0", "on_rank_1"),
    [
        (
            "order",
            "RuntimeError: SyncBatchNorm '1': rank 1 is in another layer",
            "RuntimeError: SyncBatchNorm '4': ranks 0, 2 are in another layer",
        ),
        (
            "gradient",
            "RuntimeError: SyncBatchNorm '1': its input needs a gradient on rank 1, and none on "
            "ranks 0, 2",
            "",
        ),
        (
            "no_grad",
            "RuntimeError: SyncBatchNorm '1': its input needs a gradient on ranks 0, 2, and none "
            "on rank 1",
            "",
        ),
        (
            "channels",
            "RuntimeError: SyncBatchNorm '1': rank 1 has failed here",
            "ValueError: SyncBatchNorm '1': expected an input [N, 4, ...], got [2, 2, 5, 5]",
        ),
        (
            "type",
            "RuntimeError: SyncBatchNorm '1': rank 1 has failed here",
            "TypeError: SyncBatchNorm '1': expected an input of a floating type, got torch.int64",
        ),
        (
            "backward",
            "RuntimeError: SyncBatchNorm '1': this rank's backward pass is here, and another",
            "RuntimeError: SyncBatchNorm '4': this rank's backward pass is here, and another",
        ),
    ],
)
def test_other_calls_are_an_error_on_all_ranks(
    pool: Pool, how: str, on_rank_0: str, on_rank_1: str
) -> None:
    first, second, third = pool.run(told, how, world=3)
    assert first.startswith(on_rank_0)
    assert second.startswith(on_rank_1 or on_rank_0)
    assert third.startswith(on_rank_0)


def other_sizes() -> str:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(5))
    dreamcomm.convert_sync_batchnorm(module)
    place = dist.get_rank()
    try:
        module[place](torch.ones(2, [3, 5][place]))
    except dist.DistBackendError as error:
        return str(error)
    return ""


def test_layers_of_other_sizes_are_named_in_the_groups_error(pool: Pool) -> None:
    for place, text in enumerate(pool.run(other_sizes)):
        assert text.startswith(f"SyncBatchNorm '{place}', forward call: ")


# Around a layer.


def copies() -> bool:
    x = images()
    module = net()
    module(x)
    one, other = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    expected = module(x)
    return all(torch.equal(each(x), expected) for each in (one, other, loaded))


def test_copies_work(pool: Pool) -> None:
    assert all(pool.run(copies))


def kept_group() -> bool:
    group = dist.new_group([0, 1])
    made = copy.deepcopy(dreamcomm.SyncBatchNorm(3, process_group=group))
    return made.process_group is group


def test_a_copy_has_the_process_group(pool: Pool) -> None:
    assert all(pool.run(kept_group))


def alias_and_clone() -> bool:
    """What a layer is given, and what it gives back, stays as it is."""
    layer = dreamcomm.SyncBatchNorm(2)
    x, dy = images().requires_grad_(), images(2) + 1
    kept = [one.detach().clone() for one in (x, dy)]
    output = layer(x)
    alias, before = output.detach(), output.detach().clone()
    output.backward(dy)
    assert x.grad is not None
    gradient = x.grad.clone()
    layer(images() + 5).sum().backward()
    same = [torch.equal(a, b) for a, b in zip((x.detach(), dy), kept, strict=True)]
    return all(same) and torch.equal(alias, before) and torch.equal(x.grad, gradient)


def test_nothing_is_written_into_a_callers_tensor(pool: Pool) -> None:
    assert all(pool.run(alias_and_clone))


def changed_input() -> str:
    layer = dreamcomm.SyncBatchNorm(2)
    x = images().requires_grad_() * 1.0
    output = layer(x)
    x.add_(1)
    try:
        output.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_input_that_is_changed_is_autograds_error(pool: Pool) -> None:
    for text in pool.run(changed_input):
        assert "modified by an inplace operation" in text


class Straight(nn.Module):
    """Its forward has no loop, in which a graph could not end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        out: Tensor = self.layers[4](self.layers[3](x.relu()))
        return out


def compiled() -> tuple[bool, int, str]:
    """Equal results, graphs in training, and the error where graphs may not be broken."""
    x = images()
    module = Straight()
    other = copy.deepcopy(module)
    expected = module(x)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    made = torch.compile(other, backend=keep)
    same = torch.equal(made(x), expected)
    made(x).sum().backward()
    count = len(graphs)
    text = ""
    try:
        torch.compile(copy.deepcopy(module), backend="eager", fullgraph=True)(x)
    except Exception as error:
        text = str(error)
    quiet = copy.deepcopy(module).eval()
    whole = torch.compile(quiet, backend="eager", fullgraph=True)
    assert torch.equal(whole(x), quiet(x))
    return same, count, text


def test_compiled_a_graph_ends_at_each_layer(pool: Pool) -> None:
    for same, graphs, text in pool.run(compiled):
        assert same
        assert graphs == 2  # the layers stand between
        assert "SyncBatchNorm" in text


def without_groups() -> None:
    layer, other = dreamcomm.SyncBatchNorm(3), nn.BatchNorm1d(3)
    x = torch.randn(4, 3)
    assert torch.equal(layer(x), other(x))
    assert torch.equal(layer.eval()(x), other.eval()(x))
    with pytest.raises(ValueError, match="expected at least 2D input"):
        layer.train()(torch.ones(3))


def test_without_process_groups_it_is_batch_norm() -> None:
    without_groups()


def test_on_cuda_torchs_class_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Torchs(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            made.append((args, kwargs))

    monkeypatch.setattr(nn, "SyncBatchNorm", Torchs)
    for args, kwargs in (
        ((3,), {"device": "cuda"}),
        ((3, 1e-5, 0.1, True, True, None, torch.device("cuda", 0)), {}),
    ):
        assert isinstance(dreamcomm.SyncBatchNorm(*args, **kwargs), Torchs)
    assert made == [
        ((3,), {"device": "cuda"}),
        ((3, 1e-5, 0.1, True, True, None, torch.device("cuda", 0)), {}),
    ]
