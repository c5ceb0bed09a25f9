"""The code of docs/arrays.md runs on ranks, and the texts of its errors are what is raised."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dreamcomm
from dreamcomm.arrays.environment import read_job
from helpers.pool import Pool

PAGE = (Path(__file__).parents[2] / "docs" / "arrays.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
pytestmark = pytest.mark.beyond_gloo("a Communicator is of dreamcomm's backend")


def run(code: str, names: dict[str, Any]) -> str:
    """What a block prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "page", "exec"), names)
    return printed.getvalue()


def first_program() -> str:
    return run(BLOCKS[0], {"__name__": "__main__"})


def test_the_first_program(pool: Pool) -> None:
    printed = pool.run(first_program)
    assert printed == [f"rank {rank} of 2: [0. 3. 6.]\n" for rank in range(2)]
    assert len(BLOCKS[0].splitlines()) <= 13


def other_blocks() -> dict[str, Any]:
    comm = dreamcomm.Communicator()
    names: dict[str, Any] = {"np": np, "dreamcomm": dreamcomm, "comm": comm}
    for code in BLOCKS[1:]:
        run(code, names)
    assert (names["part"].size, names["same"].size) == (1, 2)
    kept = ("x", "out", "total", "mean", "gradients", "grid", "got", "config", "names")
    return {name: names.get(name) for name in kept}


def test_the_other_blocks(pool: Pool) -> None:
    assert len(BLOCKS) == 7
    for rank, found in enumerate(pool.run(other_blocks)):
        assert found["x"].tolist() == [2.0] * 4
        assert found["out"].tolist() == [2.0] * 4
        assert found["total"].tolist() == [4.0] * 4
        assert found["mean"].tolist() == [1.0] * 2
        assert found["gradients"]["weight"].tolist() == [[0.5] * 2] * 2
        assert found["gradients"]["layers"][1] is None
        assert np.all(found["grid"] == 1)
        assert (found["got"] is None) if rank == 0 else found["got"].tolist() == [0, 1, 2]
        assert found["config"] == {"lr": 0.1}
        assert found["names"] == ["rank 0", "rank 1"]


Comm = dreamcomm.Communicator
ONES = np.ones(2)
CALLS: dict[str, Callable[[Comm], Any]] = {
    "array: expected an array (NumPy, torch, a buffer, or what has __dlpack__), got float": (
        lambda comm: comm.all_reduce(2.0)
    ),
    "array: no collective has elements of type <U1": lambda comm: comm.all_gather(np.array(["a"])),
    "are in another byte order": lambda comm: comm.all_reduce(np.ones(2, ">f8")),
    "out: expected the shape (2,), got (3,)": lambda comm: comm.all_reduce(ONES, out=np.ones(3)),
    "out: expected elements of float64, got float32": lambda comm: comm.all_reduce(
        ONES, out=np.ones(2, np.float32)
    ),
    "out: it is read-only, so it cannot receive the result": lambda comm: comm.all_reduce(
        ONES, out=np.broadcast_to(np.ones(1), 2)
    ),
    "out: some of its elements share memory, as in a broadcast array": lambda comm: comm.all_reduce(
        ONES, out=np.lib.stride_tricks.as_strided(np.ones(1), (2,), (0,))
    ),
    "array: 3 rows cannot be divided equally among 2 ranks": lambda comm: comm.scatter(np.ones(3)),
    "BAND is not defined on tensors of type float64": lambda comm: comm.all_reduce(ONES, "band"),
    "rank 1 refused its call": lambda comm: comm.all_reduce("text" if comm.rank else ONES),
    "the ranks made different calls": lambda comm: comm.all_reduce(np.ones(2 + comm.rank)),
    "a pending all_reduce writes it: wait for its handle first": lambda comm: pending(comm),
    "the communicator is closed": lambda comm: closed(comm),
}


def pending(comm: Comm) -> None:
    array = np.ones(8)
    handle = comm.all_reduce(array, out=array, async_op=True)
    try:
        comm.all_reduce(array)
    finally:
        handle.wait()


def closed(comm: Comm) -> None:
    part = comm.split(0)
    assert part is not None
    part.close()
    part.barrier()


def texts() -> dict[str, str]:
    """The error of each call. The next call works each time."""
    comm = dreamcomm.Communicator()
    found = {}
    for words, call in CALLS.items():
        try:
            call(comm)
        except (TypeError, ValueError, RuntimeError) as error:
            found[words] = str(error)
        assert comm.all_reduce(ONES).tolist() == [2.0, 2.0]
    return found


def test_errors(pool: Pool) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ", PAGE.partition("| you see |")[2], re.M)
    table = rows[: rows.index("the communicator is closed") + 1]
    assert table == list(CALLS)
    first, second = pool.run(texts)
    for words in CALLS:
        if words != "rank 1 refused its call":  # rank 1 has the reason itself
            assert words in second[words]
        assert words in first[words]


def test_an_address_that_is_not_known() -> None:
    words = "the address of rank 0 is not known"
    assert f"`{words}`" in PAGE
    with pytest.raises(ValueError, match=rf"{words}\. Found: PMI_RANK=0, PMI_SIZE=2\. Missing: "):
        read_job({"PMI_RANK": "0", "PMI_SIZE": "2"})


def test_names_of_calls_exist() -> None:
    """Those that the page and the table for users of mpi4py have in the second column."""
    _, _, table = PAGE.partition("| mpi4py | dreamcomm |")
    cells = [row.split(" | ")[1] for row in table.splitlines() if row.startswith("| ")]
    names = set(re.findall(r"comm\.([a-z_]+)", " ".join(cells))) - {"rank", "size"}
    assert len(names) > 15
    assert [name for name in sorted(names) if not hasattr(Comm, name)] == []
