"""Bad input of servers and workers: clear errors, and no rank that is left waiting."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.server import ParameterServer, ServerError, ServerUnreachable, Worker
from helpers.pool import Pool
from server.serving import (
    common_store,
    free_address,
    give_gradients,
    held_store,
    noted,
    parameters,
    seconds,
    serve_rank,
    values,
    worker,
)

SGD = torch.optim.SGD


@pytest.fixture(autouse=True)
def _outside_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def one() -> list[nn.Parameter]:
    return parameters((3,))


@pytest.mark.parametrize(
    ("kind", "words", "options"),
    [
        (ValueError, "staleness to be at least 0, got -1; 0 is synchronous", {"staleness": -1}),
        (TypeError, "staleness to be an int or None, got 1.5", {"staleness": 1.5}),
        (TypeError, "staleness to be an int or None, got True", {"staleness": True}),
        (ValueError, "damping needs staleness above 0 or None", {"damping": "inverse"}),
        (ValueError, "or one of ['inverse'], got 'half'", {"damping": "half", "staleness": 1}),
        (ValueError, "push_scale above 0, got 0", {"push_scale": 0, "staleness": 1}),
        (ValueError, "push_scale above 0, got nan", {"push_scale": float("nan"), "staleness": 1}),
        (ValueError, "push_scale above 0, got inf", {"push_scale": float("inf"), "staleness": 1}),
        (ValueError, "with staleness=0 gradients are averaged", {"push_scale": 0.5}),
        (ValueError, "got index 2 of 2 servers", {"index": 2, "servers": 2}),
        (ValueError, "got index -1 of 1 servers", {"index": -1}),
        (ValueError, "got index 0 of 0 servers", {"servers": 0}),
        (ValueError, "one server for each of 1 parameters, got 2", {"servers": 2}),
        (ValueError, "at least 1 worker, got 0", {"workers": 0}),
        (ValueError, "how many workers to wait for", {"workers": None}),
        (ValueError, "give store=", {"store": None}),
        (ValueError, "address as \"host:port\", got 'there'", {"store": "there"}),
        (ValueError, "address as \"host:port\", got 'there:'", {"store": "there:"}),
        (TypeError, "unexpected keyword argument 'lt'", {"lt": 0.1}),
        (ValueError, "Invalid learning rate", {"lr": -1.0}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_server_refuses(kind: type[Exception], words: str, options: dict[str, Any]) -> None:
    given = {"workers": 1, "store": "127.0.0.1:1"} | options
    with pytest.raises(kind) as caught:
        ParameterServer(one(), SGD, **given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words", "params", "optimizer"),
    [
        (TypeError, "expected a class of torch.optim, got SGD (", one(), SGD(one(), lr=1.0)),
        (TypeError, "expected a class of torch.optim, got <class 'int'>", one(), int),
        (ValueError, "LBFGS computes the loss again in its step", one(), torch.optim.LBFGS),
        (TypeError, "expected an iterable of parameters, got one tensor", torch.ones(3), SGD),
        (TypeError, "expected parameters, got int", [3], SGD),
        (ValueError, "expected parameters that require gradients, got none", [], SGD),
        (ValueError, "require gradients, got none", [torch.ones(3)], SGD),
        (ValueError, "a parameter is given twice", one() * 2, SGD),
    ],
    ids=["instance", "no optimizer", "lbfgs", "tensor", "number", "none", "frozen", "twice"],
)
def test_a_server_refuses_parameters_and_optimizers(
    kind: type[Exception], words: str, params: Any, optimizer: Any
) -> None:
    with pytest.raises(kind) as caught:
        ParameterServer(params, optimizer, workers=1, store="127.0.0.1:1")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words", "options"),
    [
        (ValueError, "from 1 server to one for each of 1 parameters, got 0", {"servers": 0}),
        (ValueError, "from 1 server to one for each of 1 parameters, got 2", {"servers": 2}),
        (ValueError, "a rank from 0 on, got -1", {"rank": -1}),
        (ValueError, "a timeout above 0 s, got 0", {"timeout": 0}),
        (ValueError, "give store=", {"store": None}),
    ],
    ids=["no server", "servers", "rank", "timeout", "store"],
)
def test_a_worker_refuses(kind: type[Exception], words: str, options: dict[str, Any]) -> None:
    with pytest.raises(kind) as caught:
        Worker(one(), **{"store": "127.0.0.1:1"} | options)
    assert words in str(caught.value)


def test_there_is_no_store(slack: float) -> None:
    address = free_address()
    took, kind, text = seconds(
        lambda: Worker(one(), store=address, timeout=0.3), ServerUnreachable
    )  # fmt: skip
    assert kind == "ServerUnreachable"
    assert f"no process holds the store at {address}: no answer within 0.3 s" in text
    assert "Server 0 or torchrun holds it" in text
    assert 0.3 <= took < 1.0 + slack


def test_there_is_no_server(slack: float) -> None:
    with held_store() as address:
        took, kind, text = seconds(
            lambda: Worker(one(), store=address, name="mine", timeout=0.3), ServerUnreachable
        )
        server = ParameterServer(one(), SGD, workers=1, store=address)
        not_serving = seconds(
            lambda: Worker(one(), store=address, timeout=0.3), ServerUnreachable
        )[2]  # fmt: skip
        server.close()
        ended = seconds(lambda: Worker(one(), store=address, timeout=0.3), ServerUnreachable)[2]
    assert kind == "ServerUnreachable"
    assert text == (
        "server 0 of 'mine' is not reachable: none has registered in the store within 0.3 s. Is it "
        "running with the same store, name and number of servers?"
    )
    assert 0.3 <= took < 1.0 + slack
    assert "has registered, but has not answered within 0.3 s: has it ended?" in not_serving
    assert "none has registered in the store" in ended


def test_the_next_server_of_a_name_takes_its_place() -> None:
    """Two at a time would each train with a part of the workers."""
    with held_store() as address:
        first = ParameterServer(one(), SGD, workers=1, store=address)
        found: list[Any] = []
        thread = threading.Thread(
            target=lambda: found.append(seconds(first.serve, ServerError)), daemon=True
        )
        thread.start()
        ParameterServer(one(), SGD, workers=1, store=address)
        thread.join(30)
    [(_, kind, text)] = found
    assert kind == "ServerError"
    assert text == (
        "another server 0 of 'server' has registered, so this one ends; give servers of another "
        "model another name="
    )


def test_two_servers_of_one_process_share_an_address() -> None:
    address = free_address()
    first = ParameterServer(one(), SGD, workers=1, store=address)
    second = ParameterServer(one(), SGD, workers=1, store=address, name="other")
    del first
    assert "server 0 of 'server'" in seconds(
        lambda: Worker(one(), store=address, timeout=0.1), ServerUnreachable
    )[2]  # fmt: skip
    del second


def refused(case: str) -> Any:
    """Rank 1 is refused, and rank 2 goes on."""
    rank, store = dist.get_rank(), common_store()
    tensors: list[Tensor] = list(parameters((4, 2), (5,), (6,)))
    workers = dist.new_group([1, 2])
    staleness = 1 if case == "gradients" else 0
    if rank == 0:
        with noted() as log:
            report = serve_rank(tensors, workers=1, store=store, staleness=staleness, lr=1.0)
        return report, log.texts()
    good = worker(tensors, store=store, rank=2) if rank == 2 else None
    dist.barrier(workers)
    found = None
    if rank == 1:
        options: dict[str, Any] = {"rank": 1}
        given: Any = tensors
        if case == "shape":
            given = parameters((4, 2), (6,), (6,))
        elif case == "dtype":
            given = [*tensors[:2], nn.Parameter(torch.zeros(6, dtype=torch.float64))]
        elif case == "fewer":
            given = tensors[:2]
        elif case == "names":
            given = [("a", tensors[0]), ("b", tensors[1]), ("c", tensors[2])]
        elif case == "rank":
            options["rank"] = 2
        elif case == "gradients":
            options["gradients"] = True
        elif case == "servers":
            options["servers"] = 2
        found = seconds(lambda: worker(given, store=store, **options), ServerError)
    dist.barrier(workers)
    if good is not None:
        give_gradients(tensors, 2, 0)
        good.step()
        good.close()
        return good.version
    return found


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("shape", "parameter 1 is float32 [5] on the server, and float32 [6] on the worker"),
        ("dtype", "parameter 2 is float32 [6] on the server, and float64 [6] on the worker"),
        ("fewer", "the server has 3 parameters, and the worker 2"),
        ("rank", "rank 2 is taken by a worker that is here; give each worker another rank="),
        ("gradients", "gradients=True: only a server with staleness=0 has averaged gradients"),
        ("servers", "it counts on 2 servers, and there are 1"),
    ],
)
def test_a_server_refuses_a_worker_and_goes_on(pool: Pool, case: str, words: str) -> None:
    (report, texts), found, version = pool.run(refused, case, world=3)
    assert found[1:] == ("ServerError", f"server 0 of 'server' has refused this worker: {words}")
    assert version == 1
    assert report.workers[2].state == "left"
    assert list(report.workers) == [2]
    assert not [text for text in texts if "lost" in text]


def refused_by_two() -> Any:
    """The number is that of the whole model, whichever server has the parameter."""
    rank, store = dist.get_rank(), common_store()
    tensors = parameters((4, 2), (5,), (6,), (900,))
    if rank < 2:
        return serve_rank(tensors, index=rank, servers=2, workers=1, store=store, lr=1.0)
    other = parameters((4, 2), (5,), (7,), (900,))
    found = seconds(lambda: worker(other, 2, store=store), ServerError)
    with worker(tensors, 2, store=store) as optimizer:
        give_gradients(tensors, 2, 0)
        optimizer.step()
    return found[1:]


def test_two_servers_name_the_same_parameter(pool: Pool) -> None:
    *reports, found = pool.run(refused_by_two, world=3)
    assert found == (
        "ServerError",
        "server 0 of 'server' has refused this worker: parameter 2 is float32 [6] on the server, "
        "and float32 [7] on the worker",
    )
    assert [report.updates for report in reports] == [1, 1]


def sparse() -> Any:
    """Nothing of the step is pushed, and the next one works."""
    rank, store = dist.get_rank(), common_store()
    module = nn.EmbeddingBag(8, 2, sparse=True)
    tensors = [*parameters((3,)), *module.parameters()]
    if rank == 0:
        return serve_rank(tensors, workers=2, store=store, lr=1.0)
    with worker(tensors, store=store, rank=rank) as optimizer:
        module(torch.tensor([[1, 2]])).sum().backward()
        tensors[0].grad = torch.ones(3)
        found = seconds(optimizer.step, TypeError)
        pushed = optimizer.report().pushed_bytes
        optimizer.zero_grad()
        give_gradients(tensors, rank, 0)
        optimizer.step()
        return found[1:], pushed, optimizer.version


def test_sparse_gradients_are_refused_before_anything_is_pushed(pool: Pool) -> None:
    report, *workers = pool.run(sparse, world=3)
    for (kind, text), pushed, version in workers:
        assert kind == "TypeError"
        assert "parameter 1 has a gradient of layout torch.sparse_coo" in text
        assert "for an Embedding: sparse=False" in text
        assert (pushed, version) == (0, 1)
    assert report.updates == 1


def as_an_optimizer() -> Any:
    """What other parts of torch make of a worker."""
    rank, store = dist.get_rank(), common_store()
    layer = nn.Linear(3, 2)
    groups: Any = [
        {"params": [("weight", layer.weight)], "lr": 0.5},
        {"params": [("bias", layer.bias)]},
    ]
    if rank == 0:
        return serve_rank(groups, workers=1, store=store, lr=0.25)
    with worker(groups, store=store) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        before = values(layer.parameters())
        calls = 0
        optimizer.register_step_post_hook(lambda *_: None)

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = layer(torch.ones(1, 3)).sum()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        moved = [
            float((old - new).detach().mean())
            for old, new in zip(before, layer.parameters(), strict=True)
        ]
        assert loss.requires_grad
        assert calls == 1
        schedule = seconds(
            lambda: torch.optim.lr_scheduler.StepLR(optimizer, 3), KeyError
        )  # fmt: skip
        more = seconds(
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
            RuntimeError,
        )
        optimizer.load_state_dict(optimizer.state_dict())
        assert not optimizer.state
        return moved, schedule[1:], more[1:], [sorted(one) for one in optimizer.param_groups]


def test_a_worker_is_an_optimizer_without_a_learning_rate(pool: Pool) -> None:
    _, (moved, schedule, more, groups) = pool.run(as_an_optimizer)
    assert moved == [0.5, 0.25]
    assert schedule[0] == "KeyError"
    assert "a Worker has no 'lr': the optimizer is the server's" in schedule[1]
    assert "ParameterServer.optimizer, in serve(on_update=)" in schedule[1]
    assert more[0] == "RuntimeError"
    assert "the servers' parameters are those they were made with" in more[1]
    assert groups == [["param_names", "params"]] * 2
