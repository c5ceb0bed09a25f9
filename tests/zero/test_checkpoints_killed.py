"""dreamcomm.zero.save leaves a whole checkpoint wherever the ranks are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dreamcomm.zero import checkpoint
from dreamcomm.zero.checkpoint import load, save
from helpers.pool import Fresh, Pool
from helpers.processes import RanksFailed
from zero.saving_ranks import check_whole, content, kill_often, without_exchange


class Unwritable:
    """A value that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise OSError("no space left on device")


def check_kills(fresh: Fresh, folder: Path, exchanges: bool, times: int) -> None:
    folder.parent.mkdir()
    args = str(folder), exchanges, times
    fresh.run(kill_often, *args, world=1, group=False, timeout=30 + 5 * times)
    assert {one.name for one in folder.parent.iterdir() if one.is_dir()} == {folder.name}


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
def test_killed_saves(fresh: Fresh, tmp_path: Path, exchanges: bool) -> None:
    check_kills(fresh, tmp_path / "saves" / "point", exchanges, 6)


@pytest.mark.long
@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
def test_many_killed_saves(fresh: Fresh, tmp_path: Path, exchanges: bool) -> None:
    check_kills(fresh, tmp_path / "saves" / "point", exchanges, 50)


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
def test_a_save_stopped_before_each_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """In one process: a stop before each rename, flush and removal, one after the other."""
    folder = tmp_path / "point"
    steps: list[str] = []
    stop_at = -1

    def stopping(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(steps) == stop_at:
                raise KeyboardInterrupt
            steps.append(name)
            return function(*args, **kwargs)

        return call

    if not exchanges:
        monkeypatch.setattr(checkpoint, "_exchange", without_exchange)
    monkeypatch.setattr(checkpoint, "_exchange", stopping("exchange", checkpoint._exchange))
    monkeypatch.setattr(checkpoint, "_sync", stopping("sync", checkpoint._sync))
    monkeypatch.setattr(checkpoint.os, "rename", stopping("rename", checkpoint.os.rename))
    monkeypatch.setattr(checkpoint.shutil, "rmtree", stopping("rmtree", checkpoint.shutil.rmtree))
    number = 0
    save({"number": 0, "plain": torch.full((100,), 0.0)}, folder)
    while True:
        steps.clear()
        stop_at += 1
        new = {"number": number + 1, "plain": torch.full((100,), number + 1.0)}
        try:
            save(new, folder)
        except KeyboardInterrupt:
            state = {"number": -1, "plain": torch.zeros(100)}
            load(state, folder)
            found = check_whole(state)
            assert found in (number, number + 1)
            number = found
        else:
            break
    assert stop_at > (8 if exchanges else 9)
    assert [one.name for one in tmp_path.iterdir()] == ["point"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    save({"number": 1}, folder)  # an empty folder is
    for file in folder.iterdir():
        file.unlink()
    (folder / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place in (folder, tmp_path / "file"):
        with pytest.raises(FileExistsError, match=place.name):
            save({"number": 1}, place)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load({"number": 1}, tmp_path / "nothing")
    assert (folder / "thesis.txt").read_text() == "mine"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "notes"]


def test_a_link_to_a_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "point").symlink_to(tmp_path / "disk" / "point")
    for number in (1, 2):
        save({"number": number}, tmp_path / "point")
        state = {"number": 0}
        load(state, tmp_path / "point")
        assert state == {"number": number}
    assert (tmp_path / "point").is_symlink()


def fail_on(rank: int, folder: str) -> tuple[str, int]:
    save(content(1), folder)
    state = {**content(2), f"of rank {dist.get_rank()}": 3}
    if dist.get_rank() == rank:
        state["broken"] = Unwritable()
    with pytest.raises(CheckpointException) as failed:
        save(state, folder)
    loaded = content(0)
    load(loaded, folder)
    assert loaded["part 0"].to_local().unique().tolist() == [1.0]
    return str(failed.value), int(loaded["number"])


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_raised_on_all(pool: Pool, tmp_path: Path, rank: int) -> None:
    folder = tmp_path / "point"
    for text, number in pool.run(fail_on, rank, str(folder)):
        assert "no space left" in text
        assert number == 1
    assert [one.name for one in tmp_path.iterdir()] == ["point"]


def save_over_a_file(folder: str) -> None:
    save(content(1), folder)


def test_an_error_of_rank_0_reaches_all(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RanksFailed) as failed:
        pool.run(save_over_a_file, str(tmp_path / "file"))
    assert "FileExistsError" in failed.value.by_rank[0]
    assert "dreamcomm.zero.save: rank 0 has failed: FileExistsError" in failed.value.by_rank[1]
