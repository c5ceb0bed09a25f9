"""Garbage in the store where ranks look for what the others publish: an error, and no harm."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dreamcomm import _C

pytestmark = pytest.mark.beyond_gloo("gloo publishes nothing of this")

HEX = "0" * 32
# Invalid values of each field of the rank info, by the field's place.
WRONG = {
    0: ("", "gloo", "dreamcom", "DREAMCOMM", "\0"),
    1: ("0", "77", "-1", "x", str(2**64)),
    3: ("0", "2", "-1", "x", str(2**40)),
    4: ("0", "1", "3", "-2", "x", str(2**33)),
    5: ("0", "7", "-1", "x", str(2**64 - 1), str(2**70)),
    6: ("0", "7", "-1", "x", str(2**64 - 1), str(2**70)),
    7: ("2", "x"),
    8: ("", "0", HEX[1:], HEX + "0", "g" * 32, "x" * 10_000),
    9: ("x", "-", str(2**70)),
    10: ("", "0", HEX + "0", "zz" * 16),
}


class Rank0:
    """Makes a group of two whose other rank is what a test writes into the store."""

    def __init__(self) -> None:
        self.whole = dist.HashStore()
        self.store = dist.PrefixStore("shm", dist.PrefixStore("dreamcomm/visit/2/1", self.whole))
        self.store.set("seen/1", "")  # the other rank knows of all errors

    def make(self) -> str:
        """What is said of it."""
        try:
            _C.DreamBackend(self.whole, 0, 2, _C.Options(heap_bytes=0), None)
        except dist.DistBackendError as error:
            return str(error)
        return "no error"

    def card(self) -> list[str]:
        """As the other rank would publish it, given this one's."""
        fields = self.store.get("card/0").decode().split(" ")
        return [*fields[:3], "1", *fields[4:8], HEX, *fields[9:]]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def cards(good: list[str]) -> list[bytes]:
    """Each field wrong in each way, rank infos that are cut off, and bytes that are no text."""
    chance = random.Random(1)
    found = []
    for place, texts in WRONG.items():
        for text in texts:
            found.append(" ".join([*good[:place], text, *good[place + 1 :]]).encode())
    found += [" ".join(good[:fields]).encode() for fields in range(len(good) - 1)]
    found += [chance.randbytes(size) for size in (1, 16, 100, 4096, 1 << 20)]
    return found


def test_cards_that_are_none() -> None:
    first = Rank0()
    first.store.set("card/1", "")
    first.make()
    garbage = cards(first.card())
    before = open_descriptors()
    for card in garbage:
        rank = Rank0()
        rank.store.set("card/1", card.decode("latin-1"))
        said = rank.make()
        assert "rank 1" in said, (card, said)
        assert len(said) < 3_000 + len(card)
    assert open_descriptors() == before


@pytest.mark.parametrize("what", ["dial", "maps"])
@pytest.mark.parametrize("garbage", ["", "1", "u" * 1000, "\0"])
def test_lists_that_are_none(what: str, garbage: str) -> None:
    """Whom the other rank reached, and whose memory it has mapped."""
    rank = Rank0()
    with ThreadPoolExecutor() as threads:
        made = threads.submit(rank.make)
        rank.store.set("card/1", " ".join(rank.card()))
        rank.store.set("dial/1", garbage if what == "dial" else "0.")
        rank.store.set("outcome/1", "nothing is shared")
        rank.store.set("maps/1", garbage)
        assert "what rank 1 published cannot be read: " in made.result(60)
