"""The job is read from the variables of each launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile

import pytest

from dreamcomm.arrays import environment
from dreamcomm.arrays.environment import Job, read_job

PRINT_FILE = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("environment", {environment.__file__!r})
module = importlib.util.module_from_spec(spec)
sys.modules["environment"] = module
spec.loader.exec_module(module)
print(module.read_job().init_method)
"""
# Each launcher has started ranks on two hosts, except Hydra.
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911",
    "OMPI_MCA_orte_local_daemon_uri": "1531576320.1;tcp://10.96.0.2:41111",
    "PMIX_NAMESPACE": "1531576321",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PRTE_LAUNCHED": "1",
    "PMIX_NAMESPACE": "prterun-gpu-18.cluster-12345@1",
    "PMIX_RANK": "3",
    "PMIX_SERVER_URI41": "prterun-gpu-18.cluster-12345@0.1;tcp4://127.0.0.1:45678",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
SLURM = {
    "SLURM_JOB_ID": "70000",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[003-004]",
    "SLURM_JOB_NODELIST": "n[001-004]",
    "SLURMD_NODENAME": "n004",
}
# What a batch script sees: Slurm has started it once.
BATCH = {
    "SLURM_JOB_ID": "70000",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "n[001-002]",
    "SLURMD_NODENAME": "n001",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def method(*variables: dict[str, str], without: tuple[str, ...] = (), **more: str) -> str:
    given: dict[str, str] = {}
    for one in (*variables, more):
        given |= one
    return read_job({name: given[name] for name in given if name not in without}).init_method


def slurm_port(job: int, step: int = 0) -> int:
    return 61440 + (job + 509 * step) % 4096


def test_torchrun() -> None:
    assert read_job(TORCHRUN) == Job(5, 8, 1, 4, "torchrun", "env://")
    few = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", *MASTER)}
    assert read_job(few) == Job(5, 8, None, None, "torchrun", "env://")


def test_open_mpi_4() -> None:
    port = 61440 + 1531576320 // 2**16 % 4096
    assert read_job(OPEN_MPI_4) == Job(3, 4, 1, 2, "Open MPI", f"tcp://10.96.0.1:{port}")


def test_open_mpi_5() -> None:
    address = f"tcp://gpu-18.cluster:{61440 + 12345 % 4096}"
    assert read_job(OPEN_MPI_5) == Job(3, 4, 1, 2, "Open MPI", address)


def test_hydra() -> None:
    job = read_job(HYDRA)
    assert (job.rank, job.size, job.local_rank, job.local_size) == (1, 2, 1, 2)
    assert job.launcher == "PMI (MPICH, Intel MPI)"
    folder = re.escape(tempfile.gettempdir())
    assert re.fullmatch(rf"file://{folder}/dreamcomm-{os.getuid()}-[0-9]+-[0-9]+", job.init_method)


def test_slurm() -> None:
    address = f"tcp://n003:{slurm_port(70000)}"
    assert read_job(SLURM) == Job(3, 4, 1, None, "Slurm", address)


def test_one_process() -> None:
    job = read_job({"PATH": "/bin", "SLURM_NTASKS": "4", "WORLD_SIZE": "1", "RANK": ""})
    assert job == Job(0, 1, 0, 1, "one process", job.init_method)
    other = read_job({}).init_method
    assert other != job.init_method
    assert other.startswith(f"file://{tempfile.gettempdir()}/dreamcomm-{os.getuid()}-")
    assert not os.path.exists(other.removeprefix("file://"))


def test_the_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read_job().rank == 5


@pytest.mark.parametrize(
    ("variables", "launcher", "rank"),
    [
        ([TORCHRUN, OPEN_MPI_4, HYDRA, SLURM], "torchrun", 5),
        ([OPEN_MPI_4, HYDRA, BATCH], "Open MPI", 3),
        ([HYDRA, BATCH], "PMI (MPICH, Intel MPI)", 1),
        # Hydra has started its proxies with srun.
        ([HYDRA, SLURM], "PMI (MPICH, Intel MPI)", 1),
        # An MPI rank of a step that srun has started, by its plugins of PMI2 and PMIx.
        ([SLURM, {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"}], "Slurm", 3),
        ([SLURM, {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.70000.0"}], "Slurm", 3),
        ([{"PMIX_RANK": "1", "WORLD_SIZE": "2"}, MASTER], "PMIx", 1),
        # Job scripts export it, and leave RANK to the launcher.
        ([SLURM, {"WORLD_SIZE": "4"}], "Slurm", 3),
    ],
)
def test_precedence(variables: list[dict[str, str]], launcher: str, rank: int) -> None:
    job = read_job({name: value for one in variables for name, value in one.items()})
    assert (job.launcher, job.rank) == (launcher, rank)


@pytest.mark.parametrize("launcher", [OPEN_MPI_4, OPEN_MPI_5, HYDRA, SLURM, BATCH])
def test_the_master_variables_count_first(launcher: dict[str, str]) -> None:
    assert method(launcher, MASTER) == "tcp://10.0.0.1:29500"
    assert method(launcher, MASTER, MASTER_ADDR="fd00::1") == "tcp://[fd00::1]:29500"
    with pytest.raises(ValueError, match=r"^MASTER_ADDR=n1 is set, and MASTER_PORT is not$"):
        method(launcher, MASTER_ADDR="n1")
    with pytest.raises(ValueError, match=r"^MASTER_PORT=1 is set, and MASTER_ADDR is not$"):
        method(launcher, MASTER_PORT="1")


@pytest.mark.parametrize(
    ("uri", "host"),
    [
        ("655360.0;tcp://10.96.0.1:34911", "10.96.0.1"),
        ("655360.0;tcp://127.0.0.1,10.148.0.1:34911", "10.148.0.1"),
        ("655360.0;tcp://172.20.102.82:33559;tcp://172.40.102.82:33559", "172.20.102.82"),
        ("655360.0;usock;tcp://192.168.0.103:56672", "192.168.0.103"),
        ("655360.0;tcp6://[fe80::b9b:ac5d,2620:10d::3000:2]:43370", "[2620:10d::3000:2]"),
        ("655360.0;tcp://169.254.1.2:1;tcp6://[::1,fd00::2]:2", "[fd00::2]"),
    ],
)
def test_addresses_of_open_mpi(uri: str, host: str) -> None:
    daemon = ("OMPI_MCA_orte_local_daemon_uri",)
    assert method(OPEN_MPI_4, OMPI_MCA_orte_hnp_uri=uri) == f"tcp://{host}:61450"
    assert method(OPEN_MPI_4, without=daemon, OMPI_MCA_orte_hnp_uri=uri).startswith("tcp://")


def test_jobs_have_ports_of_their_own() -> None:
    uris = [f"{job * 2**16}.0;tcp://10.0.0.1:1" for job in range(4096)]
    assert len({method(OPEN_MPI_4, OMPI_MCA_orte_hnp_uri=uri) for uri in uris}) == 4096
    names = [f"prterun-n1-{pid}@{job}" for pid in range(500, 900) for job in (1, 2)]
    assert len({method(OPEN_MPI_5, PMIX_NAMESPACE=name) for name in names}) == 800
    steps = [(job, step) for job in range(500) for step in range(4)]
    found = {method(SLURM, SLURM_JOB_ID=str(j), SLURM_STEP_ID=str(s)) for j, s in steps}
    assert len(found) == 2000


@pytest.mark.parametrize(
    "variables",
    [
        OPEN_MPI_4 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        SLURM | {"SLURM_STEP_NUM_NODES": "1"},
    ],
)
def test_one_host_uses_its_own_address(variables: dict[str, str]) -> None:
    job = read_job(variables)
    assert job.local_size == job.size
    assert job.init_method.startswith("tcp://127.0.0.1:6")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu001", "gpu001"),
        ("gpu001,m2", "gpu001"),
        ("n[003-005,9],m1", "n003"),
        ("n[9,003-005]", "n9"),
        ("node-[1-2].cluster", "node-1.cluster"),
        ("rack[2-3]-n[07-08]-x,m1", "rack2-n07-x"),
        ("m1,n[003-005]", "m1"),
        ("a-1.b,c", "a-1.b"),
    ],
)
def test_node_lists(nodes: str, host: str) -> None:
    expected = f"tcp://{host}:{slurm_port(70000)}"
    assert method(SLURM, SLURM_STEP_NODELIST=nodes) == expected
    without = ("SLURM_STEP_NODELIST",)
    assert method(SLURM, SLURM_JOB_NODELIST=nodes, without=without) == expected


@pytest.mark.parametrize("nodes", ["n[003-005", "n[]", "[a-b]", ",n1", "n1 n2", "n]1"])
def test_malformed_node_lists(nodes: str) -> None:
    text = f"SLURM_STEP_NODELIST={nodes} is no list of nodes"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        method(SLURM, SLURM_STEP_NODELIST=nodes)


def test_a_slurm_step_counts_before_its_job() -> None:
    interactive = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    job = read_job(interactive)
    assert (job.rank, job.size) == (0, 1)
    assert job.init_method.startswith("file://")
    assert read_job({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"} | MASTER).size == 2


@pytest.mark.parametrize(
    ("variables", "texts"),
    [
        (
            {name: SLURM[name] for name in SLURM if name != "SLURM_JOB_ID"},
            ["Slurm started", "Found: SLURM_PROCID=3, SLURM_", "SLURM_JOB_ID; or MASTER_ADDR"],
        ),
        (BATCH, ["Slurm started", "Missing: SLURM_STEP_ID (a batch script runs once; srun"]),
        (SLURM | {"SLURM_PROCID": "0"}, ["rank 0 does not run on n003", "SLURMD_NODENAME=n004"]),
        (OPEN_MPI_4 | {"OMPI_COMM_WORLD_RANK": "0"}, ["rank 0 does not run on 10.96.0.1"]),
        (OPEN_MPI_5 | {"OMPI_COMM_WORLD_RANK": "0"}, ["rank 0 does not run on gpu-18.cluster"]),
        (
            OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": "65536.0;tcp://127.0.0.1:1"},
            ["Missing: an address in OMPI_MCA_orte_hnp_uri that other hosts can reach"],
        ),
        (
            OPEN_MPI_5 | {"PMIX_NAMESPACE": "mine"},
            ["Open MPI started", "PMIX_NAMESPACE=mine", "Missing: OMPI_MCA_orte_hnp_uri or PMIX"],
        ),
        (
            HYDRA | {"PMI_SIZE": "4"},
            ["PMI_RANK=1, PMI_SIZE=4", "Missing: MASTER_ADDR, MASTER_PORT. Set MASTER_ADDR and"],
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["Missing: MPI_LOCALNRANKS"]),
        ({"PMI_ID": "1", "PMI_PORT": "n1:5"}, ["PMI_ID=1, PMI_PORT=n1:5", "Missing: PMI_SIZE"]),
        ({"RANK": "1"}, ["torchrun started", "Found: RANK=1", "WORLD_SIZE", "Set RANK, WORLD"]),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["torchrun started", "Missing: ", "MASTER_PORT"]),
        ({"RANK": "1", "WORLD_SIZE": ""} | MASTER, ["MASTER_ADDR=10.0.0.1", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2 is set, and RANK is not"]),
        ({"OMPI_COMM_WORLD_RANK": "1"}, ["Open MPI started", "Missing: OMPI_COMM_WORLD_SIZE"]),
        ({"PMIX_RANK": "1"}, ["PMIx started", "Missing: WORLD_SIZE"]),
    ],
)
def test_missing_variables(variables: dict[str, str], texts: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(texts[0])) as error:
        read_job(variables)
    for text in texts:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (TORCHRUN | {"RANK": "x"}, "RANK=x is no number"),
        (TORCHRUN | {"RANK": "-1"}, "RANK=-1 is no number"),
        (TORCHRUN | {"WORLD_SIZE": "2.0"}, "WORLD_SIZE=2.0 is no number"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 is out of range for 8 ranks"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 is out of range for 4 ranks"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is out of range for 8 ranks"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 is out of range for 8 ranks"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT=http is no number"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is no port"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0 is no port"),
        (
            OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": "x;tcp://10.0.0.1:1"},
            "OMPI_MCA_orte_hnp_uri=x;tcp://10.0.0.1:1 is no URI of an mpirun",
        ),
        (HYDRA | {"PMI_RANK": "2"}, "PMI_RANK=2 is out of range for 2 ranks"),
        (SLURM | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 is out of range for 4 ranks"),
        (SLURM | {"SLURM_JOB_ID": "7a"}, "SLURM_JOB_ID=7a is no number"),
        (SLURM | {"SLURM_LOCALID": "4"}, "SLURM_LOCALID=4 is out of range for 4 ranks"),
    ],
)
def test_malformed_variables(variables: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        read_job(variables)


@pytest.mark.parametrize(
    "launcher",
    [
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_one_rank_needs_no_address(launcher: dict[str, str]) -> None:
    first, second = method(launcher), method(launcher)
    assert first.startswith("file://")
    assert first != second


def start_ranks(count: int = 2) -> list[str]:
    """The files of the ranks of one job. A shell is between the launcher and all but rank 0."""
    # `exit` keeps the shell from running Python in its own process.
    wrapped = 'unset PMI_FD; "$@"; exit $?'
    launcher = f"""
import os, subprocess, sys
for rank in range({count}):
    own = {{"PMI_RANK": str(rank), "PMI_SIZE": "{count}", "PMI_FD": str(9 + rank)}}
    own |= {{"MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "{count}"}}
    shell = ["sh", "-c", {wrapped!r}, "sh"] if rank else []
    command = [*shell, sys.executable, "-c", {PRINT_FILE!r}]
    subprocess.run(command, env=os.environ | own, check=True)
"""
    command = [sys.executable, "-c", launcher]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.split()


def test_ranks_of_a_job_share_a_file() -> None:
    first, second = start_ranks(), start_ranks()
    assert len(first) == len(second) == 2
    assert first[0].startswith("file://")
    assert len(set(first)) == 1
    assert len(set(second)) == 1
    assert first[0] != second[0]


def test_a_container_hides_who_started_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 0)
    with pytest.raises(ValueError, match="the address of rank 0 is not known"):
        read_job(HYDRA)
