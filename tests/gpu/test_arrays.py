"""A communicator's calls on an accelerator's arrays go to the group's device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dreamcomm.arrays.calls import Carrier
from dreamcomm.arrays.objects import Objects
from helpers.devices import on_device, on_host, run_on_devices

pytest.importorskip("dreamcomm_test_device", reason="built by `make build`")

WORLD = 3


def numbers(rank: int, count: int = 6) -> torch.Tensor:
    return torch.arange(float(count)) * (rank + 1)


def host(value: Any) -> list[float]:
    found: list[float] = on_host(value).tolist()
    return found


def test_each_collective() -> None:
    def body(backend: Any, rank: int) -> None:
        comm = Objects(Carrier(backend, None))
        mine, everyone = on_device(numbers(rank)), [numbers(r) for r in range(WORLD)]
        total = sum(everyone)
        assert isinstance(total, torch.Tensor)
        made = comm.all_reduce(mine)
        assert made.device == mine.device
        assert host(made) == total.tolist()
        assert host(mine) == numbers(rank).tolist()
        assert host(comm.all_gather(mine)) == torch.cat(everyone).tolist()
        assert host(comm.broadcast(mine, 1)) == everyone[1].tolist()
        part = slice(2 * rank, 2 * rank + 2)
        assert host(comm.reduce_scatter(mine)) == total[part].tolist()
        assert host(comm.scatter(mine, 1)) == everyone[1][part].tolist()
        swapped = torch.cat([one[part] for one in everyone])
        assert host(comm.all_to_all(mine)) == swapped.tolist()
        rows = torch.cat([one[: r + 1] for r, one in enumerate(everyone)])
        assert host(comm.all_gather_v(on_device(numbers(rank, rank + 1)))) == rows.tolist()
        reduced, gathered = comm.reduce(mine, 2), comm.gather(mine, 2)
        assert (reduced is None) == (gathered is None) == (rank != 2)
        if rank == 2:
            assert host(reduced) == total.tolist()
            assert host(gathered) == torch.cat(everyone).tolist()
        assert comm.all_reduce(mine, out=mine) is mine
        assert host(mine) == total.tolist()

    run_on_devices(WORLD, body)


def test_a_strided_out_messages_trees_and_handles() -> None:
    def body(backend: Any, rank: int) -> None:
        comm = Objects(Carrier(backend, None))
        whole = on_device(torch.zeros(12))
        comm.all_reduce(on_device(numbers(rank)), out=whole.as_strided((6,), (2,)))
        assert host(whole)[::2] == (numbers(0) + numbers(1)).tolist()
        assert host(whole)[1::2] == [0.0] * 6
        handle = comm.all_reduce(on_device(numbers(rank)), async_op=True)
        assert host(handle.wait()) == (numbers(0) + numbers(1)).tolist()
        if rank == 0:
            comm.send(on_device(numbers(4)), 1)
        else:
            assert host(comm.recv(on_device(torch.zeros(6)), 0)) == numbers(4).tolist()
        tree: Any = {"a": on_device(numbers(rank)), "b": [on_device(numbers(rank + 1, 2)), None]}
        found = comm.average(tree)
        assert host(found["a"]) == ((numbers(0) + numbers(1)) / 2).tolist()
        assert host(found["b"][0]) == ((numbers(1, 2) + numbers(2, 2)) / 2).tolist()
        with pytest.raises(ValueError, match="are on several devices: "):
            comm.average({"a": on_device(numbers(rank)), "b": np.ones(2)})
        assert comm.all_reduce(np.ones(2)).tolist() == [2.0, 2.0]

    run_on_devices(2, body)
