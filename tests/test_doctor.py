"""``dreamcomm doctor``: what it finds here, and on machines where something is amiss."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from typer.testing import CliRunner

from dreamcomm import _build_info, backend, doctor
from dreamcomm.backend import Options
from dreamcomm.cli.commands import commands
from dreamcomm.doctor import Finding, State, installation, machine, ranks
from dreamcomm.inner import make_inner


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(1, "Operation not permitted")


def test_here_all_is_well() -> None:
    done = CliRunner().invoke(commands, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = {finding["about"]: finding for finding in json.loads(done.output)}
    assert len(found) == 13
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
    found = machine.shared_memory()
    assert found.state is State.FALLS_BACK
    assert "Operation not permitted" in found.found
    assert "Gloo" in found.meaning


def test_descriptors_that_do_not_arrive_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "recv_fds", lambda *_: (b"x", [], 0, None))
    found = machine.descriptors()
    assert found.state is State.FALLS_BACK
    assert "Gloo" in found.meaning


def test_limits_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    assert machine.open_files().state is State.NOTE
    assert "DREAMCOMM_HEAP_BYTES" in machine.address_space().meaning


def test_a_control_groups_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_number", lambda _: 64 << 20)
    found = machine.memory()
    assert found.state is State.NOTE
    assert found.found.startswith("64 MiB of")


def test_a_cache_that_cannot_be_written_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.costs() == Finding("kept costs", State.FINE, str(tmp_path / "dreamcomm"))
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    found = machine.costs()
    assert found.state is State.NOTE
    assert found.found == f"{tmp_path} cannot be written"


def test_a_host_without_an_address_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", refuse)
    assert "GLOO_SOCKET_IFNAME" in machine.gloo().meaning


@pytest.mark.parametrize(("chosen", "state"), [("lo", State.NOTE), ("lo,nope", State.BROKEN)])
def test_the_devices_that_gloo_is_told_to_use_must_be_there(
    monkeypatch: pytest.MonkeyPatch, chosen: str, state: State
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    found = machine.gloo()
    assert found.state is state
    assert ("there is no nope here" in found.meaning) == (state is State.BROKEN)
    if state is State.BROKEN:
        with pytest.raises(RuntimeError, match=r"rank 1: .*'nope' of GLOO_SOCKET_IFNAME.* lo"):
            make_inner(HashStore(), 1, 2, Options(), "cpu")


def test_ranks_that_share_no_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DREAMCOMM_SHARED_MEMORY", "0")
    found = ranks.two_ranks()
    assert found.state is State.FALLS_BACK
    assert found.found.startswith("gloo")


def test_a_rank_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DREAMCOMM_PAGE_BYTES", "1")
    found = ranks.two_ranks()
    assert found.state is State.BROKEN
    assert found.meaning.startswith("rank ")
    assert "raised ValueError: dreamcomm.Options: expected page_bytes from" in found.meaning
    assert "\n" not in found.meaning


@pytest.mark.parametrize(
    ("variable", "text", "meaning"),
    [
        ("DREAMCOMM_LOG", "yes", "to be 0 or 1, got 'yes'"),
        ("DREAMCOMM_HEAP_BYTES", "much", "to be a number of bytes"),
        ("DREAMCOMM_PAGE_BYTES", "1", "expected page_bytes from"),
        ("DREAMCOMM_ALGORITHM", "best", "expected algorithm to be"),
        ("DREAMCOMM_HOSTS", "a,,b", "expected hosts to be"),
    ],
)
def test_a_setting_without_a_meaning_is_broken_and_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, meaning: str
) -> None:
    monkeypatch.setenv(variable, text)
    found = installation.settings()
    assert found.state is State.BROKEN
    assert found.found == f"{variable}={text}"
    assert meaning in found.meaning


def test_settings_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DREAMCOMM_")]:
        monkeypatch.delenv(name)
    assert installation.settings().state is State.FINE
    monkeypatch.setenv("DREAMCOMM_LOG", "1")
    monkeypatch.setenv("DREAMCOMM_COSTS", "fixed")
    found = installation.settings()
    assert found.state is State.NOTE
    assert found.found == "DREAMCOMM_COSTS=fixed, DREAMCOMM_LOG=1"


def test_after_a_bad_setting_no_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DREAMCOMM_LOG", "yes")
    done = CliRunner().invoke(commands, ["doctor"])
    assert done.exit_code == 1
    assert "broken  settings: DREAMCOMM_LOG=yes" in done.output
    assert "two ranks" not in done.output
    assert "Traceback" not in done.output


def test_an_error_is_told_without_the_way_to_it() -> None:
    first = 'Traceback (most recent call last):\n  File "a", line 1\n    a()\nKeyError: 1\n\n'
    then = "Traceback (most recent call last):\n  File\n    b()\nValueError: two\n  lines\n"
    assert ranks.last_words(f"{first}During it another\n\n{then}") == "ValueError: two\n  lines"
    assert ranks.last_words("") == ""


def test_the_doctor_knows_every_variable_that_is_read() -> None:
    sources = Path(backend.__file__).parent.rglob("*.py")
    read = re.compile(r"""["\`]DREAMCOMM_([A-Z_]+)["\`]""")
    found = {name for source in sources for name in read.findall(source.read_text())}
    assert found - {""} == set(backend.VARIABLES)


@pytest.mark.parametrize(
    ("variable", "text", "meaning"),
    [
        ("ALGORITM", "ring", "nothing reads DREAMCOMM_ALGORITM (is DREAMCOMM_ALGORITHM meant?)"),
        ("FLIGHT_RECORD", "/tmp/x", "set DREAMCOMM_LOG=1"),
    ],
)
def test_settings_without_effect_are_told(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, meaning: str
) -> None:
    monkeypatch.delenv("DREAMCOMM_LOG", raising=False)
    monkeypatch.setenv(f"DREAMCOMM_{variable}", text)
    found = installation.settings()
    assert found.state is State.NOTE
    assert meaning in found.meaning


def test_a_folder_that_no_flight_record_can_go_to_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DREAMCOMM_LOG", "1")
    monkeypatch.setenv("DREAMCOMM_FLIGHT_RECORD", str(tmp_path / "nowhere" / "fr"))
    assert f"no file can be written in {tmp_path / 'nowhere'}" in installation.settings().meaning
