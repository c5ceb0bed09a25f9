#!/usr/bin/env python3
"""Finds words and turns of phrase that this project does not write, in comments and texts.

    python tests/lint/words.py              # csrc/, dreamcomm/, docs/ and README.md
    python tests/lint/words.py csrc/comm    # of these files and folders
    python tests/lint/words.py --count      # how often each is found

A comment opens with its subject and a plain verb. Threads, ranks and peers run, wait, stop and
fail. A thing has the name that the field gives it. Exit code 1 if anything is found.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("csrc", "dreamcomm", "docs", "README.md", "CONTRIBUTING.md", "SECURITY.md")
ENDINGS = {".h", ".cc", ".cu", ".cuh", ".py", ".pyi", ".md"}

WHO = r"(?:ranks?|threads?|peers?|processe?s?|leaders?|kernels?|hosts?|nodes?|rank \d|rank N)"
LINK = r"(?:that |who |which |all )?(?:(?:has|have|had) )?"
WHAT = r"(?:it|them|the group|the call|the barrier|a group)"
# What is found, and what to write instead.
PATTERNS = {
    # Sentences that have to be read twice.
    r"(?:^|[.!?:]\s+)Of (?!course\b)": "open with the subject",
    r"\bbut for\b": "except",
    r"\bwho(?:so)?ever\b": "name the thread, rank or caller",
    r"\bnobody needs?\b": "say what is not needed",
    r"\b(?:is|are|was|were|be|been) told (?:of|that|why|who|what|how|when)\b": "is reported to",
    r"\bbef[ae]ll?s?\b|\bbefallen\b": "an error",
    r"\blook about\b": "check",
    r"\bin good order\b": "cleanly",
    r"\bto blame\b": "the cause",
    r"\bhas word\b|\bword of\b|\bword from\b": "a message",
    # What threads and ranks do not do.
    rf"\b{WHO} {LINK}(?:comes?|came|goes|go|went|gone)\b": "arrive, run, enter, end, are lost",
    rf"\b{WHO} {LINK}(?:meets?|met)\b": "bootstrap",
    rf"\b{WHO} {LINK}(?:hears?|heard)\b": "receive",
    r"\bgives? up\b|\bgave up\b|\bgiv(?:en|ing) up\b": "abort, or stop waiting",
    rf"\b(?:gives?|gave|given|giving) {WHAT} up\b": "abort",
    # Names from a story.
    r"\broll[- ]calls?\b": "monitored barrier",
    r"\b[Cc]lerks?\b": "worker",
    r"\b[Vv]igils?\b": "connection monitor",
    r"\b[Nn]udg(?:e|es|er|ed|ing)\b": "interrupt",
    r"\b[Rr]osters?\b": "liveness",
    r"\b[Mm]akings?\b": "group order, group record",
    r"\b[Bb]ulletins?\b": "board",
    r"\b[Ww]hereabouts\b": "call site",
    r"\b[Dd]oorkeepers?\b": "acceptor",
    r"\b[Gg]uests?\b": "accepted peer",
    r"\b[Tt]urnstiles?\b": "ticket lock",
    r"\b[Mm]ailbox(?:es)?\b": "tag matcher",
    r"\b[Hh]earsay\b": "peer reports",
    r"\b[Tt]rips?\b(?! (?:time|around))": "context, call",
    r"\b[Ss]pan(?:s|ning)? (?:several |more |two )?(?:hosts|nodes)\b": "multi-node",
    r"\b[Ll]etters?\b": "packet, message header",
}
# What is found besides where nothing of it is left.
STRICT_PATTERNS = {
    r"(?:^#*\s*|[.!:]\s+)(?:What|Whether)\b": "open with the subject; True if",
    r"\bone that\b": "name it: the rank, the call",
    r"\bas of\b": "as in, such as",
}
STRICT = ("csrc/", "docs/", "README.md", "CONTRIBUTING.md", "SECURITY.md")
# Where the words are what is meant.
EXCEPT = re.compile(r"[Cc]apital letters?|letters of the alphabet|round trips?|`[^`]*`")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers with what people read there: comments, strings, and all of a document."""
    fenced = False
    quoted = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if path.suffix == ".md":
            fenced ^= line.lstrip().startswith("```")
            if not fenced:
                yield number, line.strip()
        elif path.suffix in {".py", ".pyi"}:
            text = line.strip()
            opens = text.count('"""')
            if quoted or opens:
                yield number, text.replace('"""', "").strip()
            else:
                yield from ((number, found) for found in _pieces(line, "#"))
            quoted ^= opens % 2 == 1
        elif not line.lstrip().startswith("#include"):
            yield from ((number, found) for found in _pieces(line, "//"))


def patterns_of(path: Path) -> dict[str, str]:
    """The patterns that hold for a file."""
    name = path.resolve().relative_to(ROOT).as_posix()
    is_strict = name.startswith(STRICT)
    return PATTERNS | STRICT_PATTERNS if is_strict else PATTERNS


def _pieces(line: str, comment: str) -> Iterator[str]:
    """A line's strings, and its comment without its marks."""
    for match in re.finditer(rf'"((?:\\.|[^"\\])*)"|{comment}[/!<]*\s*(.*)$', line):
        yield match[1] if match[1] is not None else match[2]


def sources(places: list[Path]) -> Iterator[Path]:
    """The files to read, in order."""
    for place in places:
        found = sorted(place.rglob("*")) if place.is_dir() else [place]
        yield from (path for path in found if path.suffix in ENDINGS and path.is_file())


def main() -> int:
    """Prints what is found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("places", nargs="*", type=Path)
    parser.add_argument("--count", action="store_true", help="only how often each is found")
    asked = parser.parse_args()
    places = asked.places or [ROOT / name for name in PLACES if (ROOT / name).exists()]
    counts: Counter[str] = Counter()
    for path in sources(places):
        patterns = patterns_of(path)
        for number, text in prose(path):
            for pattern, better in patterns.items():
                found = re.search(pattern, EXCEPT.sub("", text))
                if found is None:
                    continue
                counts[pattern] += 1
                if not asked.count:
                    print(f'{path}:{number}: "{found[0].strip()}": {better}: {text}')
    if asked.count:
        for pattern, count in counts.most_common():
            print(f"{count:5} {pattern}")
    print(f"{sum(counts.values())} found")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
