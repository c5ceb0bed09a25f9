"""What other libraries touch on DistributedDataParallel is there, on torch's class and on ours."""

from __future__ import annotations

import inspect
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import dreamcomm
from ddp.models import batch, make, rows_of
from dreamcomm.buckets.protocol import ReducesGradients
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

CLASSES = {"torch": nn.parallel.DistributedDataParallel}


def class_of(name: str) -> Any:
    return CLASSES.get(name, dreamcomm.DistributedDataParallel)


both_classes = pytest.mark.parametrize("name", ["torch", "ours"])


def test_the_arguments_are_torchs_in_order() -> None:
    theirs = [*inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters]
    ours = [*inspect.signature(dreamcomm.DistributedDataParallel.__init__).parameters]
    assert ours[: len(theirs)] == theirs
    assert ours[len(theirs) :] == ["reduce", "unused", "invariant_shards", "seed"]
    assert issubclass(dreamcomm.DistributedDataParallel, nn.parallel.DistributedDataParallel)


def attributes(name: str) -> dict[str, Any]:
    module = make("mlp")
    model = class_of(name)(module, bucket_cap_mb=2)
    x, y = (rows_of(one, dist.get_rank(), dist.get_world_size()) for one in batch(0))
    for _ in range(2):
        nn.functional.mse_loss(model(x), y).backward()
    data = model._get_ddp_logging_data()
    with model.no_sync():
        in_no_sync = model.require_backward_grad_sync
    return {
        "module": model.module is module,
        "device": model.device,
        "device_ids": model.device_ids,
        "device_type": model.device_type,
        "output_device": model.output_device,
        "group": model.process_group is dist.group.WORLD,
        "static_graph": model.static_graph,
        "find_unused_parameters": model.find_unused_parameters,
        "grad_sync": (model.require_backward_grad_sync, in_no_sync),
        "param_sync": model.require_forward_param_sync,
        "broadcast_buffers": model.broadcast_buffers,
        "parameters_to_ignore": model.parameters_to_ignore,
        "bucket_bytes_cap": (model.bucket_bytes_cap, model.bucket_bytes_cap_list),
        "dim": model.dim,
        "keys": [*model.state_dict()],
        "logged": {key: data[key] for key in ("world_size", "rank", "module_name")},
        "join": (model.join_device, model.join_process_group is dist.group.WORLD),
        "training": (model.eval().training, model.train().training),
    }


def test_attributes_are_torchs(pool: Pool) -> None:
    for theirs, ours in zip(
        pool.run(attributes, "torch"), pool.run(attributes, "ours"), strict=True
    ):
        assert ours == theirs


def call_privates(name: str) -> None:
    model = class_of(name)(make("mlp"))
    x, y = (rows_of(one, dist.get_rank(), dist.get_world_size()) for one in batch(0))
    with model._inside_ddp_forward():
        assert type(model)._get_active_ddp_module() is model
        out = model.module(x)
    model.reducer.prepare_for_forward()
    model.reducer.prepare_for_backward(list(torch.nn.parallel.distributed._find_tensors(out)))
    nn.functional.mse_loss(out, y).backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    total = gradient.clone()
    dist.all_reduce(total, op=dist.ReduceOp.AVG if name != "torch" else dist.ReduceOp.SUM)
    expected = total if name != "torch" else total / dist.get_world_size()
    assert torch.equal(gradient, expected)  # equal on all ranks
    model.reducer._rebuild_buckets()
    model.reducer._push_all_rebuilt_params()
    model.logger._set_comm_hook_name("a name")
    assert model._get_ddp_logging_data()["comm_hook"] == "a name"
    model._check_reducer_finalized()


def set_static_graph(name: str) -> tuple[bool, list[Tensor]]:
    model = class_of(name)(make("mlp"))
    model._set_static_graph()
    for step in range(3):
        model.zero_grad()
        model(batch(step)[0]).sum().backward()
    return model.static_graph, [p.grad for p in model.parameters()]


