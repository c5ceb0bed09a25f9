"""``dreamcomm simulate``: the model on clusters that are described."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dreamcomm.tools.cli.commands import commands
from dreamcomm.tools.simulate.cluster import Cluster, Wire, described, within
from dreamcomm.tools.simulate.predict import (
    COLLECTIVES,
    Training,
    collective,
    ddp_step,
    ring_all_reduce,
    ways,
)
from dreamcomm.tools.simulate.read import read_cluster
from dreamcomm.tools.simulate.scaling import host_counts, scaling
from dreamcomm.tools.simulate.units import parse_rate, parse_time

MIB = 1 << 20


def cluster(*ranks_on: int, bandwidth: float = 1e9, latency: float = 50e-6) -> Cluster:
    wire = Wire(latency, message=0.0, alone=bandwidth, bandwidth=bandwidth, chunk=0.0)
    return Cluster(ranks_on, within(1e-6, 1e11), wire)


@pytest.mark.parametrize(
    ("text", "seconds"), [("1ms", 1e-3), ("50us", 50e-6), ("50 µs", 50e-6), ("0.5s", 0.5)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10Gbit/s", 1.25e9),
        ("100 mbit/s", 12.5e6),
        ("10Gb/s", 1.25e9),
        ("10 gbps", 1.25e9),
        ("12.5GB/s", 12.5e9),
        ("800MB/s", 8e8),
        ("10GBps", 1e10),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    "text", ["", "fast", "10", "-1Gbit/s", "0Gbit/s", "10 parsecs", "10GB", "10Gbit", "1000/s"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a bandwidth: write"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["0.1B/s", "7bit/s", "9" * 400 + "GB/s"])
def test_rates_beyond_all_sums_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"the model is for 1B/s to 1e\+24B/s, got .{,42}$"):
        parse_rate(text)


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="'5 minutes' is not a time"):
        parse_time("5 minutes")


@pytest.mark.parametrize("text", ["1000001s", "9" * 400 + "ns"])
def test_times_beyond_all_sums_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"the model is for up to 1000000s, got .{,42}$"):
        parse_time(text)


def test_a_cluster_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'ranks_on_hosts = [1, 1, 1, 2]\n[within]\nlatency = "2us"\nbandwidth = "5GB/s"\n'
        '[between]\nlatency = "1ms"\nbandwidth = "1Gbit/s"\n'
    )
    found = read_cluster(path)
    assert found.ranks_on == (1, 1, 1, 2)
    assert found.here == within(2e-6, 5e9)
    assert found.wire.bandwidth == found.wire.alone == 1.25e8
    assert found.wire.latency == 1e-3


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"hosts": 0}, "one host at least"),
        ({"hosts": "two"}, "one host at least: expected hosts = 2 or the like, got 'two'"),
        ({"hosts": True}, "got True"),
        ({"ranks_per_host": -3}, "one rank at least: expected ranks_per_host = 8 .*, got -3"),
        ({"hosts": 2, "ranks_on_hosts": [1]}, "leave hosts"),
        ({"ranks_on_hosts": 3}, "lists the ranks .*, got 3"),
        ({"hosts": 10**11}, "up to 16,384 ranks in all, got 800,000,000,000"),
        ({"hosts": 1, "ranks_per_host": 16_385}, "up to 16,384 ranks"),
        ({"ranks_on_hosts": [16_384, 1]}, "up to 16,384 ranks in all, got 16,385"),
        ({"within": 3}, r"within is a section: write \[within\] and below it .*, got within = 3"),
        ({"between": [{}]}, r"between is a section: write \[between\]"),
        ({"machines": 2}, "unknown: machines"),
        ({"betwen": {}}, r"no section \[betwen\]"),
        ({"between": {"speed": "1us"}}, r"unknown in \[between\]: speed"),
        ({"between": {"latency": 5}}, "latency needs a unit"),
        ({"between": {"bandwidth": 5}}, "bandwidth needs a unit"),
        (
            {"between": {"bandwidth": "10Gbit/s", "bandwidth_of_a_rank": "2GB/s"}},
            "bandwidth_of_a_rank = '2GB/s' is above bandwidth = '10Gbit/s'",
        ),
        ({"between": {"bandwidth_of_a_rank": "1.3GB/s"}}, "above bandwidth = '10Gbit/s'"),
    ],
)
def test_wrong_descriptions_are_told(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        described(table)


def test_a_file_that_says_nothing_is_the_cluster_without_flags(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").touch()
    _, by_flags = run("--sizes", "64MiB")
    assert run("--sizes", "64MiB", "--cluster", str(tmp_path / "empty.toml")) == (0, by_flags)
    assert described({}).wire.alone == described({}).wire.bandwidth == 1.25e9


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes("# Münster\nhosts = 2\n".encode("latin-1"))
    with pytest.raises(
        ValueError, match=r"cluster\.toml is not UTF-8 text, as TOML is: see byte 3"
    ):
        read_cluster(path)


def test_a_file_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("hosts = " + "[" * 100_000)
    with pytest.raises(ValueError, match=r"cluster\.toml is no TOML of a cluster: it is nested"):
        read_cluster(path)


def test_a_cluster_has_as_many_ranks_as_the_model_is_for() -> None:
    assert described({"hosts": 2048}).size == 16_384


def test_a_ring_does_not_grow_with_its_ranks_at_large_sizes() -> None:
    large = [ring_all_reduce(16 << 30, cluster(*[1] * n)) for n in (8, 64, 512)]
    assert max(large) / min(large) < 1.16  # 2 (N - 1) / N: 1.75 to 2
    small = [ring_all_reduce(1024, cluster(*[1] * n)) for n in (8, 64, 512)]
    assert small[1] / small[0] == pytest.approx(63 / 7, rel=0.01)
    assert small[2] / small[1] == pytest.approx(511 / 63, rel=0.01)


@pytest.mark.parametrize("hosts", [2, 3, 16])
def test_the_wire_bounds_a_large_all_reduce(hosts: int) -> None:
    nbytes = 512 * MIB
    seconds = collective("all_reduce", nbytes, cluster(*[4] * hosts)).seconds
    wire = 2 * (hosts - 1) / hosts * nbytes / 1e9
    assert wire <= seconds <= 1.1 * wire


def test_a_flat_ring_sends_more_of_a_host_than_its_carriers_do() -> None:
    """1.5 times at 2 hosts of 2 ranks, 1.75 times at 2 of 4."""
    for ranks, more in ((2, 1.5), (4, 1.75)):
        both = cluster(ranks, ranks)
        ours = collective("all_reduce", 512 * MIB, both).seconds
        assert ring_all_reduce(512 * MIB, both) / ours == pytest.approx(more, rel=0.05)


@pytest.mark.parametrize("op", COLLECTIVES)
def test_every_collective_takes_longer_on_more_hosts(op: str) -> None:
    times = [collective(op, 64 * 1024, cluster(*[8] * hosts)).seconds for hosts in (1, 2, 8, 2048)]
    assert times == sorted(times)
    assert times[0] > 0


def test_the_taken_way_is_told_first() -> None:
    listed = ways("all_reduce", 1 << 20, cluster(2, 2))
    assert len(listed) > 2
    assert len(set(listed)) == len(listed)
    assert listed[0] == min(listed, key=lambda forecast: forecast.seconds)
    assert collective("all_reduce", 1 << 20, cluster(2, 2)) == listed[0]


def test_leaders_are_taken_though_another_way_is_a_little_quicker() -> None:
    hosts = cluster(2, 2)
    leaders, carriers = ways("all_reduce", 64 * 1024, hosts)
    factor = 0.98 * leaders.seconds / carriers.seconds
    close = replace(hosts, wire=replace(hosts.wire, by_carriers=(factor,) * 8))
    first, second = ways("all_reduce", 64 * 1024, close)
    assert first == leaders
    assert second.seconds == pytest.approx(0.98 * leaders.seconds)


def test_corrections_of_measured_hosts_count() -> None:
    plain = cluster(2, 2)
    twice = (1.0, 2.0, *[1.0] * 6)  # at 1 KiB, but not at 4
    measured = replace(plain.wire, by_leaders=twice, by_carriers=twice)
    assert Wire.of(measured.numbers()).numbers() == pytest.approx(measured.numbers())
    slower = replace(plain, wire=measured)
    for nbytes, factor in ((1 << 10, 2.0), (4 << 10, 1.0)):
        seconds = collective("all_reduce", nbytes, slower).seconds
        assert seconds == pytest.approx(factor * collective("all_reduce", nbytes, plain).seconds)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("op", ["all_rduce", "send", "recv"])
def test_what_is_no_collective_is_refused(op: str, hosts: int) -> None:
    with pytest.raises(ValueError, match=f"'{op}' is no collective: choose from all_reduce, .*r$"):
        collective(op, 1, cluster(*[2] * hosts))


def test_a_barrier_is_predicted_once_and_has_no_size(tmp_path: Path) -> None:
    figures, picture = tmp_path / "found.json", tmp_path / "found.svg"
    code, output = run("--op", "barrier", "--json", str(figures), "--plot", str(picture))
    assert code == 0, output
    assert "KiB" not in output
    assert " 0 B" not in picture.read_text() + output
    (line,) = json.loads(figures.read_text())["lines"]
    assert list(line["by_size"]) == ["0"]


def test_a_step_without_work_is_its_buckets_in_turn() -> None:
    both = cluster(2, 2)
    training = Training(gradients=60 * MIB, bucket=25 * MIB, forward=0.0, backward=0.0)
    full = collective("all_reduce", 25 * MIB, both).seconds
    rest = collective("all_reduce", 10 * MIB, both).seconds
    assert ddp_step(training, both).seconds == pytest.approx(2 * full + rest)


def test_work_hides_what_is_reduced_meanwhile() -> None:
    training = Training(gradients=50 * MIB, bucket=25 * MIB, forward=1.0, backward=10.0)
    both = cluster(2, 2)
    last = collective("all_reduce", 25 * MIB, both).seconds
    step = ddp_step(training, both)
    assert step.seconds == pytest.approx(11.0 + last)
    assert step.efficiency == pytest.approx(11.0 / step.seconds)
    assert ddp_step(training, cluster(1)).efficiency == 1.0


@pytest.mark.parametrize("forward", [0.0, 0.01])
@pytest.mark.parametrize("backward", [0.0, 0.001, 0.05, 0.1, 100.0])
@pytest.mark.parametrize("gradients", [5, 64, 65, 100])
def test_a_step_is_the_same_bucket_for_bucket(
    forward: float, backward: float, gradients: int
) -> None:
    both, bucket = cluster(2, 2), 8 * MIB
    training = Training(gradients * MIB, bucket, forward, backward)
    end, ready = forward, 0
    while ready < training.gradients:
        nbytes = min(bucket, training.gradients - ready)
        ready += nbytes
        there = forward + backward * ready / training.gradients
        end = max(end, there) + collective("all_reduce", nbytes, both).seconds
    assert ddp_step(training, both).seconds == pytest.approx(end)


def test_many_buckets_take_no_time_to_predict() -> None:
    both, gradients = cluster(2, 2), 1 << 50
    step = ddp_step(Training(gradients, bucket=1), both)
    assert step.seconds > gradients * collective("all_reduce", 1, both).seconds


def test_hosts_double_up_to_the_ranks_asked_for() -> None:
    assert host_counts(cluster(8, 8), 16_384) == [2**n for n in range(12)]
    assert host_counts(cluster(3, 3), 20) == [1, 2, 4]
    for wrong in (2, 16_385):
        with pytest.raises(ValueError, match="ranks, got"):
            host_counts(cluster(8), wrong)


def test_hosts_that_are_not_alike_do_not_double(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("ranks_on_hosts = [4, 2]\n")
    assert run("--cluster", str(path))[0] == 0
    code, output = run("--cluster", str(path), "--up-to", "64")
    assert code == 2
    assert "a cluster grows by hosts that are alike" in output


def test_large_clusters_are_predicted() -> None:
    training = Training(gradients=100 * MIB)
    lines = scaling("all_reduce", [1024, 64 * MIB], cluster(8), 16_384, training)
    assert [line.ranks for line in lines] == [8 * 2**n for n in range(12)]
    for line in lines:
        assert line.step is not None
        assert 0 < line.step.efficiency <= 1


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(commands, ["simulate", *words])
    return done.exit_code, done.output


def test_people_get_a_table_a_picture_and_figures(tmp_path: Path) -> None:
    figures, picture = tmp_path / "found.json", tmp_path / "found.png"
    code, output = run(
        "--up-to", "64", "--gradients", "100MiB", "--json", str(figures), "--plot", str(picture)
    )
    assert code == 0, output
    assert "efficiency" in output
    assert picture.stat().st_size > 10_000
    found = json.loads(figures.read_text())
    assert [line["ranks"] for line in found["lines"]] == [8, 16, 32, 64]
    assert set(found["lines"][1]["by_size"]) == {"1024", "1048576", "67108864"}


@pytest.mark.parametrize("name", ["x.xyz", "x.pgf", "picture"])
def test_a_picture_that_cannot_be_written_is_told_before_all_else(
    tmp_path: Path, name: str
) -> None:
    code, output = run("--plot", str(tmp_path / name))
    assert code == 2
    assert "a picture ends in" in output
    assert "predicted" not in output
    assert not list(tmp_path.iterdir())


def test_a_cluster_is_described_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("hosts = 2\n")
    code, output = run("--cluster", str(path), "--ranks-per-host", "3")
    assert code == 2
    assert "--cluster describes the whole cluster" in output


def test_figures_do_not_go_into_a_folder(tmp_path: Path) -> None:
    code, output = run("--json", str(tmp_path))
    assert code == 2
    assert "expected the path of a file" in output


@pytest.mark.parametrize("option", ["--plot", "--json"])
def test_a_folder_that_is_not_there_is_told_before_all_else(tmp_path: Path, option: str) -> None:
    code, output = run(option, str(tmp_path / "none" / "found.svg"))
    assert code == 2
    assert "there is no folder" in output
    assert "predicted" not in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--op", "all_rduce"), "all_rduce"),
        (("--op", "send"), "is no collective"),
        (("--sizes", "many"), "is not a size"),
        (("--latency-between", "soon"), "is not a time"),
        (("--forward", "-1ms"), "'-1ms' is not a time"),
        (("--up-to", "1"), "ranks, got 1"),
        (("--sizes", "1KiB,99999999999GiB"), "got '99999999999GiB'"),
        (("--gradients", "262145GiB"), "up to 262144 GiB"),
        (("--hosts", "9" * 22), "up to 16,384 ranks"),
        (("--hosts", "4", "--ranks-per-host", "4097"), "up to 16,384 ranks"),
    ],
)
def test_what_cannot_be_predicted_is_said(words: tuple[str, ...], said: str) -> None:
    code, output = run(*words)
    assert code == 2
    assert said in output
