"""``dreamcomm doctor``: what it finds here, and on machines where something is amiss."""

from __future__ import annotations

import json
import os
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dreamcomm import _build_info, doctor
from dreamcomm.cli.commands import commands
from dreamcomm.doctor import Finding, State


def refuse(*_: Any) -> Any:
    raise OSError(1, "Operation not permitted")


def test_here_all_is_well() -> None:
    done = CliRunner().invoke(commands, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = {finding["about"]: finding for finding in json.loads(done.output)}
    assert len(found) == 12
    assert {finding["state"] for finding in found.values()} <= {"fine", "note"}
    assert "2 ranks" in found["two ranks"]["found"]
    assert "1 + 1 = 2" in found["two ranks"]["found"]


def test_people_get_a_line_for_each_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding("cellar", State.FINE, "dry [really]"),
        Finding("roof", State.FALLS_BACK, "leaks", "rain comes in"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings))
    done = CliRunner().invoke(commands, ["doctor"])
    assert done.exit_code == 0
    lines = [line.rstrip() for line in done.output.splitlines()]
    assert lines == [
        "      fine  cellar: dry [really]",
        "falls back  roof: leaks",
        "            rain comes in",
    ]


def test_what_is_broken_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build_info, "TORCH_VERSION", "2.0.1")
    done = CliRunner().invoke(commands, ["doctor", "--json"])
    assert done.exit_code == 1
    first, *others = json.loads(done.output)
    assert first["state"] == "broken"
    assert "dreamcomm was built for torch 2.0.1" in first["meaning"]
    # What needs no compiled module is looked at all the same.
    assert {"shared memory", "open files"} <= {finding["about"] for finding in others}
    assert "two ranks" not in {finding["about"] for finding in others}


def test_no_memfd_falls_back_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse)
    found = doctor.shared_memory()
    assert found.state is State.FALLS_BACK
    assert "Operation not permitted" in found.found
    assert "Gloo" in found.meaning


def test_descriptors_that_do_not_arrive_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "recv_fds", lambda *_: (b"x", [], 0, None))
    found = doctor.descriptors()
    assert found.state is State.FALLS_BACK
    assert "Gloo" in found.meaning


def test_limits_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    assert doctor.open_files().state is State.NOTE
    assert "DREAMCOMM_HEAP_BYTES" in doctor.address_space().meaning


def test_a_control_groups_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_number", lambda _: 64 << 20)
    found = doctor.memory()
    assert found.state is State.NOTE
    assert found.found.startswith("64 MiB of")


def test_a_cache_that_cannot_be_written_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert doctor.costs() == Finding("kept costs", State.FINE, str(tmp_path / "dreamcomm"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = doctor.costs()
    assert found.state is State.NOTE
    assert found.found == f"{tmp_path} cannot be written"


def test_a_host_without_an_address_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", refuse)
    assert "GLOO_SOCKET_IFNAME" in doctor.gloo().meaning


def test_ranks_that_share_no_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DREAMCOMM_SHARED_MEMORY", "0")
    found = doctor.two_ranks()
    assert found.state is State.FALLS_BACK
    assert found.found.startswith("gloo")


def test_a_rank_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DREAMCOMM_PAGE_BYTES", "1")
    found = doctor.two_ranks()
    assert found.state is State.BROKEN
    assert "page_bytes" in found.meaning