def test_a_static_graph_may_be_set_later(pool: Pool) -> None:
    ours, theirs = pool.run(set_static_graph, "ours"), pool.run(set_static_graph, "torch")
    for (is_static, gradients), (_, expected) in zip(ours, theirs, strict=True):
        assert is_static
        assert all(map(torch.equal, gradients, expected))


@both_classes
def test_what_clients_call_works(pool: Pool, name: str) -> None:
    pool.run(call_privates, name)


def train(name: str, hook: str, steps: int = 5) -> list[Tensor]:
    # PowerSGD calls several collectives for a bucket: under torch's class several buckets' calls
    # come in different orders on the ranks.
    cap = 25 if (name, hook) == ("torch", "powerSGD") else 0.1
    model = class_of(name)(make("mlp"), bucket_cap_mb=cap)
    if hook == "builtin fp16":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif hook == "builtin":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif hook == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "bf16":
        model.register_comm_hook(dreamcomm.hooks.State(), dreamcomm.hooks.bf16)
    elif hook == "bf16 feedback":
        model.register_comm_hook(dreamcomm.hooks.State(), dreamcomm.hooks.bf16_feedback)
    elif hook == "average":
        model.register_comm_hook(dreamcomm.hooks.State(), dreamcomm.hooks.average)
    elif hook:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = (rows_of(one, dist.get_rank(), dist.get_world_size()) for one in batch(step))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "hook",
    [
        "allreduce_hook",
        "fp16_compress_hook",
        "builtin fp16",
        "builtin",
        "powerSGD",
        "bf16",
        "bf16 feedback",
        "average",
    ],
)
def test_hooks_give_what_they_give_in_torchs_class(pool: Pool, hook: str) -> None:
    ours, theirs = pool.run(train, "ours", hook), pool.run(train, "torch", hook)
    for one, other in zip(ours, theirs, strict=True):
        # Buckets differ between the classes, and with them what PowerSGD approximates.
        tolerance = 2e-2 if hook == "powerSGD" else 1e-6
        for weight, expected in zip(one, other, strict=True):
            assert torch.allclose(weight, expected, rtol=tolerance, atol=tolerance)
    for weight, expected in zip(ours[0], ours[1], strict=True):
        assert torch.equal(weight, expected)


