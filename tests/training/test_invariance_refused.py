"""What invariant_shards refuses by name, on all ranks; the next step has the right bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dreamcomm
from dreamcomm.zero import ZeroOptimizer, fully_shard
from helpers.pool import Pool
from training.invariance import SHARDS, WAYS, Way, batch, bits_of, made, one_step

pytestmark = pytest.mark.beyond_gloo("adds in a fixed order")

LOOPS = ["ddp", "replicate", "zero1", "zero2", "zero3", "gathered"]


# Arguments, modules and groups.


def construct(case: str) -> Any:
    module: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shards: Any = SHARDS
    options: dict[str, Any] = {}
    if case.startswith("number "):
        shards = eval(case.removeprefix("number "))
    if case == "sync":
        module = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    if case == "sparse":
        module = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    if case == "gloo":
        options["process_group"] = dist.new_group(backend="gloo")
    if case == "seed":
        options["seed"] = dist.get_rank()
    if case == "threads":
        torch.set_num_threads(1 + dist.get_rank())
    return module, shards, options


def refused(case: str, sharded: bool) -> str:
    module, shards, options = construct(case)
    threads = torch.get_num_threads()
    try:
        if sharded:
            group = options.pop("process_group", None)
            if group is not None:
                options["mesh"] = DeviceMesh.from_group(group, "cpu")
            fully_shard(module, invariant_shards=shards, **options)
        else:
            dreamcomm.DistributedDataParallel(module, invariant_shards=shards, **options)
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        torch.set_num_threads(min(threads, 1))
    return ""


ARGUMENTS = [
    ("number 6", "expected invariant_shards to be a power of two, got 6"),
    ("number 0", "expected invariant_shards to be a power of two, got 0"),
    ("number True", "expected invariant_shards to be a power of two, got True"),
    ("number 2.0", "expected invariant_shards to be a power of two, got 2.0"),
    ("number 1", "expected a number of ranks that divides invariant_shards=1, got 2"),
    ("sync", "layer '1' is SyncBatchNorm"),
    ("sparse", "weight' has sparse gradients"),
    ("gloo", "needs a group of the backend dreamcomm"),
    ("seed", "the ranks differ in seed: 0 on rank 0, and 1 on rank 1"),
    ("threads", "the ranks differ in threads: 1 on rank 0, and 2 on rank 1"),
]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("case", "words"), ARGUMENTS)
def test_arguments_modules_and_groups(pool: Pool, case: str, words: str, sharded: bool) -> None:
    for text in pool.run(refused, case, sharded):
        assert words in text


def test_a_number_of_ranks_that_does_not_divide(pool: Pool) -> None:
    for text in pool.run(refused, "", False, world=3):
        assert "expected a number of ranks that divides invariant_shards=8, got 3" in text


@pytest.mark.parametrize("hosts", ["a,b,a,b", "a,a,a,b"])
def test_hosts_that_are_no_subtree(pool: Pool, hosts: str) -> None:
    for text in pool.run(refused, "", False, world=4, env={"DREAMCOMM_HOSTS": hosts}):
        assert "needs hosts of neighbouring ranks" in text


def test_16_bits_between_hosts(pool: Pool) -> None:
    how: Any = {"options": {"internode_dtype": "16bit"}, "env": {"DREAMCOMM_HOSTS": "a,b"}}
    for text in pool.run(refused, "", False, **how):
        assert "internode_dtype='16bit'" in text


def replicas() -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    with pytest.raises(ValueError, match="not supported with replicas") as caught:
        fully_shard(nn.Linear(4, 4), mesh=mesh, invariant_shards=SHARDS)
    return str(caught.value)


def test_a_mesh_with_replicas(pool: Pool) -> None:
    pool.run(replicas)


# Within a step.


def loss_of(way: Way, number: int) -> torch.Tensor:
    x, y = batch(0, number, torch.float32)
    return nn.functional.mse_loss(way.model(x), y)


def outside(way: Way) -> None:
    loss_of(way, 0).backward()


def twice(way: Way) -> None:
    for number in way.model.shards():
        loss_of(way, number).backward()
        loss_of(way, number).backward()


def no_pass(way: Way) -> None:
    for _ in way.model.shards():
        pass


def early_step(way: Way) -> None:
    for number in way.model.shards():
        loss_of(way, number).backward()
        break
    way.optimizer.step()


def early_clip(way: Way) -> None:
    for number in way.model.shards():
        loss_of(way, number).backward()
        way.clips.clip_grad_norm_(1.0)


def not_cleared(way: Way) -> None:
    for number in way.model.shards():
        loss_of(way, number).backward()
    for number in way.model.shards():
        loss_of(way, number).backward()


def accumulating(way: Way) -> None:
    with way.model.no_sync():
        loss_of(way, 0).backward()


def reducing(way: Way) -> None:
    way.model.reduce_gradients()


def other_threads(way: Way) -> None:
    torch.set_num_threads(2)
    try:
        way.model.shards()
    finally:
        torch.set_num_threads(1)


def too_few_losses(way: Way) -> None:
    losses = []
    for number in way.model.shards():
        loss = loss_of(way, number)
        loss.backward()
        losses.append(loss.detach())
    way.model.mean(losses[1:])


def own_state(way: Way) -> None:
    state = way.model.shards.state_dict()
    way.model.shards.load_state_dict({**state, "step": dist.get_rank()})
    try:
        way.model.shards()
    finally:
        way.model.shards.load_state_dict(state)


def changed(way: Way) -> None:
    for number in way.model.shards():
        loss_of(way, number).backward()
        for one in way.model.parameters():
            if one.grad is not None:
                one.grad.mul_(2)


def after_a_break(way: Way) -> None:
    for _ in way.model.shards():
        break
    loss_of(way, 0).backward()


WITHIN: dict[str, tuple[Callable[[Way], None], str]] = {
    "outside": (outside, "runs in a loop over the module's shards()"),
    "twice": (twice, "a shard has one backward pass, and this is its second"),
    "no_pass": (no_pass, "shard 1 of this rank's 4 ran no backward pass"),
    "early_step": (early_step, "of this rank's 4 shards of the step are missing"),
    "after_a_break": (after_a_break, "runs in a loop over the module's shards()"),
    "early_clip": (early_clip, "of this rank's 4 shards of the step are missing"),
    "not_cleared": (not_cleared, "has a gradient when a step of shards begins"),
    "accumulating": (accumulating, "no_sync() is not supported with invariant_shards="),
    "reducing": (reducing, "reduce_gradients() is not supported with invariant_shards="),
    "other_threads": (other_threads, "expected 1 threads, as when the run began, got 2"),
    "too_few_losses": (too_few_losses, "expected a loss of each of 4 shards, got 3"),
    "own_state": (own_state, "the ranks differ in step: 0 on rank 0, and 1 on rank 1"),
}


def within(way_name: str, case: str) -> tuple[str, list[Any], list[Any]]:
    """The error; and the bits of two steps after it, and of a run without it."""
    way = WAYS[way_name](made("mlp"), "sgd")
    act, _ = WITHIN[case]
    text = ""
    try:
        act(way)
    except (RuntimeError, ValueError) as error:
        text = str(error)
    if hasattr(way.model, "reset_iter_state"):
        way.model.reset_iter_state()
    way.optimizer.zero_grad()
    way.model.shards.step = 0
    after = [one_step(way, "mlp", step) for step in range(2)] + bits_of(way)
    clean = WAYS[way_name](made("mlp"), "sgd")
    return text, after, [one_step(clean, "mlp", step) for step in range(2)] + bits_of(clean)


@pytest.mark.parametrize("case", list(WITHIN))
@pytest.mark.parametrize("way", LOOPS)
def test_within_a_step(pool: Pool, way: str, case: str) -> None:
    for text, after, clean in pool.run(within, way, case):
        assert WITHIN[case][1] in text
        assert after == clean


def changes(way_name: str) -> str:
    with pytest.raises(RuntimeError, match="was changed, or cleared") as caught:
        changed(WAYS[way_name](made("mlp"), "sgd"))
    return str(caught.value)


@pytest.mark.parametrize("way", ["ddp", "replicate", "zero1", "zero2"])  # others show none
def test_gradients_that_a_script_changes_between_shards(pool: Pool, way: str) -> None:
    pool.run(changes, way)


def kept() -> tuple[list[Any], list[Any]]:
    """The bits of a step whose script keeps gradients of shards and writes to them, and without."""
    found = []
    for keeps in (True, False):
        way = WAYS["ddp"](made("mlp"), "sgd")
        total: list[Any] = []
        for number in way.model.shards():
            if total:
                for one in total:
                    one.zero_()
            loss_of(way, number).backward()
            if keeps and number != way.model.shards.local[-1]:
                total = [one.grad for one in way.model.parameters()]
        way.optimizer.step()
        found.append(bits_of(way))
    return found[0], found[1]


def test_gradients_that_a_script_keeps_are_its_own(pool: Pool) -> None:
    for with_kept, without in pool.run(kept):
        assert with_kept == without


def flat_after_a_break() -> bool:
    """A gradient that is a view of the script's stays one after a loop that was left."""
    way = WAYS["ddp"](made("mlp"), "sgd")
    parameters = list(way.model.parameters())
    flats = [torch.zeros_like(one) for one in parameters]
    for one, flat in zip(parameters, flats, strict=True):
        one.grad = flat
    for number in way.model.shards():
        loss_of(way, number).backward()
        break
    assert all(one.grad is flat for one, flat in zip(parameters, flats, strict=True))
    for number in way.model.shards():
        loss_of(way, number).backward()
    return all(one.grad is flat for one, flat in zip(parameters, flats, strict=True))


