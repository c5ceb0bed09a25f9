"""The tags of messages that are not the user's: who takes which.

Users' own tags are small numbers. A range has units of several tags; each channel takes one.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

__all__ = ["GOSSIP", "OBJECTS", "PIPELINE", "SERVER", "UNIT", "USERS", "TagRange"]

UNIT = 4  # tags: headers, what follows them, one that no message has, one to spare


@dataclass(frozen=True)
class TagRange:
    """Tags of one kind of channel.

    Attributes:
        first: tag.
        units: how many, each of UNIT tags.
    """

    first: int
    units: int

    @property
    def end(self) -> int:
        """The first tag behind it."""
        return self.first + UNIT * self.units

    def drawn(self) -> int:
        """The first tag of a unit, drawn at random: other channels of the group have another."""
        return self.first + UNIT * secrets.randbelow(self.units)


USERS = 1 << 20  # a Communicator's users have the tags below
SERVER = TagRange(USERS, 1)  # one channel in each group of two
PIPELINE = TagRange(1 << 24, 1 << 23)
GOSSIP = TagRange(1 << 26, 1 << 24)
OBJECTS = TagRange(1 << 28, USERS + 1)  # a unit for each tag of a user, and one of collectives
