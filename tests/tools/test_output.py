"""What the commands say where their output cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

APP = [sys.executable, "-c", "from dreamcomm.tools.cli import app; app()"]
SAID = "dreamcomm: cannot write the output: No space left on device\n"

COMMANDS = [
    ["version"],
    ["top"],
    *(
        pytest.param(arguments, marks=pytest.mark.long)
        for arguments in (
            ["simulate", "--sizes", "1KiB"],
            ["top", "--once"],
            ["top", "--json"],
            ["doctor"],
            ["--help"],
        )
    ),
]


def run(arguments: list[str], stdout: Any, **settings: str) -> tuple[int, str]:
    """The exit status, and what was said on stderr."""
    done = subprocess.run(
        [*APP, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        env={**os.environ, **settings},
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_device_is_told_in_a_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        assert run(arguments, full) == (1, SAID)


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--sizes", "1KiB"],
        pytest.param(
            ["bench", "--world", "2", "--sizes", "1KiB", "--op", "broadcast", "--seconds", "0.01"],
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_file_that_cannot_be_written_is_told_in_a_line(arguments: list[str]) -> None:
    status, said = run([*arguments, "--json", "/dev/full"], subprocess.DEVNULL)
    assert status == 1
    assert said.strip() == "dreamcomm: cannot write /dev/full: No space left on device"


def test_what_was_buffered_is_not_complained_of_at_the_end() -> None:
    """A program whose print is not flushed."""
    code = "from dreamcomm.tools.cli.output import told_output\nwith told_output(): print('a word')"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.decode()) == (1, SAID)


@pytest.mark.parametrize(
    "arguments",
    [["version"], pytest.param(["top", "--json"], marks=pytest.mark.long)],
    ids=" ".join,
)
def test_a_reader_that_left_is_not_worth_a_word(arguments: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        assert run(arguments, theirs) == (1, "")
    finally:
        os.close(theirs)


def test_other_errors_come_out_as_they_are() -> None:
    """Also those of files that are full, too: they are not the output."""
    code = """
from dreamcomm.tools.cli.output import told_output
with told_output():
    print("before")
    open("/dev/full", "wb", buffering=0).write(b"x")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == "before\n"
    assert done.stderr.endswith("OSError: [Errno 28] No space left on device\n")
