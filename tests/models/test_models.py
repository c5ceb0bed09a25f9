"""The protocols as Spin models: rounds.pml, meeting.pml, messages.pml, which say what they check.

Needs ``spin`` (Debian's package of that name) and a C compiler. The largest models take
minutes and some GiB of memory; ``--soak`` runs them too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MISSING = [tool for tool in ("spin", "cc") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

HOLDS = [
    "rounds RANKS=2 ROUNDS=3",  # the third is the first whose page was read before
    "rounds RANKS=2 ROUNDS=1 ABORT",
    "meeting RANKS=2 CRASH LATE STRANGER",
    "messages MESSAGES=4 CRASH",
]
HOLDS_LONG = [
    "rounds RANKS=2 ROUNDS=2 CRASH",
    "rounds RANKS=3 ROUNDS=2 SURE_BELL",
    "meeting RANKS=3 STRANGER",
    "messages SENDERS=2 MESSAGES=2 SLOTS=1",
    "rounds RANKS=2 ROUNDS=3 CRASH",
    "rounds RANKS=2 ROUNDS=2 ABORT",
    "rounds RANKS=3 ROUNDS=3 SURE_BELL",
    "rounds RANKS=3 ROUNDS=2 SURE_BELL CRASH",
    "meeting RANKS=3 CRASH",
    "meeting RANKS=3 LATE",
    "rounds RANKS=2 ROUNDS=4",
    "rounds RANKS=2 ROUNDS=3 ABORT",
    "rounds RANKS=3 ROUNDS=2 SURE_BELL ABORT",
    "rounds RANKS=3 ROUNDS=3 SURE_BELL CRASH",
    "meeting RANKS=3 CRASH STRANGER",
    "meeting RANKS=3 CRASH LATE",
    "messages SENDERS=2 MESSAGES=2",
    "messages SENDERS=2 MESSAGES=2 CRASH",
]
# The necessary things, and how the lack of each shows.
BROKEN = {
    "rounds ROUNDS=3 BREAK=ONE_PAGE": "assertion violated",
    "rounds ROUNDS=3 BREAK=NO_WAIT_FOR_READERS": "assertion violated",
    "rounds ROUNDS=3 BREAK=PUBLISH_BEFORE_WRITE": "assertion violated",
    "rounds ROUNDS=3 BREAK=RING_BEFORE_PUBLISH": "assertion violated",
    "rounds ROUNDS=3 BREAK=LOOK_BEFORE_APPROACH": "assertion violated",
    "rounds ROUNDS=3 BREAK=NO_SECOND_LOOK": "assertion violated",
    "meeting RANKS=2 BREAK=LATE_WINDOW": "assertion violated",
    "meeting RANKS=2 BREAK=NO_DIAL_LISTS": "invalid end state",
    "meeting RANKS=2 BREAK=ANSWER_AWAITED_FIRST": "invalid end state",
    "meeting RANKS=2 STRANGER BREAK=NO_NONCE": "assertion violated",
    "meeting RANKS=3 BREAK=NO_OUTCOMES": "assertion violated",
    "messages BREAK=ANNOUNCE_BEFORE_COPY": "assertion violated",
    "messages BREAK=FLAG_BEFORE_COPY": "assertion violated",
    "messages BREAK=NO_RETIRE": "assertion violated",
    "messages BREAK=POST_BEFORE_READ": "assertion violated",
    "messages BREAK=FORGET_CLAIMED": "assertion violated",
}
# One for each model, as each takes seconds of a processor. The long form has them all.
BROKEN_SHORT = [
    "rounds ROUNDS=3 BREAK=NO_SECOND_LOOK",
    "meeting RANKS=2 STRANGER BREAK=NO_NONCE",
    "messages BREAK=FLAG_BEFORE_COPY",
]


def verify(case: str, where: Path) -> str:
    """What Spin's verifier says after a full search, or at the first error."""
    model, *defines = case.split()
    shutil.copy(HERE / f"{model}.pml", where)
    flags = [f"-D{define}" for define in defines]
    run(["spin", *flags, "-a", f"{model}.pml"], where)
    compiler = ["cc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"]
    run(compiler, where)
    return run(["./pan", "-n", "-m2000000"], where)


def run(command: list[str], where: Path) -> str:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_holds(case: str, where: Path) -> None:
    said = verify(case, where)
    found = re.search(r"errors: (\d+)\s+(\d+) states, stored", said)
    assert found, said
    assert found[1] == "0", said
    assert "Search not completed" not in said, said
    assert "max search depth too small" not in said, said
    print(f"{case}: {int(found[2]):,} states, no error")


@pytest.mark.parametrize("case", HOLDS)
def test_the_protocol_holds(case: str, tmp_path: Path) -> None:
    check_holds(case, tmp_path)


@pytest.mark.parametrize("case", HOLDS_LONG)
def test_the_protocol_holds_in_larger_models(case: str, tmp_path: Path, soak: bool) -> None:
    if not soak:
        pytest.skip("only with --soak")
    check_holds(case, tmp_path)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in BROKEN_SHORT else [pytest.mark.long]) for c in BROKEN],
)
def test_a_broken_protocol_is_found_out(case: str, tmp_path: Path) -> None:
    said = verify(case, tmp_path)
    assert BROKEN[case] in said, said
    assert "errors: 1" in said, said
