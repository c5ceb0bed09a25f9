"""A CNN with SyncBatchNorm trains as one process does with BatchNorm on all rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F

import dreamcomm
from dreamcomm.pipeline import Pipeline
from helpers.pool import Pool
from sync_batch_norm.ways import (
    MICRO,
    WAYS,
    Found,
    in_pipelines,
    make,
    on_ranks,
    sgd,
    synchronised,
    torchs_ddp,
)

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

ROWS = {2: [3, 7], 3: [7, 0, 5], 4: [1, 3, 0, 8]}


def check(found: Found, expected: Found) -> None:
    losses, norms, buffers = found
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert norms == pytest.approx(expected[1], rel=1e-5)
    for mine, theirs in zip(buffers, expected[2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("way", [one for one in WAYS if one != "hybrid"])
def test_uneven_rows_train_as_one_process(pool: Pool, way: str, world: int) -> None:
    for found, expected in pool.run(on_ranks, way, ROWS[world], world=world):
        check(found, expected)


def test_hybrid_mesh(pool: Pool) -> None:
    for found, expected in pool.run(on_ranks, "hybrid", ROWS[4], world=4):
        check(found, expected)


@pytest.mark.parametrize("way", ["ddp", "zero2", "sharded", "gathered"])
def test_checkpointed(pool: Pool, way: str) -> None:
    """Running statistics are BatchNorm's under the same checkpoint."""
    for found, expected in pool.run(on_ranks, way, ROWS[2], checkpoints=True):
        check(found, expected)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved1f1b", "zb-h1"])
@pytest.mark.parametrize("how", ["ddp", "zero2", "checkpoint"])
def test_two_pipelines_of_two_stages(pool: Pool, schedule: str, how: str) -> None:
    for found, expected in pool.run(in_pipelines, schedule, how, 8 * MICRO, world=4):
        check(found, expected)


def two_forwards(torchs: bool) -> list[float]:
    rank = dist.get_rank()
    module = synchronised(make())
    model, optimizer, _ = torchs_ddp(module) if torchs else WAYS["ddp"](module)
    norms = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        first, second = (torch.randn(8, 1, 6, 5, generator=generator) for _ in range(2))
        a, b = (one.chunk(2)[rank] for one in (first, second))
        optimizer.zero_grad()
        scale = 1 if torchs else 0.5
        (scale * (model(a).square().mean() + model(b).square().mean())).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in module.parameters()])))
        optimizer.step()
    return norms


def two_forwards_in_one_process() -> list[float]:
    module = make()
    optimizer, norms = sgd(module.parameters()), []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        first, second = (torch.randn(8, 1, 6, 5, generator=generator) for _ in range(2))
        optimizer.zero_grad()
        (module(first).square().mean() + module(second).square().mean()).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in module.parameters()])))
        optimizer.step()
    return norms


@pytest.mark.parametrize("torchs", [False, True])
def test_two_forwards_and_one_backward(pool: Pool, torchs: bool) -> None:
    """Under torch's DistributedDataParallel, too, which refuses torch's layer on CPUs."""
    for norms in pool.run(two_forwards, torchs):
        assert norms == pytest.approx(two_forwards_in_one_process(), rel=1e-5)


# join()


BATCHES = [5, 3, 2]


def rows_of_step(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(3 + rank, 1, 6, 5, generator=generator)
    return x, torch.randint(5, (3 + rank,), generator=generator)


def joined(batches: list[int]) -> tuple[list[Tensor], dict[str, int]]:
    rank = dist.get_rank()
    model = dreamcomm.DistributedDataParallel(synchronised(make()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(batches[rank]):
            x, y = rows_of_step(rank, step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    state = [one.detach().clone() for one in model.module.state_dict().values()]
    stats = dreamcomm.stats(model.module.first[1].calls().group)
    return state, {name: stats[name]["calls"] for name in ("all_gather", "all_reduce")}


def test_ranks_without_data_repeat_their_last_step(pool: Pool) -> None:
    module = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(max(BATCHES)):
        parts = [rows_of_step(r, step) for r, count in enumerate(BATCHES) if step < count]
        optimizer.zero_grad()
        outputs = module(torch.cat([x for x, _ in parts])).split([len(x) for x, _ in parts])
        losses = [F.cross_entropy(o, y) for o, (_, y) in zip(outputs, parts, strict=True)]
        (torch.stack(losses).sum() / len(BATCHES)).backward()
        optimizer.step()
    for state, calls in pool.run(joined, BATCHES, world=3):
        for mine, theirs in zip(state, module.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        assert calls == {"all_gather": 15, "all_reduce": 15}  # 3 layers, 5 steps


def join_without_a_step() -> str:
    try:
        joined([2, 0])
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_joins_before_its_first_step_is_named(pool: Pool) -> None:
    for text in pool.run(join_without_a_step):
        assert "SyncBatchNorm 'first.1': rank 1 has joined before its first step" in text


class Skipping(nn.Module):
    """The second layer is left out of the pass with the number `skips`."""

    def __init__(self, skips: int) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.BatchNorm1d(3) for _ in range(3))
        self.passes, self.skips = 0, skips

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        x = self.one(x)
        if self.passes != self.skips:
            x = self.two(x)
        out: Tensor = self.three(x)
        return out


def join_with_other_calls() -> str:
    rank = dist.get_rank()
    # In the second step both leave the layer out; rank 1 then repeats that while rank 0 runs it.
    model = dreamcomm.DistributedDataParallel(
        synchronised(Skipping(2)), find_unused_parameters=True
    )
    try:
        with Join([model]):
            for _ in range([3, 2][rank]):
                model(torch.randn(4, 3)).square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_other_calls_than_those_of_the_last_step_name_the_layer(pool: Pool) -> None:
    first, second = pool.run(join_with_other_calls)
    assert first.startswith("SyncBatchNorm 'two': rank 1 is in another layer")
    assert second.startswith("SyncBatchNorm 'three': rank 0 is in another layer")


def join_with_evaluation() -> str:
    model = dreamcomm.DistributedDataParallel(synchronised(make()))
    try:
        with Join([model]):
            x, y = rows_of_step(0, 0)
            F.cross_entropy(model(x), y).backward()
            model.eval()
            assert model.module(x).shape == (3, 5)
            model(x)
    except RuntimeError as error:
        return str(error)
    return ""


def test_evaluation_by_the_wrapper_under_join_is_refused(pool: Pool) -> None:
    for text in pool.run(join_with_evaluation):
        assert "evaluate without the wrapper, as model.module(...)" in text


# Refusals.


def over_all_ranks() -> str:
    module = synchronised(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    try:
        Pipeline(module, 2, loss_fn=F.mse_loss)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_layer_over_other_stages_is_refused(pool: Pool) -> None:
    texts = pool.run(over_all_ranks)
    assert any("layer '1' is a SyncBatchNorm over a group with rank 0" in one for one in texts)
    assert all("SyncBatchNorm" in one for one in texts)
