"""One copy of the parameters a host, in files that all ranks map: memory has what is used now.

    disk      | 0 | 1 | 2 | 3 | ... |     all parameters
    memory        | 1 | 2 |               the unit that computes, and the next one in order

A rank drops a unit's pages after its pass. The system frees a page when the last rank has dropped
it. A page comes back from the file when it is read, so that the values are right in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.zero.units.forms.freeing import Freeing
from dreamcomm.zero.units.forms.shared import Shared
from dreamcomm.zero.units.forms.use import UnitUse
from dreamcomm.zero.units.parameters.own_files import OwnFiles
from dreamcomm.zero.units.parameters.placed import Placed, Source
from dreamcomm.zero.units.parameters.record import UnitParameter
from dreamcomm.zero.units.parameters.region import place

if TYPE_CHECKING:
    from dreamcomm._C import RegionFolder
    from dreamcomm.zero.units.unit import Unit

__all__ = ["Files"]


class UnitPages(UnitUse):
    """The pages of one unit's whole parameters."""

    def __init__(self, number: int, records: Sequence[UnitParameter]) -> None:
        super().__init__(number)
        self._wholes: list[Tensor] = [one.whole for one in records if one.region is not None]
        self._is_read = False

    def start(self) -> None:
        """Begins to read them, unless it has."""
        from dreamcomm import _C

        if not self._is_read:
            self._is_read = True
            _C.read_files(self._wholes)

    def free(self) -> None:
        from dreamcomm import _C

        self.is_kept = False
        if self._is_read:
            self._is_read = False
            _C.drop_files(self._wholes)


class Files(Freeing[UnitPages], Shared):
    """The ranks are processes of one host, which has a disk.

    Args:
        group: its ranks have the rows.
        path: of a folder on the disk.
    """

    def __init__(self, group: dist.ProcessGroup, path: str) -> None:
        from dreamcomm import _C

        super().__init__(group)
        self.folder: RegionFolder = _C.RegionFolder(path)
        self._folders: list[RegionFolder] = [self.folder]  # units below had others of that path
        self._own = OwnFiles(self.folder)

    def place(self, sources: Sequence[Source]) -> list[Placed]:
        return place(sources, self.group, files=self._own)

    def described(self) -> str:
        return (
            f"one copy of the parameters in files in {self.folder.path!r}; "
            f"{sum(one.bytes for one in self._folders):,d} bytes in files, "
            f"{sum(one.dropped for one in self._folders):,d} bytes dropped so far"
        )

    def lay_out(self, units: Sequence[Unit], records: Sequence[UnitParameter]) -> None:
        super().lay_out(units, records)
        regions = [one.region for one in records if one.region is not None]
        folders = [self.folder, *(one.folder for one in regions if one.folder is not None)]
        self._folders = list({id(one): one for one in folders}.values())

    def _make_use(self, number: int, records: Sequence[UnitParameter]) -> UnitPages:
        return UnitPages(number, records)

    def _start(self, use: UnitPages) -> None:
        use.start()

    @torch.no_grad()
    def publish(self) -> None:
        for sent, local in zip(self._sent, self._local, strict=True):
            sent.copy_(local)
            self.wrote([sent, local])
        self.casts += bool(self._local)

    def wrote(self, tensors: Sequence[Tensor]) -> None:
        self._own.wrote(tensors)
