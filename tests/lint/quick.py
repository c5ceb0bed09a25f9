#!/usr/bin/env python3
"""Finds the tests of the folders that a change touches, for `make quick`.

    python tests/lint/quick.py             # checks the table
    python tests/lint/quick.py --tests     # prints the test files of the change
    python tests/lint/quick.py --tests --since main~3

The change is what differs from the commit where this branch left main, uncommitted files included.
Exit code 1 if the table lacks a folder, or names one that is not there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 320.0  # seconds of tests by tests/times.tsv; four run at a time
MAINS = ("@{upstream}", "origin/main", "main")  # the first that exists

# The tests of each folder, the nearest ones first. The longest name that a file is below counts.
TESTS: dict[str, tuple[str, ...]] = {
    "csrc/algorithms": ("collectives",),
    "csrc/bench": ("tools/test_bench.py", "tools/test_bench_runs.py"),
    "csrc/c10d/autograd": ("pipeline",),
    "csrc/c10d/backend": ("collectives", "lifecycle"),
    "csrc/c10d/backward": ("buckets", "ddp", "zero"),
    "csrc/c10d/base": ("lifecycle", "collectives"),
    "csrc/c10d/batch_norm": ("sync_batch_norm",),
    "csrc/c10d/buckets": ("buckets", "zero", "ddp"),
    "csrc/c10d/device": ("gpu", "device"),
    "csrc/c10d/messages": ("messages", "pipeline/test_messages.py", "gossip"),
    "csrc/c10d/process": ("lifecycle",),
    "csrc/c10d/python": ("collectives", "observe", "ranks"),
    "csrc/c10d/region": ("zero",),
    "csrc/c10d/replicas": ("one_process",),
    "csrc/c10d/units": ("zero",),
    "csrc/c10d/rendezvous": ("lifecycle", "launch"),
    "csrc/c10d/work": ("lifecycle", "collectives"),
    "csrc/comm": ("collectives", "lifecycle", "observe"),
    "csrc/core": ("collectives",),
    "csrc/gpu": ("gpu",),
    "csrc/internode": ("internode",),
    "csrc/kernels": ("buckets", "collectives", "zero/test_kernels.py"),
    "csrc/transport": ("collectives", "lifecycle", "internode"),
    "dreamcomm": ("collectives", "lifecycle"),  # the files of no package
    "dreamcomm/_torch": ("collectives", "ddp", "lifecycle"),
    "dreamcomm/arrays": ("arrays",),
    "dreamcomm/averaging": ("local_sgd", "gossip"),
    "dreamcomm/buckets": ("buckets", "ddp", "zero"),
    "dreamcomm/ddp": ("ddp", "buckets"),
    "dreamcomm/gossip": ("gossip",),
    "dreamcomm/invariant": ("invariant",),
    "dreamcomm/launch": ("launch",),
    "dreamcomm/local_sgd": ("local_sgd",),
    "dreamcomm/messages": ("messages", "pipeline/test_messages.py", "gossip", "server"),
    "dreamcomm/observe": ("observe",),
    "dreamcomm/one_process": ("one_process",),
    "dreamcomm/pipeline": ("pipeline",),
    "dreamcomm/ranks": ("ranks", "ddp", "zero", "local_sgd"),
    "dreamcomm/server": ("server",),
    "dreamcomm/sync_batch_norm": ("sync_batch_norm",),
    "dreamcomm/tools": ("tools",),
    "dreamcomm/zero": ("zero",),
    "benchmarks": ("tools/test_bench.py", "tools/test_bench_measurement.py"),
    "benchmarks/gpu": ("gpu/test_suite_table.py", "gpu/test_suite_mps.py"),
    "cmake": ("install",),
    "docs": ("docs",),
    "examples": ("docs/test_examples.py",),
    "tests/cpp": (),  # `make cpp`
    "tests/helpers": ("launch/test_spawn.py",),
    "tests/lint": (),  # `make lint` runs them
}
# The folders of which each one inside needs a row of its own.
PARENTS = ("csrc", "csrc/c10d", "dreamcomm")
# Rooms of tests that stand beside no folder: a change in the room itself runs them.
ALONE = {"conformance", "endurance", "faults", "libraries", "models", "training"}


def problems() -> Iterator[str]:
    """A line for each folder without a row, and each name without a folder or file."""
    for parent in PARENTS:
        for folder in sorted((ROOT / parent).iterdir()):
            name = folder.relative_to(ROOT).as_posix()
            if name not in (*TESTS, *PARENTS) and tracked(f"{name}/"):
                yield f"{name} has no row: say which tests belong to it"
    for name, tests in TESTS.items():
        if not (ROOT / name).is_dir():
            yield f"{name} is no folder: take its row away"
        yield from (
            f"{name}: there is no tests/{one}" for one in tests if not path_of(one).exists()
        )
    named = {one.partition("/")[0] for tests in TESTS.values() for one in tests} | ALONE
    for folder in sorted((ROOT / "tests").iterdir()):
        if f"tests/{folder.name}" in TESTS or folder.name in named:
            continue
        if tracked(f"tests/{folder.name}/test_*.py"):
            yield f"tests/{folder.name} belongs to no row: name it beside what it tests"


def path_of(test: str) -> Path:
    return ROOT / "tests" / test


def git(*words: str) -> list[str]:
    """The lines of its output; none if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def tracked(pattern: str) -> list[str]:
    return git("ls-files", "--cached", "--others", "--exclude-standard", pattern)


