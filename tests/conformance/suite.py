#!/usr/bin/env python3
"""Runs torch's distributed tests against one backend and writes each test's outcome.

    python tests/conformance/suite.py --backend gloo --world 2 --json out.json -v
    python tests/conformance/suite.py --backend dreamcomm --world 4 --json out.json \\
        --only test_all_reduce_sum --only test_broadcast --errors
    python tests/conformance/suite.py --pretend-gpus --json out.json \\
        --data-parallel dreamcomm.DistributedDataParallel --only test_ddp_namedtuple

The ranks of a test are forked, so torch is imported once. run.py compares two backends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import unittest
from pathlib import Path
from typing import Any

from outcomes import Outcomes
from selection import Case, import_suite


def make_tests(case: Case, rank_log: str, data_parallel: str = "") -> type[unittest.TestCase]:
    """The suite as a TestCase whose ranks answer for `case`; rank output to `rank_log`.

    With `data_parallel`, "package.Class", each rank has to make that class in torch's place.
    """
    suite = import_suite(case)
    enter: Any = contextlib.nullcontext
    check_made: Any = None
    if data_parallel:  # before pretend_gpus, which mends the class that it finds
        import stand_in

        check_made = stand_in.install(data_parallel, suite)
    if case.pretend_gpus:
        import pretend_gpus

        enter = pretend_gpus.install(case.world)
    import torch

    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            # A rank left over from a hung test must not disturb the next one.
            for process in self.processes:
                if process.is_alive():
                    process.kill()
                process.join()
            super().tearDown()

        @classmethod
        def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
            log = os.open(rank_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            with enter(rank):
                super()._run(rank, *args, **kwargs)

        def run_test(self, test_name: str, *args: Any) -> None:
            test = getattr(self, test_name)

            def checked() -> None:
                test()
                check_made()

            if check_made:
                setattr(self, test_name, checked)
            super().run_test(test_name, *args)

    Suite.__module__ = __name__
    Suite.__qualname__ = "Suite"
    return Suite


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="dreamcomm")
    parser.add_argument("--world", type=int, default=2, help="number of ranks")
    parser.add_argument("--pretend-gpus", action="store_true")
    parser.add_argument("--hosts", default="", help="a host's name for each rank: a,a,b,b")
    parser.add_argument(
        "--data-parallel",
        default="",
        help="the class that tests make in place of torch's: dreamcomm.DistributedDataParallel; "
        "a test that makes none fails",
    )
    parser.add_argument("--only", action="append", default=[], help="a test's name; repeatable")
    parser.add_argument("--only-file", type=Path, help="names of the tests to run, one a line")
    parser.add_argument("--skip", action="append", default=[], help="a test's name; repeatable")
    parser.add_argument("--shard", default="1/1", help="I/N: the I-th of N interleaved parts")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for one test")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    parser.add_argument("--rank-log", default=os.devnull, help="append the ranks' output here")
    parser.add_argument("--errors", action="store_true", help="print each failure in full")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line per test")
    return parser.parse_args(argv)


def _chosen(tests: type[unittest.TestCase], args: argparse.Namespace) -> list[str]:
    only = set(args.only)
    if args.only_file:
        only |= set(args.only_file.read_text().split())
    part, parts = (int(x) for x in args.shard.split("/"))
    names = [
        name
        for name in unittest.TestLoader().getTestCaseNames(tests)
        if (not only or name in only) and name not in args.skip
    ]
    return names[part - 1 :: parts]


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if args.hosts:  # for the ranks, which are forked
        os.environ["DREAMCOMM_HOSTS"] = args.hosts
    case = Case(args.backend, args.world, args.pretend_gpus, args.timeout, args.hosts)
    tests = make_tests(case, os.path.abspath(args.rank_log), args.data_parallel)
    logging.disable(logging.CRITICAL)

    outcomes = Outcomes(args.verbose, args.errors)
    for name in _chosen(tests, args):
        tests(name).run(outcomes)
    if args.json:
        args.json.write_text(json.dumps(outcomes.by_name, indent=1, sort_keys=True) + "\n")
    print(outcomes.closing_line())
    return 1 if outcomes.count("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