def test_gradients_that_a_script_has_given_stay_its_tensors(pool: Pool) -> None:
    assert all(pool.run(flat_after_a_break))


def halves() -> str:
    model = fully_shard(nn.Linear(5, 301).to(torch.bfloat16), invariant_shards=SHARDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in model.shards():
        model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(ValueError, match="rows of 16 bits") as caught:
        optimizer.step()
    return str(caught.value)


def test_rows_of_16_bits_under_torchs_own_optimizers(pool: Pool) -> None:
    pool.run(halves)


def hooks_and_joins() -> list[str]:
    texts = []
    model = dreamcomm.DistributedDataParallel(nn.Linear(4, 4), invariant_shards=SHARDS)
    for act in (
        lambda: model.register_comm_hook(None, dreamcomm.hooks.average),
        lambda: model.join().__enter__(),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            act()
        texts.append(str(caught.value))
    return texts


def test_hooks_and_joins(pool: Pool) -> None:
    for hook, join in pool.run(hooks_and_joins):
        assert "leave reduce= and invariant_shards= out" in hook
        assert "join() is not supported with invariant_shards=" in join


def fused(form: str) -> None:
    layer = nn.Linear(4, 4)
    if form == "units":
        model: Any = fully_shard(layer, invariant_shards=SHARDS)
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        model = dreamcomm.DistributedDataParallel(layer, invariant_shards=SHARDS)
        kind = torch.optim.Adagrad if form == "heaps" else torch.optim.AdamW
        optimizer = ZeroOptimizer(model.parameters(), kind, stage=1, lr=0.01, fused=True)
    for _ in model.shards():
        model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="torch's fused"):
        optimizer.step()


@pytest.mark.parametrize("form", ["heaps", "hosts", "units"])
def test_fused_kernels_of_torch_on_rows(pool: Pool, form: str) -> None:
    env = {"DREAMCOMM_HOSTS": "a,b"} if form == "hosts" else {}
    pool.run(fused, form, env=env)


class Counting(nn.Module):
    """Changes a buffer in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(1, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.inner(x)
        return out


def counting() -> None:
    model = dreamcomm.DistributedDataParallel(Counting(), invariant_shards=SHARDS)
    x = torch.randn(2, 4)

    def step() -> None:
        for _ in model.shards():
            model(x).sum().backward()

    with pytest.raises(RuntimeError, match="a pass changed buffer 'calls'"):
        step()


def test_buffers_that_passes_change(pool: Pool) -> None:
    pool.run(counting)
