"""``dreamcomm doctor``: what it finds here, and on machines where something is amiss."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistNetworkError
from typer.testing import CliRunner

from dreamcomm import _build_info, backend
from dreamcomm._torch.gloo_nccl import make_inner
from dreamcomm.backend import Options
from dreamcomm.launch import parent
from dreamcomm.tools import doctor
from dreamcomm.tools.cli.commands import commands
from dreamcomm.tools.doctor import (
    Finding,
    Severity,
    control_groups,
    gpus,
    installation,
    machine,
    namespaces,
    ranks,
)


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(1, "Operation not permitted")


def examined_where(call: str, error: int) -> dict[str, Finding]:
    """What the doctor says in a process that the system refuses a call."""
    program = (
        "import sys; from helpers.seccomp import refuse; from dreamcomm.tools.cli import app\n"
        "refuse(sys.argv.pop(1), int(sys.argv.pop(1))); app()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, call, str(error), "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    findings = [Finding(**one) for one in json.loads(done.stdout)]
    return {one.about: replace(one, state=Severity(one.state)) for one in findings}


def test_here_all_is_well() -> None:
    done = CliRunner().invoke(commands, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = {finding["about"]: finding for finding in json.loads(done.output)}
    assert len(found) == 18
    assert {finding["state"] for finding in found.values()} <= {"fine", "note"}
    assert "2 ranks" in found["two ranks"]["found"]
    assert "1 + 1 = 2" in found["two ranks"]["found"]


def test_ranks_of_one_host_share_memory() -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*run, "--no-python", str(Path(sys.executable).with_name("dreamcomm")), "doctor"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=tempfile.gettempdir()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"fine  hosts: .*2 ranks", done.stdout), done.stdout


def test_people_get_a_line_for_each_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding("cellar", Severity.FINE, "dry [really]"),
        Finding("roof", Severity.FALLS_BACK, "leaks", "rain comes in"),
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
    assert found.state is Severity.FALLS_BACK
    assert "Operation not permitted" in found.found
    assert "Gloo" in found.meaning


@pytest.mark.parametrize("error", [errno.EPERM, pytest.param(errno.ENOSYS, marks=pytest.mark.long)])
def test_where_no_memory_can_be_made_the_doctor_says_what_happens(error: int) -> None:
    found = examined_where("memfd_create", error)
    for about in ("shared memory", "two ranks"):
        assert found[about].state is Severity.FALLS_BACK
        assert os.strerror(error) in found[about].found
    assert found["two ranks"].found.startswith("gloo")
    assert Severity.BROKEN not in {one.state for one in found.values()}


@pytest.mark.parametrize(("bytes_of_a_file", "state"), [(1 << 20, "falls back"), (1 << 30, "note")])
def test_a_limit_of_the_size_of_files_is_one_of_shared_memory(
    monkeypatch: pytest.MonkeyPatch, bytes_of_a_file: int, state: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (bytes_of_a_file, bytes_of_a_file))
    found = machine.shared_memory()
    assert found.state.value == state
    assert "ulimit -f" in found.found


def test_descriptors_that_do_not_arrive_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "recv_fds", lambda *_: (b"x", [], 0, None))
    found = machine.descriptors()
    assert found.state is Severity.FALLS_BACK
    assert "Gloo" in found.meaning


@pytest.mark.long
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_ranks_are_watched_where_no_pidfd_is_given(error: int) -> None:
    found = examined_where("pidfd_open", error)
    assert found["watching processes"].state is Severity.NOTE
    assert os.strerror(error) in found["watching processes"].found
    assert found["two ranks"].state is Severity.FINE


def test_limits_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    assert machine.open_files().state is Severity.NOTE
    assert "DREAMCOMM_HEAP_BYTES" in machine.address_space().meaning


def test_a_control_groups_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "least_memory", lambda: (64 << 20, Path("/sys/fs/cgroup/job")))
    found = machine.memory()
    assert found.state is Severity.NOTE
    assert found.found.startswith("64 MiB of")
    assert found.found.endswith("by the control group /sys/fs/cgroup/job")


@pytest.mark.parametrize(
    ("membership", "limits", "least"),
    [
        ("0::/slurm/job_7/step_0", {"slurm/job_7/memory.max": "500"}, (500, "slurm/job_7")),
        ("0::/a/b", {"memory.max": "900", "a/b/memory.max": "max"}, (900, "")),
        ("0::/a/b", {"a/memory.max": "300", "a/b/memory.max": "400"}, (300, "a")),
        (
            "4:memory,hugetlb:/job\n1:cpu:/other",
            {"memory,hugetlb/job/memory.limit_in_bytes": "70"},
            (70, "memory,hugetlb/job"),
        ),
        ("1:cpu:/a\n0::/", {"cpu/a/memory.max": "5"}, None),
        ("0::/../elsewhere", {}, None),
    ],
)
def test_limits_of_memory_are_found_at_every_level(
    tmp_path: Path, membership: str, limits: dict[str, str], least: tuple[int, str] | None
) -> None:
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "membership").write_text(f"{membership}\n")
    found = control_groups.least_memory(tmp_path / "membership", tmp_path)
    assert found == (None if least is None else (least[0], tmp_path / least[1]))


def test_namespaces_of_their_own_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {"net": "net:[1]", "pid": "pid:[2]", "user": "user:[4026531837]"}
    monkeypatch.setattr(os, "readlink", lambda path: links[path.rsplit("/", 1)[1]])
    monkeypatch.setattr(Path, "exists", lambda _: False)
    found = namespaces.namespaces()
    assert found.state is Severity.NOTE
    assert found.found == f"net:[1], pid:[2], user:[4026531837], user {os.getuid()}"
    assert "do not show in dreamcomm top" in found.meaning
    assert "another user's" not in found.meaning


def of_gpus(monkeypatch: pytest.MonkeyPatch, apart: set[frozenset[int]], count: int = 3) -> Finding:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda a, b: frozenset((a, b)) not in apart
    )
    return gpus.peers()


def test_gpus_that_cannot_read_each_other_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DREAMCOMM_CUDA", raising=False)
    assert of_gpus(monkeypatch, set(), 1) == Finding("GPU peers", Severity.FINE, "one device")
    assert of_gpus(monkeypatch, set()).state is Severity.FINE
    found = of_gpus(monkeypatch, {frozenset((0, 2))})
    assert found.state is Severity.NOTE
    assert found.found.endswith(": 0 and 2")
    monkeypatch.setenv("DREAMCOMM_CUDA", "dreamcomm")
    assert of_gpus(monkeypatch, {frozenset((0, 2))}).state is Severity.FALLS_BACK


@pytest.mark.parametrize(
    ("chosen", "version", "meaning"),
    [
        ("nccl", 13000, "go to torch's NCCL, or by this library's kernels with"),
        ("dreamcomm", 13000, "go by this library's kernels, as DREAMCOMM_CUDA says"),
        ("dreamcomm", 0, "DREAMCOMM_CUDA=dreamcomm has no effect"),
    ],
)
def test_what_carries_tensors_on_gpus_is_told(
    monkeypatch: pytest.MonkeyPatch, chosen: str, version: int, meaning: str
) -> None:
    from dreamcomm import _C

    monkeypatch.setenv("DREAMCOMM_CUDA", chosen)
    monkeypatch.setattr(_C, "cuda_devices", lambda: (2, ""))
    monkeypatch.setattr(_C, "cuda_runtime_version", lambda: version)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert meaning in gpus.cuda().meaning


def test_a_cache_that_cannot_be_written_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.costs() == Finding("kept costs", Severity.FINE, str(tmp_path / "dreamcomm"))
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    found = machine.costs()
    assert found.state is Severity.NOTE
    assert found.found == f"{tmp_path} cannot be written"


def test_a_host_without_an_address_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", refuse)
    assert "GLOO_SOCKET_IFNAME" in machine.gloo().meaning


def test_a_host_name_that_is_too_long_for_an_address_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 64)
    found = machine.gloo()
    assert found.state is Severity.NOTE
    assert found.found.startswith("h" * 64 + ": ")
    assert "GLOO_SOCKET_IFNAME" in found.meaning


@pytest.mark.parametrize(("chosen", "state"), [("lo", Severity.NOTE), ("lo,nope", Severity.BROKEN)])
def test_the_devices_that_gloo_is_told_to_use_must_be_there(
    monkeypatch: pytest.MonkeyPatch, chosen: str, state: Severity
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    found = machine.gloo()
    assert found.state is state
    assert ("there is no nope here" in found.meaning) == (state is Severity.BROKEN)
    if state is Severity.BROKEN:
        with pytest.raises(RuntimeError, match=r"rank 1: .*'nope' of GLOO_SOCKET_IFNAME.* lo"):
            make_inner(HashStore(), 1, 2, Options(), "cpu")


def without_loopback(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python where the device lo is down."""
    alone = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespace can be made here")
    return subprocess.run(
        [*alone, sys.executable, *words], capture_output=True, text=True, timeout=60
    )