def own_hook() -> list[tuple[int, bool, int, int]]:
    """What a hook sees of its buckets, and that its result becomes the gradient."""
    seen: list[tuple[int, bool, int, int]] = []

    def hook(state: list[Any], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        shapes = [one.shape for one in bucket.parameters()]
        assert [one.shape for one in bucket.gradients()] == shapes
        seen.append((bucket.index(), bucket.is_last(), len(shapes), bucket.buffer().numel()))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(torch.full_like(bucket.buffer(), 3.0))
        return done

    hook.__annotations__ = {}
    model = dreamcomm.DistributedDataParallel(make("mlp"), bucket_cap_mb=0.1)
    model.register_comm_hook([], hook)
    for step in range(2):
        model.zero_grad()
        model(batch(step)[0]).sum().backward()
        assert all(bool((p.grad == 3.0).all()) for p in model.parameters())
    return seen


def test_a_hook_sees_each_bucket(pool: Pool) -> None:
    for seen in pool.run(own_hook):
        elements = sum(p.numel() for p in make("mlp").parameters())
        half = len(seen) // 2
        for part in (seen[:half], seen[half:]):
            assert [index for index, _, _, _ in part] == list(range(half))
            assert [last for _, last, _, _ in part] == [False] * (half - 1) + [True]
            assert sum(count for _, _, count, _ in part) == 6
            assert sum(numel for _, _, _, numel in part) == elements


def pickled(name: str) -> bool:
    model = class_of(name)(make("mlp"))
    x, y = (rows_of(one, dist.get_rank(), dist.get_world_size()) for one in batch(0))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    for one in (model, again):
        one.zero_grad()
        nn.functional.mse_loss(one(x), y).backward()
    return all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


@both_classes
def test_it_can_be_saved_whole(pool: Pool, name: str) -> None:
    assert pool.run(pickled, name) == [True, True]


def ignored(name: str) -> list[float]:
    module = make("mlp")
    class_of(name)._set_params_and_buffers_to_ignore_for_model(module, ["layers.0.weight"])
    with torch.no_grad():
        module.layers[0].weight.fill_(float(dist.get_rank()))
    model = class_of(name)(module)
    model(batch(0)[0]).sum().backward()
    return [module.layers[0].weight[0, 0].item(), module.layers[4].bias.grad[0].item()]


@both_classes
def test_ignored_parameters_stay_the_ranks_own(pool: Pool, name: str) -> None:
    assert [weight for weight, _ in pool.run(ignored, name)] == [0.0, 1.0]


def replicated() -> tuple[list[str], str, bool]:
    module = make("mlp")
    names = [*module.state_dict()]
    model = dreamcomm.replicate(module)
    model(batch(0)[0]).sum().backward()
    return (
        [*model.state_dict()] if model is module else [],
        type(model).__name__,
        isinstance(model, type(make("mlp"))) and names == [*model.state_dict()],
    )


def test_replicate_keeps_the_object_and_its_names(pool: Pool) -> None:
    for names, kind, same in pool.run(replicated):
        assert names == [*make("mlp").state_dict()]
        assert kind == "ReplicatedMlp"
        assert same


def copied() -> bool:
    module = dreamcomm.replicate(make("mlp"))
    averaged = torch.optim.swa_utils.AveragedModel(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    copies = [averaged.module, torch.load(file, weights_only=False)]
    module(batch(dist.get_rank())[0]).sum().backward()  # the hooks of the first are in place
    total = module.layers[0].bias.grad.clone()
    dist.all_reduce(total, dist.ReduceOp.AVG)
    assert torch.allclose(total, module.layers[0].bias.grad)
    for one in copies:
        one(batch(dist.get_rank())[0]).sum().backward()  # without the others
    return all(type(one) is type(make("mlp")) for one in copies)


def test_a_copy_of_a_replicated_module_is_a_plain_one(pool: Pool) -> None:
    assert pool.run(copied) == [True, True]


def offered(how: str) -> list[int]:
    module = make("odd")
    wrapped = dreamcomm.replicate(module) if how == "replicate" else class_of(how)(module)
    assert isinstance(wrapped, ReducesGradients)
    return [len(part.parameters) for part in wrapped.clip_parts()]


@pytest.mark.parametrize("how", ["ours", "replicate"])
def test_both_offer_what_other_ways_of_training_need(pool: Pool, how: str) -> None:
    trained = sum(p.requires_grad for p in make("odd").parameters())
    assert pool.run(offered, how) == [[trained]] * 2


def reported() -> tuple[str, int]:
    model = dreamcomm.DistributedDataParallel(make("odd"))
    assert "no backward pass has reduced yet" in str(model.report())
    for step in range(2):
        model(batch(step)[0]).sum().backward()
    return str(model.report()), model.report().passes


def test_the_report_names_buckets_times_and_bytes(pool: Pool) -> None:
    for text, passes in pool.run(reported):
        assert passes == 2
        assert "exposed communication" in text
        assert "unused" in text
        assert "frozen" not in text


def starting_weights(how: str, init_sync: bool) -> list[float]:
    module = nn.Linear(1, 1)
    module.register_buffer("kept", torch.zeros(1))
    for tensor in (module.weight, module.bias, module.kept):
        nn.init.constant_(tensor, 1.0 + dist.get_rank())
    if how == "replicate":
        dreamcomm.replicate(module)
    else:
        class_of(how)(module, init_sync=init_sync)
    return [module.weight.item(), module.bias.item(), module.kept.item()]


@pytest.mark.parametrize("how", ["torch", "ours", "replicate"])
def test_weights_and_buffers_begin_as_rank_0s(pool: Pool, how: str) -> None:
    assert pool.run(starting_weights, how, True, world=3) == [[1.0] * 3] * 3
    if how != "replicate":
        assert pool.run(starting_weights, how, False) == [[1.0] * 3, [2.0] * 3]
