"""Layers that take the places of others, with all that those have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dreamcomm
from helpers.pool import Pool


def norms(module: nn.Module) -> list[str]:
    kinds = nn.modules.batchnorm._BatchNorm
    return [type(one).__name__ for one in module.modules() if isinstance(one, kinds)]


def net(**options: Any) -> nn.Sequential:
    inner = nn.Sequential(nn.BatchNorm2d(3, **options), nn.InstanceNorm2d(3))
    return nn.Sequential(nn.Conv2d(1, 3, 1), inner, nn.Flatten(), nn.BatchNorm1d(12, **options))


def test_batch_norm_is_replaced_and_comes_back() -> None:
    module = net()
    parameters, names = list(module.parameters()), list(module.state_dict())
    module[1].eval()
    assert dreamcomm.convert_sync_batchnorm(module) is module
    assert norms(module) == ["SyncBatchNorm", "SyncBatchNorm"]
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert list(module.state_dict()) == names
    assert not module[1][0].training
    assert module[3].training
    assert module[1][0].name == "1.0"
    dreamcomm.revert_sync_batchnorm(module)
    assert norms(module) == ["BatchNorm2d", "BatchNorm1d"]
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert vars(module[3]).keys() == vars(nn.BatchNorm1d(12)).keys()
    module(torch.ones(2, 1, 2, 2))


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}],
    ids=str,
)
def test_torchs_class_is_replaced_and_replaces(options: dict[str, Any]) -> None:
    module: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(net(**options))
    state = module.state_dict()
    module = dreamcomm.convert_sync_batchnorm(module)
    assert all(isinstance(module[i], dreamcomm.SyncBatchNorm) for i in (3,))
    module.load_state_dict(state)
    module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    assert type(module[3]) is nn.SyncBatchNorm
    assert module[3].momentum == options.get("momentum", 0.1)
    module.load_state_dict(state)
    assert list(module.state_dict()) == list(state)


def test_the_class_has_torchs_arguments_and_method() -> None:
    group: Any = object()
    layer = dreamcomm.SyncBatchNorm(
        3, 1e-3, None, True, False, group, "cpu", torch.float64, bias=False
    )
    theirs = nn.SyncBatchNorm(3, 1e-3, None, True, False, group, "cpu", torch.float64, bias=False)
    assert repr(layer) == repr(theirs)
    assert layer.process_group is theirs.process_group
    assert {k: (v.shape, v.dtype) for k, v in layer.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in theirs.state_dict().items()
    }
    made = dreamcomm.SyncBatchNorm.convert_sync_batchnorm(net(), group)
    assert made[3].process_group is group


def test_a_layer_in_two_places_stays_one() -> None:
    shared = nn.BatchNorm1d(3)
    module = dreamcomm.convert_sync_batchnorm(nn.ModuleList([shared, nn.Sequential(shared)]))
    assert module[0] is module[1][0]
    assert isinstance(dreamcomm.convert_sync_batchnorm(shared), dreamcomm.SyncBatchNorm)


def test_hooks_stay() -> None:
    layer = nn.BatchNorm1d(3)
    seen: list[str] = []
    layer.register_forward_hook(lambda *_: seen.append("after"))
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    dreamcomm.convert_sync_batchnorm(layer)(torch.randn(4, 3))
    assert seen == ["before", "after"]


class Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Named(nn.BatchNorm2d):
    """A subclass without a forward of its own."""


def test_what_would_be_lost_is_refused_by_name() -> None:
    parametrized = nn.BatchNorm1d(3)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    for layer, text in (
        (Activated(3), "layer '1' (Activated) has a forward of its own"),
        (nn.LazyBatchNorm1d(), "layer '1' (LazyBatchNorm1d) has lazy parameters"),
        (parametrized, "layer '1' (ParametrizedBatchNorm1d) has parametrized parameters"),
    ):
        module = nn.Sequential(nn.BatchNorm1d(2), layer)
        with pytest.raises(TypeError) as raised:
            dreamcomm.convert_sync_batchnorm(module)
        assert text in str(raised.value)
        assert type(module[0]) is nn.BatchNorm1d
    named = dreamcomm.convert_sync_batchnorm(Named(3))
    assert type(named) is dreamcomm.SyncBatchNorm
    assert type(dreamcomm.revert_sync_batchnorm(named)) is Named


def test_a_layer_that_was_made_needs_a_class_to_go_back_to() -> None:
    module = nn.Sequential(dreamcomm.SyncBatchNorm(3))
    with pytest.raises(TypeError, match="give the class that it gets, as layer_class="):
        dreamcomm.revert_sync_batchnorm(module)
    dreamcomm.revert_sync_batchnorm(module, nn.BatchNorm2d)
    assert type(module[0]) is nn.BatchNorm2d


def convert_after_sharding() -> str:
    module = dreamcomm.zero.fully_shard(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    try:
        dreamcomm.convert_sync_batchnorm(module)
    except TypeError as error:
        return str(error)
    return ""


@pytest.mark.beyond_gloo("shards by dreamcomm")
def test_a_sharded_layer_is_refused_by_name(pool: Pool) -> None:
    for text in pool.run(convert_after_sharding):
        assert "layer '1' (BatchNorm1d) is sharded already: convert before fully_shard" in text
