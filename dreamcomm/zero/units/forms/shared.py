"""One copy of the parameters a host, in memory that all ranks map: nothing is gathered."""

from __future__ import annotations

from collections.abc import Sequence

from dreamcomm.zero.units.forms.form import Form
from dreamcomm.zero.units.parameters.placed import Placed, Source
from dreamcomm.zero.units.parameters.region import place

__all__ = ["Shared"]


class Shared(Form):
    """The ranks are processes of one host."""

    def place(self, sources: Sequence[Source]) -> list[Placed]:
        return place(sources, self.group)

    def described(self) -> str:
        return "one copy of the parameters on this host"
