#!/usr/bin/env python3
"""Torch's own distributed tests with dreamcomm, judged by what Gloo passes.

    python tests/conformance/run.py                         # all of it
    python tests/conformance/run.py --quick                 # only what must pass, not of 3 ranks
    python tests/conformance/run.py --worlds 4 -v           # one world, a line per test
    python tests/conformance/run.py --worlds '' --no-pretend-gpus --hosts a,a,b,b
                                                            # on two hosts alone, whole
    python tests/conformance/run.py --refresh               # run Gloo again as well

A test fails here when Gloo passes it and the backend fails or skips it, unless
exclusions.toml names it with a reason. Gloo's results are kept in reference/, one file
for each torch version and case; a missing one is made first. On hosts, which the option
makes of ranks that could share memory, what passes on one has to pass; --quick takes a few
tests of each kind there. The last line reads 'N passed, N failed, N skipped'.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compare import (
    HERE,
    Exclusion,
    Verdict,
    judge,
    read_exclusions,
    reference_path,
    version,
    write_reference,
)
from outcomes import Outcome
from selection import Case

# With --quick, on hosts: two seconds each, where four ranks are on two cores.
QUICK_ON_HOSTS = (
    "test_DistributedDataParallelCPU",
    "test_all_gather",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split",
    "test_barrier_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_gather_object",
    "test_scatter",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="dreamcomm")
    parser.add_argument(
        "--worlds", help="numbers of ranks, comma separated; default 2,3,4, with --quick 2,4"
    )
    parser.add_argument(
        "--pretend-gpus",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also run world 2 with CPU tensors in place of GPU ones",
    )
    parser.add_argument(
        "--hosts",
        default="a,a,b,b",
        help="also run as many ranks as this names, on hosts of these names; '': do not",
    )
    parser.add_argument("--quick", action="store_true", help="only the tests that must pass")
    parser.add_argument("--refresh", action="store_true", help="run Gloo again")
    parser.add_argument("--only", action="append", default=[], help="a test's name; repeatable")
    parser.add_argument("--shards", type=int, default=4, help="parts that run side by side")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for one test")
    parser.add_argument("--json-dir", type=Path, help="write every outcome and rank log here")
    parser.add_argument("--errors", action="store_true", help="print each failure in full")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line per test")
    args = parser.parse_args(argv)
    if args.worlds is None:
        args.worlds = "2,4" if args.quick else "2,3,4"
    return args


class Runner:
    """Runs cases with the options of one command line."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        import torch

        self.args = args
        self.folder = folder
        self.torch = version(torch.__version__)
        self.exclusions: list[Exclusion] = read_exclusions()
        print(f"torch {torch.__version__}, backend {args.backend}, judged by gloo", flush=True)

    def cases(self) -> list[Case]:
        args = self.args
        worlds = [int(world) for world in args.worlds.split(",") if world]
        cases = [Case(args.backend, world, False, args.timeout) for world in worlds]
        if args.pretend_gpus:
            cases.append(Case(args.backend, 2, True, args.timeout))
        if args.hosts and args.backend != "gloo":  # which knows none
            ranks = len(args.hosts.split(","))
            cases.append(Case(args.backend, ranks, False, args.timeout, args.hosts))
        return cases

    def verdict(self, case: Case) -> Verdict:
        reference = self.reference(case.plain)
        excluded = {x.test for x in self.exclusions if x.applies(case, self.torch)}
        only = set(self.args.only) or set(reference)
        if self.args.quick and case.hosts and not self.args.only:
            only = set(QUICK_ON_HOSTS)
        reference = {name: result for name, result in reference.items() if name in only}
        names = {name for name in reference if name not in excluded}
        if self.args.quick:
            names = {name for name in names if reference[name] == "passed"}
        return judge(reference, self.outcomes(case, names), excluded)

    def reference(self, case: Case) -> dict[str, str]:
        path = reference_path(case, self.torch, HERE / "reference")
        if path.exists() and not self.args.refresh:
            found: dict[str, str] = json.loads(path.read_text())
            return found
        print(f"{case.label}: running gloo for {path.name}", flush=True)
        gloo = Case("gloo", case.world, case.pretend_gpus, case.timeout)
        return write_reference(path, self.outcomes(gloo, None))

    def outcomes(self, case: Case, names: set[str] | None) -> dict[str, Outcome]:
        """Runs the tests of these names, or all, in parts side by side."""
        stem = self.folder / f"{case.backend}-{case.label}"
        command = [sys.executable, str(HERE / "suite.py"), f"--backend={case.backend}"]
        command += [f"--world={case.world}", f"--timeout={case.timeout}"]
        command += [f"--rank-log={stem}.log"]
        command += ["--pretend-gpus"] if case.pretend_gpus else []
        command += [f"--hosts={case.hosts}"] if case.hosts else []
        command += ["--verbose"] if self.args.verbose else []
        command += ["--errors"] if self.args.errors else []
        command += [
            f"--skip={x.test}"
            for x in self.exclusions
            if x.hangs_gloo and x.applies(case, self.torch)
        ]
        if names is not None:
            only = Path(f"{stem}.names")
            only.write_text("\n".join(sorted(names)) + "\n")
            command += [f"--only-file={only}"]
        return self._run_parts(command, stem)

    def _run_parts(self, command: list[str], stem: Path) -> dict[str, Outcome]:
        talks = self.args.verbose or self.args.errors
        parts = range(1, self.args.shards + 1)
        files = [Path(f"{stem}.{part}.json") for part in parts]
        running = []
        for part, file in zip(parts, files, strict=True):
            file.unlink(missing_ok=True)
            run = [*command, f"--shard={part}/{self.args.shards}", f"--json={file}"]
            running.append(subprocess.Popen(run, stdout=None if talks else subprocess.DEVNULL))
        try:
            for process in running:
                process.wait()
        finally:
            for process in running:
                process.kill()
                process.wait()
        outcomes: dict[str, Outcome] = {}
        for process, file in zip(running, files, strict=True):
            if not file.exists():
                raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}")
            outcomes |= json.loads(file.read_text())
        return outcomes


def run(args: argparse.Namespace, folder: Path) -> int:
    runner = Runner(args, folder)
    passed = failed = skipped = 0
    for case in runner.cases():
        begin = time.monotonic()
        verdict = runner.verdict(case)
        seconds = time.monotonic() - begin
        beyond = f", and {len(verdict.beyond)} that gloo fails" if verdict.beyond else ""
        must = len(verdict.passed) + len(verdict.failed)
        print(f"{case.label}: {len(verdict.passed)} of {must}{beyond} ({seconds:.0f} s)")
        for line in verdict.failed:
            print(f"FAILED {case.label} {line}", flush=True)
        passed += len(verdict.passed) + len(verdict.beyond)
        failed += len(verdict.failed)
        skipped += len(verdict.skipped)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed or not passed else 0


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    if args.json_dir:
        args.json_dir.mkdir(parents=True, exist_ok=True)
        return run(args, args.json_dir)
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        return run(args, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