def test_a_host_that_cannot_reach_itself_is_told() -> None:
    done = without_loopback("-c", "from dreamcomm.tools.cli import app; app()", "doctor", "--json")
    assert done.returncode == 1, done.stderr
    *_, last = json.loads(done.stdout)  # two ranks would not meet
    assert (last["about"], last["state"]) == ("loopback", "broken")
    assert last["meaning"].startswith("127.0.0.1 cannot be reached over TCP")
    assert "ip link set lo up" in last["meaning"]


def test_spawn_tells_of_a_host_that_cannot_reach_itself() -> None:
    done = without_loopback("-c", "import dreamcomm; dreamcomm.spawn(print, 2)")
    assert done.returncode == 1
    assert "\nConnectionError: 127.0.0.1 cannot be reached over TCP" in done.stderr
    assert "ip link set lo up" in done.stderr


def test_a_store_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a firewall lets the one connection through and not the next."""
    patience = []

    def store(*_: Any, timeout: timedelta, **__: Any) -> Any:
        patience.append(timeout.total_seconds())
        raise DistNetworkError("timed out")

    monkeypatch.setattr(_distributed_c10d, "TCPStore", store)
    found = ranks.two_ranks()
    assert found.state is Severity.BROKEN
    assert found.meaning.startswith("127.0.0.1 cannot be reached over TCP")
    assert patience == [10.0]


def test_the_time_for_the_connection_is_not_that_of_later_waits() -> None:
    assert parent.host_store().timeout == timedelta(minutes=5)


def test_ranks_that_share_no_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DREAMCOMM_SHARED_MEMORY", "0")
    found = ranks.two_ranks()
    assert found.state is Severity.FALLS_BACK
    assert found.found.startswith("gloo")


def test_a_rank_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DREAMCOMM_PAGE_BYTES", "1")
    found = ranks.two_ranks()
    assert found.state is Severity.BROKEN
    assert found.meaning.startswith("rank ")
    assert "raised ValueError: dreamcomm.Options: expected page_bytes from" in found.meaning
    assert "\n" not in found.meaning


def test_hosts_of_a_larger_job_are_not_those_of_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DREAMCOMM_HOSTS", "a,b,c")
    found = ranks.two_ranks()
    assert found.state is Severity.FINE, found


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
    assert found.state is Severity.BROKEN
    assert found.found == f"{variable}={text}"
    assert meaning in found.meaning


@pytest.mark.parametrize(
    ("given", "gpus", "state", "text"),
    [
        (None, 0, Severity.FINE, "from shared memory"),
        ("0", 2, Severity.FINE, "from shared memory"),
        (None, 2, Severity.NOTE, "DDP_DISABLE_COMM_MEM is not set"),
        ("1", 0, Severity.NOTE, "DDP_DISABLE_COMM_MEM is 1"),
    ],
)
def test_where_the_buckets_of_ddp_lie_is_told(
    monkeypatch: pytest.MonkeyPatch, given: str | None, gpus: int, state: Severity, text: str
) -> None:
    monkeypatch.delenv("DDP_DISABLE_COMM_MEM", raising=False)
    if given is not None:
        monkeypatch.setenv("DDP_DISABLE_COMM_MEM", given)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    found = installation.buckets()
    assert found.state is state
    assert text in found.found
    assert ("NCCL" in found.meaning) == (gpus > 0 and state is Severity.NOTE)


def test_settings_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DREAMCOMM_")]:
        monkeypatch.delenv(name)
    assert installation.settings().state is Severity.FINE
    monkeypatch.setenv("DREAMCOMM_LOG", "1")
    monkeypatch.setenv("DREAMCOMM_COSTS", "fixed")
    found = installation.settings()
    assert found.state is Severity.NOTE
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
    assert found.state is Severity.NOTE
    assert meaning in found.meaning


def test_a_folder_that_no_flight_record_can_go_to_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DREAMCOMM_LOG", "1")
    monkeypatch.setenv("DREAMCOMM_FLIGHT_RECORD", str(tmp_path / "to" / "make" / "fr"))
    assert "no file can be written" not in installation.settings().meaning
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("DREAMCOMM_FLIGHT_RECORD", str(folder / "fr"))
        assert f"no file can be written in {folder}" in installation.settings().meaning
