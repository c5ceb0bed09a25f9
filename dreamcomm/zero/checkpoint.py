"""Checkpoints on disk that a killed save leaves whole."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dreamcomm._torch.groups import given_group
from dreamcomm.ranks.agree import exchange

__all__ = ["load", "save"]

T = TypeVar("T")
AT_FDCWD, RENAME_EXCHANGE = -100, 2
NOT_OFFERED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def save(
    state_dict: dict[str, Any],
    folder: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Saves with ``torch.distributed.checkpoint``, and replaces an older checkpoint at once.

    The files are written into ``FOLDER.dreamcomm-tmp`` beside ``folder``, flushed to the disk, and
    then exchanged with ``folder`` by one system call. All ranks return after that. Without a
    process group, one process saves alone. On several nodes ``folder`` lies in a file system that
    they share.

    If the ranks are killed, :func:`load` finds one whole checkpoint:

    - before the exchange: the old one, beside ``FOLDER.dreamcomm-tmp`` with a part of the new one;
    - after it: the new one, beside ``FOLDER.dreamcomm-tmp`` with what is left of the old one;
    - on a file system that cannot exchange folders, such as NFS, ``folder`` is renamed to
      ``FOLDER.dreamcomm-old`` first, and then the new one to ``folder``. A kill between the two
      leaves the old one under ``FOLDER.dreamcomm-old``, where :func:`load` reads it.

    The next save removes what a killed one left. A folder can be saved to by one job at a time, and
    not while another one loads it.

    Args:
        state_dict: as of ``torch.distributed.checkpoint.save``.
        folder: a checkpoint to replace, an empty folder, or a path where nothing is yet.
        process_group: its ranks save together; None is the default group.

    Raises:
        FileExistsError: ``folder`` holds something else than a checkpoint.
        RuntimeError: another rank has failed.
        torch.distributed.checkpoint.CheckpointException: writing has failed on some rank.
    """
    group = _group(process_group)
    places = _Places(folder)
    _on_first(group, "save", places.prepare)
    try:
        with _alone_without_warning():
            dcp_save(
                state_dict,
                storage_writer=FileSystemWriter(places.new, sync_files=True),
                process_group=group,
                no_dist=group is None,
            )
    except BaseException:
        if _is_first(group):
            shutil.rmtree(places.new, ignore_errors=True)
        raise
    _on_first(group, "save", places.put_in_place)


def load(
    state_dict: dict[str, Any],
    folder: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Loads a checkpoint into ``state_dict`` in place, as ``torch.distributed.checkpoint.load``.

    If a killed :func:`save` left no ``folder``, the checkpoint that it has set aside is read.
    Nothing on the disk changes.

    Args:
        state_dict: says what is read: it has the keys, shapes and layouts wanted.
        folder: as given to :func:`save`.
        process_group: its ranks load together; None is the default group.

    Raises:
        FileNotFoundError: there is no checkpoint.
        RuntimeError: another rank has failed.
        torch.distributed.checkpoint.CheckpointException: reading has failed on some rank.
    """
    group = _group(process_group)
    found = _on_first(group, "load", _Places(folder).found)
    with _alone_without_warning():
        dcp_load(
            state_dict,
            storage_reader=FileSystemReader(found),
            process_group=group,
            no_dist=group is None,
        )


class _Places:
    """The checkpoint's folder, and those beside it that a save uses."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.new = self.folder.with_name(self.folder.name + ".dreamcomm-tmp")
        self.old = self.folder.with_name(self.folder.name + ".dreamcomm-old")

    def found(self) -> str:
        """The folder that holds the checkpoint."""
        for place in (self.folder, self.old):
            if _is_checkpoint(place):
                return str(place)
        raise FileNotFoundError(errno.ENOENT, "no checkpoint", str(self.folder))

    def prepare(self) -> None:
        """Removes what a killed save left, and makes the new folder."""
        if self.folder.exists() and not _is_checkpoint(self.folder) and _has_entries(self.folder):
            raise FileExistsError(
                errno.EEXIST, "expected a checkpoint, or an empty folder", str(self.folder)
            )
        if _is_checkpoint(self.old) and not _is_checkpoint(self.folder):
            os.rename(self.old, self.folder)
        for rest in (self.old, self.new):
            if rest.exists():
                shutil.rmtree(rest)
        self.new.mkdir(parents=True)

    def put_in_place(self) -> None:
        """The new folder becomes the checkpoint, and the older one is removed."""
        for name in self.new.iterdir():
            _sync(name)
        _sync(self.new)
        if not self.folder.exists():
            os.rename(self.new, self.folder)
        elif not _exchange(self.new, self.folder):
            os.rename(self.folder, self.old)
            os.rename(self.new, self.folder)
        _sync(self.folder.parent)
        for rest in (self.old, self.new):
            shutil.rmtree(rest, ignore_errors=True)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / ".metadata").is_file()


def _has_entries(folder: Path) -> bool:
    return not folder.is_dir() or any(folder.iterdir())


def _sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders at once; False where the system or file system does not offer it."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if not function(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code in NOT_OFFERED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if group is None and not dist.is_initialized():
        return None
    return given_group(group)


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return group is None or dist.get_rank(group) == 0


def _on_first(group: dist.ProcessGroup | None, what: str, function: Callable[[], T]) -> T:
    """What rank 0's call returns, on all ranks; its error is raised on all of them. Collective."""
    if group is None:
        return function()
    make: Callable[[], Any] = function if _is_first(group) else lambda: None
    found: T = exchange(
        group,
        make,
        lambda one: RuntimeError(
            f"dreamcomm.zero.{what}: rank {one.rank} has failed: {one.kind}: {one.text}"
        ),
    )[0]
    return found
