"""Parameters and the optimizer's state in files have the bits of those in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dreamcomm import _C, zero
from dreamcomm.zero import ZeroOptimizer, fully_shard
from helpers.disks import skip_in_memory
from helpers.pool import Fresh, Pool
from helpers.processes import replies
from zero.units.sharding import made, shard, weights
from zero.units.test_parity import OPTIMIZERS, accumulate
from zero.units.test_protect import PROTECT, ends_a_child

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

Found = tuple[list[float], list[Tensor]]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """An empty folder on a disk, which is empty again in the end."""
    skip_in_memory(tmp_path)
    path = tmp_path / "files"
    path.mkdir()
    yield str(path)
    assert list(path.iterdir()) == []


def stepper_of(module: Any, optimizer: str, by_torch: bool) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[optimizer]
    if by_torch:
        return kind(module.parameters(), foreach=False, **options)  # type: ignore[call-arg]
    return ZeroOptimizer(module.parameters(), kind, **options)


def train(module: Any, stepper: Any, steps: range, clip: float | None, micro: int) -> list[float]:
    norms = []
    for step in steps:
        stepper.zero_grad()
        accumulate(module, step, micro, module)
        if clip is not None:
            norms.append(float(module.clip_grad_norm_(clip)))
        stepper.step()
    return norms


def by_memory_and_files(
    name: str,
    optimizer: str,
    folder: str,
    clip: float | None = None,
    micro: int = 1,
    by_torch: bool = False,
    how: dict[str, Any] | None = None,
) -> tuple[Found, Found]:
    found = []
    for options in ({}, {"offload_folder": folder}):
        module = shard(made(name), **options, **(how or {}))
        stepper = stepper_of(module, optimizer, by_torch)
        norms = train(module, stepper, range(4), clip, micro)
        assert os.listdir(folder) == []
        found.append((norms, weights(module)))
    return found[0], found[1]


def check_equal(found: list[tuple[Found, Found]]) -> None:
    for (norms, theirs), (our_norms, ours) in found:
        assert norms == our_norms
        for one, other in zip(theirs, ours, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mlp", "gpt", "tied", "strange"])
def test_the_bits_are_those_of_memory(
    pool: Pool, folder: str, name: str, optimizer: str, world: int
) -> None:
    check_equal(pool.run(by_memory_and_files, name, optimizer, folder, world=world))


@pytest.mark.parametrize("name", ["mlp", "strange"])
def test_torchs_optimizer_has_the_bits_too(pool: Pool, folder: str, name: str) -> None:
    check_equal(pool.run(by_memory_and_files, name, "sgd", folder, 0.05, 1, True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipping_and_accumulation_have_the_bits(pool: Pool, folder: str, optimizer: str) -> None:
    check_equal(pool.run(by_memory_and_files, "tied", optimizer, folder, 0.05, 3, world=3))


def test_rows_of_another_type_lie_in_files_too(pool: Pool, folder: str) -> None:
    how = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    check_equal(pool.run(by_memory_and_files, "gpt", "adamw", folder, 0.05, 1, False, how))
    assert all(pool.run(cast_rows_are_in_files, folder))


def cast_rows_are_in_files(folder: str) -> bool:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    module = shard(made("gpt"), offload_folder=folder, mp_policy=policy)
    return all(
        _C.folder_of(one) == folder
        for record in module._unit.tree.records()
        for one in (record.local, record.sent, record.whole)
    )


def wide(folder: str | None) -> Any:
    """Four layers of a MiB, each a unit."""
    torch.manual_seed(3)
    layers = [nn.Linear(512, 512) for _ in range(4)]
    module = nn.Sequential(*(fully_shard(one, offload_folder=folder) for one in layers))
    return fully_shard(module, offload_folder=folder)


def in_memory(tensor: Tensor) -> int:
    """Bytes of a tensor's pages that are in memory, of any process."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - begin
    pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(length), pages) == 0
    return sum(one & 1 for one in pages) * mmap.PAGESIZE


def drops(folder: str) -> tuple[list[int], list[int], str]:
    """What is in memory of each layer, in the forward pass of the third one, and after a step."""
    module = wide(folder)
    stepper = stepper_of(module, "sgd", by_torch=False)
    x = torch.ones(4, 512)
    wholes = [one.whole for one in module._unit.tree.records() if one.whole.dim() == 2]
    for step in range(3):
        seen: list[int] = []

        def look(*_: object) -> None:
            dist.barrier()  # all ranks have left the first two
            seen.extend(in_memory(one) for one in wholes)  # noqa: B023
            dist.barrier()

        handle = module[2].register_forward_pre_hook(look)
        loss = module(x).square().mean()
        handle.remove()
        loss.backward()
        if step < 2:
            stepper.step()
            stepper.zero_grad()
    dist.barrier()
    return seen, [in_memory(one) for one in wholes], module.report()


def test_memory_has_what_is_used_now(pool: Pool, folder: str) -> None:
    mib = 1 << 20
    for seen, left, report in pool.run(drops, folder):
        assert seen[:2] == [0, 0]
        assert seen[2] == mib
        assert left == [0, 0, 0, 0]
        words = report.splitlines()[0]
        assert f"in files in {folder!r}; " in words
        counts = [int(one.replace(",", "")) for one in words.split() if one[0].isdigit()]
        world, in_files, dropped = counts[0], counts[-2], counts[-1]
        assert world == 2
        assert in_files >= 4 * mib + 2 * mib  # the parameters, and this rank's momentum
        assert dropped >= 3 * 2 * 4 * mib  # by three forward and backward passes


