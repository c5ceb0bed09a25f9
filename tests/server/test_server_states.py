"""States and checkpoints of servers: what is loaded, refused and written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.server import ParameterServer, ServerError
from helpers.pool import Pool
from server.serving import (
    Momentum,
    common_store,
    give_gradients,
    held_store,
    parameters,
    seconds,
    values,
    worker,
)

SGD = torch.optim.SGD


def stepped(tensors: Any, kind: Any = Momentum, **options: Any) -> ParameterServer:
    """A server that has made three updates."""
    server = ParameterServer(tensors, kind, workers=1, **options)
    for _ in range(3):
        sizes = server._weights.layout.sizes.items()
        flats = {dtype: torch.ones(size, dtype=dtype) for dtype, size in sizes}
        server._weights.step(flats, (), keep=False)
    return server


def test_a_state_is_loaded_as_it_was(tmp_path: Path) -> None:
    with held_store() as address:
        first = stepped(parameters((3,), (2, 2)), store=address, name="one")
        torch.save(first.state_dict(), tmp_path / "state")
        second = ParameterServer(
            parameters((3,), (2, 2)), Momentum, workers=1, store=address, name="two"
        )
        second.load_state_dict(torch.load(tmp_path / "state"))
        assert second.version == 3
        assert (second.report().updates, second.report().version) == (0, 3)
        kept = second.state_dict()
        before = [value.clone() for value in kept["parameters"]]
        buffers = [value["buffer"].clone() for value in kept["optimizer"]["state"].values()]
        for server in (first, second):
            server._weights.step({torch.float32: torch.ones(7)}, (), keep=False)
        for ours, theirs in zip(first._weights.parameters, second._weights.parameters, strict=True):
            assert torch.equal(ours, theirs)
        # A state is a copy.
        assert all(map(torch.equal, kept["parameters"], before))
        state = kept["optimizer"]["state"].values()
        assert all(map(torch.equal, [value["buffer"] for value in state], buffers))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("shape", "expected parameter 1 to be float32 [2, 3], got float32 [2, 2]"),
        ("dtype", "expected parameter 0 to be float64 [3], got float32 [3]"),
        ("more", "expected parameter 2 to be float32 [1], got none"),
        ("fewer", "expected parameter 1 to be none, got float32 [2, 2]"),
        ("optimizer", "expected the state of SGD, got that of Momentum"),
        ("servers", "expected the state of server 1 of 2, got that of server 0 of 1"),
        ("groups", "loaded state dict has a different number of parameter groups"),
        ("module", "expected what state_dict() of a server gives"),
    ],
)
def test_a_state_of_another_server_is_refused(case: str, words: str) -> None:
    params: Any = parameters((3,), (2, 2))
    options: dict[str, Any] = {}
    kind: Any = Momentum
    if case == "shape":
        params = parameters((3,), (2, 3))
    elif case == "dtype":
        params = [nn.Parameter(torch.zeros(3, dtype=torch.float64)), *parameters((2, 2))]
    elif case == "more":
        params = parameters((3,), (2, 2), (1,))
    elif case == "fewer":
        params = parameters((3,))
    elif case == "optimizer":
        kind = SGD
    elif case == "servers":
        options = {"servers": 2, "index": 1}
    elif case == "groups":
        params = [{"params": [one]} for one in params]
    with held_store() as address:
        saved = stepped(parameters((3,), (2, 2)), store=address, name="one").state_dict()
        if case == "module":
            saved = nn.Linear(2, 2).state_dict()
        server = ParameterServer(params, kind, workers=1, store=address, name="two", **options)
        before = values(server._weights.parameters)
        with pytest.raises(ValueError, match=r"\w") as caught:
            server.load_state_dict(saved)
        assert words in str(caught.value)
        assert server.version == 0
        assert all(map(torch.equal, before, server._weights.parameters))


def loads_late() -> Any:
    rank, store = dist.get_rank(), common_store()
    tensors = parameters((3,))
    if rank == 0:
        server = ParameterServer(tensors, Momentum, workers=1, store=store)
        found: list[Any] = []

        def on_update(one: ParameterServer) -> None:
            found.append(seconds(lambda: one.load_state_dict(one.state_dict()), ValueError)[2])

        server.serve(on_update=on_update)
        return found
    with worker(tensors, store=store) as optimizer:
        give_gradients(tensors, 1, 0)
        optimizer.step()
    return None


def test_a_state_is_not_loaded_while_workers_are_here(pool: Pool) -> None:
    found, _ = pool.run(loads_late)
    assert found == ["ParameterServer.load_state_dict: workers are here already"]


def test_checkpoints_need_a_folder_and_a_period(tmp_path: Path) -> None:
    with held_store() as address:
        server = ParameterServer(parameters((3,)), SGD, workers=1, store=address)
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            server.serve(checkpoint=tmp_path / "none" / "file")
        with pytest.raises(ValueError, match="every of at least 1, got every=0"):
            server.serve(checkpoint=tmp_path / "file", every=0)


def checkpoints(path: str, every: int, steps: int) -> Any:
    rank, store = dist.get_rank(), common_store()
    tensors = parameters((3,))
    if rank == 0:
        written: list[int] = []
        server = ParameterServer(tensors, Momentum, workers=1, store=store)

        def on_update(_: ParameterServer) -> None:
            written.append(torch.load(path)["version"] if Path(path).exists() else 0)

        server.serve(checkpoint=path, every=every, on_update=on_update)
        return written, torch.load(path)["version"]
    with worker(tensors, store=store) as optimizer:
        for step in range(steps):
            give_gradients(tensors, 1, step)
            optimizer.step()
    return None


@pytest.mark.parametrize(
    ("every", "expected"), [(1, [0, 1, 2, 3, 4]), (2, [0, 0, 2, 2, 4]), (10, [0] * 5)]
)
def test_checkpoints_are_written_in_time_and_at_the_end(
    pool: Pool, tmp_path: Path, every: int, expected: list[int]
) -> None:
    (written, last), _ = pool.run(checkpoints, str(tmp_path / "file"), every, 5)
    assert (written, last) == (expected, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def unwritable(folder: str) -> Any:
    """A write fails: the server raises it, and its worker has the text."""
    rank, store = dist.get_rank(), common_store()
    tensors = parameters((3,))
    if rank == 0:
        server = ParameterServer(tensors, Momentum, workers=1, store=store)
        Path(folder, "file.part").mkdir()
        return seconds(lambda: server.serve(checkpoint=Path(folder, "file")), OSError)[1]
    optimizer = worker(tensors, store=store)
    give_gradients(tensors, 1, 0)
    began = time.monotonic()
    found = seconds(optimizer.step, ServerError)
    return found[1:], time.monotonic() - began


def test_a_checkpoint_that_cannot_be_written(pool: Pool, tmp_path: Path, slack: float) -> None:
    kind, ((of_worker, text), took) = pool.run(unwritable, str(tmp_path))
    assert (kind, of_worker) == ("IsADirectoryError", "ServerError")
    assert "server 0 of 'server' has failed: [Errno 21] Is a directory" in text
    assert took < 1.0 + slack