def changed(since: str | None) -> list[str]:
    """The files that differ from a commit, new ones included."""
    bases = [since] if since else [base for one in MAINS for base in git("merge-base", "HEAD", one)]
    base = next(iter(bases), "HEAD")
    return git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")


def files_of(change: Iterable[str]) -> Iterator[str]:
    """The test files that belong to a change, nearest first; some come several times."""
    for name in change:
        path = Path(name)
        if name.startswith("tests/") and path.name.startswith("test_") and (ROOT / path).exists():
            yield name
    for name in change:
        rows = [row for row in TESTS if name.startswith(f"{row}/")]
        if rows:
            for test in TESTS[max(rows, key=len)]:
                yield from inside(path_of(test))
        elif name.startswith("tests/") and "/" in name.removeprefix("tests/"):
            yield from inside(path_of(name.split("/")[1]))  # what a room's tests share


def inside(path: Path) -> list[str]:
    found = sorted(path.glob("test_*.py")) if path.is_dir() else [path]
    return [one.relative_to(ROOT).as_posix() for one in found]


def within_budget(files: Iterable[str], seconds: dict[str, float]) -> tuple[list[str], list[str]]:
    """The files that fit, and the others. One that alone is too long does not keep others out."""
    taken, left_out, spent = [], [], 0.0
    for file in dict.fromkeys(files):
        if spent + seconds.get(file, 0.0) <= BUDGET:
            taken.append(file)
            spent += seconds.get(file, 0.0)
        else:
            left_out.append(file)
    return taken, left_out


def seconds_of_files() -> dict[str, float]:
    found: dict[str, float] = {}
    for line in (ROOT / "tests" / "times.tsv").read_text().splitlines():
        seconds, test = line.split("\t")
        file = test.split("::")[0]
        found[file] = found.get(file, 0.0) + float(seconds)
    return found


def main() -> int:
    """Prints problems of the table, or the tests of a change."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tests", action="store_true", help="print the test files of the change")
    parser.add_argument("--since", help="the commit to compare with")
    options = parser.parse_args()
    if not options.tests:
        found = list(problems())
        print("\n".join([*found, f"{len(found)} problems with the table of tests"]))
        return 1 if found else 0
    taken, left_out = within_budget(files_of(changed(options.since)), seconds_of_files())
    if left_out:
        print(f"Left out, as they take long: {' '.join(left_out)}", file=sys.stderr)
    print(*taken)
    return 0


if __name__ == "__main__":
    sys.exit(main())