def states_lie_in_files(folder: str, optimizer: str) -> list[bool]:
    """After two steps; after a load; after a step that follows it."""
    module = shard(made("gpt"), offload_folder=folder)
    kinds: dict[str, Any] = {"adagrad": (torch.optim.Adagrad, {"lr": 0.01}), **OPTIMIZERS}
    kind, options = kinds[optimizer]
    stepper = ZeroOptimizer(module.parameters(), kind, **options)

    def all_lie() -> bool:
        parts = [
            part
            for kept in stepper.state.values()
            for part in kept.values()
            if isinstance(part, Tensor) and part.dim() > 0
        ]
        return bool(parts) and all(_C.folder_of(part) == folder for part in parts if part.numel())

    train(module, stepper, range(2), None, 1)
    found = [all_lie()]
    saved = stepper.state_dict()
    stepper.load_state_dict(saved)
    found.append(all_lie())
    train(module, stepper, range(1), None, 1)
    found.append(all_lie())
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adagrad"])
def test_the_state_lies_in_files(pool: Pool, folder: str, optimizer: str) -> None:
    assert pool.run(states_lie_in_files, folder, optimizer) == [[True] * 3] * 2


def refused(folder: str, **options: Any) -> str:
    try:
        fully_shard(nn.Linear(8, 8), offload_folder=folder, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_memory_is_refused(pool: Pool) -> None:
    for text in pool.run(refused, "/dev/shm", world=3):
        assert text.startswith("NoRegion: rank 0 ")
        assert "the folder '/dev/shm' is memory (tmpfs)" in text


def test_what_is_no_folder_is_refused(pool: Pool, folder: str, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    reasons = {"missing": "No such file or directory", "a file": "Not a directory"}
    for name, reason in reasons.items():
        for text in pool.run(refused, str(tmp_path / name)):
            assert text.startswith("NoRegion: rank 0 ")
            assert f"in the folder '{tmp_path / name}': {reason}" in text


def refused_elsewhere(folder: str) -> list[str]:
    found = [refused(folder, gather=True)]
    gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    found.append(refused(folder, mesh=gloo))
    module = nn.Sequential(fully_shard(nn.Linear(4, 4), offload_folder=folder))
    with pytest.raises(ValueError, match="expected one offload_folder for all units"):
        fully_shard(module)
    return found


def test_where_parameters_do_not_lie_once_it_is_refused(pool: Pool, folder: str) -> None:
    for gathers, gloo in pool.run(refused_elsewhere, folder):
        assert gathers.startswith("NotImplementedError: fully_shard: expected no offload_folder")
        assert "gather=True was given" in gathers
        assert gloo.startswith("NotImplementedError: fully_shard: expected no offload_folder")
        assert "the group does not use the backend dreamcomm" in gloo


def test_a_full_disk_is_an_error_at_once(folder: str) -> None:
    with pytest.raises(RuntimeError, match=f"cannot reserve {1 << 43} bytes in the folder '.*"):
        _C.make_own_region(1 << 43, _C.RegionFolder(folder))


def limited(folder: str) -> str:
    """An optimizer, where rank 1 cannot make the file of its state."""
    module = wide(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        stepper_of(module, "adamw", by_torch=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "no error"


def test_a_state_without_room_is_an_error_on_all_ranks(pool: Pool, folder: str) -> None:
    theirs, own = pool.run(limited, folder)
    assert own.startswith("DistBackendError: cannot reserve 4227072 bytes in the folder")
    assert "ulimit -f" in own
    assert theirs.startswith("WindowError: ZeroOptimizer: rank 1 cannot make the file")
    assert "cannot reserve 4227072 bytes in the folder" in theirs


def protected(folder: str) -> int:
    """The signal of a stray write; another one, of the writer, is allowed."""
    module = shard(made("mlp"), offload_folder=folder)
    train(module, stepper_of(module, "sgd", by_torch=False), range(2), None, 1)
    whole = module._unit.tree.records()[0].whole
    stray = ends_a_child(lambda: whole.data.add_(1.0))
    with module.rewrite() as writes:
        if writes:
            with torch.no_grad():
                next(iter(module.parameters())).add_(1.0)
    return stray


def test_a_stray_write_faults(pool: Pool, folder: str) -> None:
    env = {PROTECT: "1"}
    check_equal(pool.run(by_memory_and_files, "mlp", "adamw", folder, env=env))
    assert pool.run(protected, folder, env=env) == [signal.SIGSEGV] * 2


def trained_with_saves(folder: str, saves: str, steps: range, ends: str) -> list[Tensor]:
    """Resumes if the steps do not begin at 0; saves after two; ends by a signal if told so."""
    module = shard(made("gpt"), offload_folder=folder)
    stepper = stepper_of(module, "adamw", by_torch=False)

    def state() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(module, stepper)
        return {"model": model_state, "optimizer": optimizer_state}

    if steps.start > 0:
        loaded = state()
        zero.load(loaded, saves)
        set_state_dict(
            module,
            stepper,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
    for step in steps:
        train(module, stepper, range(step, step + 1), None, 1)
        if step == 1:
            zero.save(state(), saves)
        if step == 3 and ends == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return weights(module)


def test_a_save_resumes_after_a_kill(pool: Pool, fresh: Fresh, folder: str, tmp_path: Path) -> None:
    saves = str(tmp_path / "saves")
    (expected, *_) = pool.run(trained_with_saves, folder, saves + "-other", range(6), "")
    ranks = fresh.start(trained_with_saves, folder, saves, range(6), "killed")
    assert all(one.error is not None for one in replies(ranks, 60))
    assert os.listdir(folder) == []
    for found in pool.run(trained_with_saves, folder, saves, range(2, 6), ""):
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
