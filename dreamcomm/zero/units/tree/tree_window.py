"""The window of a tree: when ranks read its parameters, and what they tell each other then."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh

from dreamcomm.ranks.agree import gather_objects
from dreamcomm.zero.units.forms.form import Form
from dreamcomm.zero.units.parameters.record import UnitParameter
from dreamcomm.zero.units.parameters.region import is_protected
from dreamcomm.zero.units.tree.checks import check_root
from dreamcomm.zero.units.tree.equal_rows import warn_of_equal_rows
from dreamcomm.zero.units.tree.follow import differs, take_in
from dreamcomm.zero.units.tree.parts import TreeParts
from dreamcomm.zero.units.tree.pending import Pending
from dreamcomm.zero.units.tree.refusals import refuse_to_read, refuse_writes, unreadable
from dreamcomm.zero.units.unit import Unit
from dreamcomm.zero.units.window import Opening, Window

__all__ = ["TreeWindow"]


class TreeWindow(TreeParts):
    """Opens and closes the window of a tree, on one rank. Collective to make.

    Args:
        mesh, form, root, units: as of :class:`TreeParts`.

    Attributes:
        rewrites: within rewrite(), whether this rank writes; else None.
        was_materialized: parameters have got memory, and no values since.
        pending: parameters that wait to be taken in.
    """

    def __init__(self, mesh: DeviceMesh, form: Form, root: Unit, units: Iterable[Unit]) -> None:
        super().__init__(mesh, form, root, units)
        key = gather_objects(self.group, secrets.randbits(32))[0]
        self.window = Window(self.group, key, self.name)
        self.rewrites: bool | None = None
        self.was_materialized = False
        self.pending = Pending(mesh)
        self._unreduced = False  # any rank has a gradient of its own, since the last closing
        self._stepped = True  # rows may have changed unseen since then
        self._counted = False  # all versions have counted up since then
        self._options = 0  # of the optimizers that have stepped since then
        self._versions: list[int] = []

    def link(self) -> None:
        """Has the parameters lead here."""
        raise NotImplementedError

    def forget(self) -> None:
        """Has units, parameters and hooks looked at anew before the next pass."""
        raise NotImplementedError

    def open(self) -> None:
        """Lets all ranks read whole parameters. Collective, unless it is open."""
        if self.rewrites is not None:
            return
        differ = differs(self.units())
        if self.window.is_open:
            if not differ:
                return
            self.close()
        check_root(self.root)
        if not self._meet_to_open(differ):
            self._take_in()
            self._meet_to_open(False)

    def _meet_to_open(self, differ: bool) -> bool:
        """False, and closed: modules have other parameters, on any rank."""
        records = self.records()
        problem = "" if differ else unreadable(records, self.window.name)
        changed = self._stepped or self._versions != _versions(records)
        options, self._options = self._options, 0
        self.form.publish()
        found = self.window.open(Opening(changed, differ, bool(problem)), options)
        if found.differs:
            return False
        if found.refuses:
            refuse_to_read(self.group, records, problem)
        if found.changed and not self._counted:
            increment_version([one.whole for one in records])
        self._stepped = self._counted = False
        self._versions = _versions(records)
        try:
            self.form.fill()
        except BaseException:
            self.window.is_open = False
            raise
        self._protect(True)
        if self.was_materialized:
            self.was_materialized = False
            warn_of_equal_rows(records, self.shards)
        return True

    def follow(self) -> None:
        """Takes in what the script has changed of modules. Collective, if it has."""
        if differs(self.units()):
            self.close()
            self._take_in()

    def _take_in(self) -> None:
        self.check_shards("modules got other parameters")
        take_in(self)

    def close(self) -> None:
        """Lets each rank write its rows. Collective, unless it is closed.

        Raises:
            WindowError: a parameter was written while ranks could read it; on all ranks.
        """
        if not self.window.is_open or self.rewrites is not None:
            return
        records = self.records()
        now = _versions(records)
        moved = [one.name for one, a, b in zip(records, self._versions, now, strict=True) if a != b]
        has_own = any(one.whole.grad is not None for one in records)
        self.form.close()
        any_moved, self._unreduced = self.window.close(bool(moved), has_own)
        self._versions = now
        for unit in self.units():  # whole parameters are not to be read any more
            unit.show_sharded()
        self._protect(False)
        if any_moved:
            self._stepped = True
            refuse_writes(self.group, self.window.name, moved)

    def _protect(self, is_open: bool) -> None:
        if is_protected(2):
            for region in self.regions():
                region.allow_rows(not is_open)

    def mark_changed(self) -> None:
        """Rows have changed in ways that no version tells.

        Versions count up at once: what autograd keeps from now on is of the new values.
        """
        increment_version([one.whole for one in self.records()])
        self._stepped = self._counted = True

    def note_options(self, digest: int) -> None:
        """An optimizer steps with these options, which are to be the same on all ranks."""
        self._options ^= digest & 0xFFFFFFFF


def _versions(records: Iterable[UnitParameter]) -> list[int]:
    from dreamcomm import _C

    return _C.versions_of([one.whole for one in records])
