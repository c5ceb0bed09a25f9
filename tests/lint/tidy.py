#!/usr/bin/env python3
"""Runs clang-tidy over the sources of csrc/, several files at a time.

    python tests/lint/tidy.py -p build/tidy                                # all of csrc/
    python tests/lint/tidy.py -p build/tidy csrc/core csrc/comm/tuning     # these alone

build/tidy has the commands that compile each file alone. Exit code 1 if .clang-tidy's checks find
something.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIDY = Path(sys.executable).with_name("clang-tidy")
# GCC's own, in a build by GCC.
UNKNOWN = ["-Wno-unknown-warning-option", "-Wno-unknown-attributes"]


def sources_of(build: Path, below: list[str]) -> list[str]:
    """The compiled sources of these files and folders, all of csrc/ if there are none."""
    commands = json.loads((build / "compile_commands.json").read_text())
    files = sorted({(Path(one["directory"]) / one["file"]).resolve() for one in commands})
    places = [(ROOT / one).resolve() for one in below or ["csrc"]]
    return [str(one) for one in files if any(one.is_relative_to(place) for place in places)]


def findings(build: Path, file: str) -> tuple[int, str]:
    """The exit status and the text of one file."""
    extra = [f"--extra-arg={one}" for one in UNKNOWN]
    command = [str(TIDY), "--quiet", "-p", str(build), *extra, file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout if done.stdout.strip() else done.stderr


def main() -> int:
    """Prints what is found, each line once, although headers are read with several files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--build", type=Path, required=True, help="the build's folder")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), help="files at a time")
    parser.add_argument("below", nargs="*", help="files and folders; csrc if there are none")
    options = parser.parse_args()
    files = sources_of(options.build, options.below)
    if not files:
        sys.exit(f"{options.build} compiles nothing of {', '.join(options.below) or 'csrc'}")
    seen: set[str] = set()
    failed = 0
    with ThreadPoolExecutor(options.jobs) as threads:
        for status, text in threads.map(lambda file: findings(options.build, file), files):
            failed += status != 0
            if status != 0 and text not in seen:
                print(text, flush=True)
            seen.add(text)
    print(f"clang-tidy: {failed} of {len(files)} files have findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
