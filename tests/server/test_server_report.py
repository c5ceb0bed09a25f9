"""The table of a server's report."""

from __future__ import annotations

from dreamcomm.server.report import ServerReport, WorkerCounts


def test_many_values_of_a_histogram_are_one_line() -> None:
    far = dict.fromkeys(range(200), 2)
    report = ServerReport(400, 400, far, {3: 1, 0: 7}, {1: WorkerCounts(state="left")})
    lines = str(report).splitlines()
    assert lines[1].endswith("0: 2, 1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2, 7: 2, 8: 2, 9: 2, 10: 2, "
                             "11: 2, 12 to 199: 376")  # fmt: skip
    assert lines[2] == "lag of gradients:   0: 7, 3: 1"
    assert lines[4].endswith("left")
