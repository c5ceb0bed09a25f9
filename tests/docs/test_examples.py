"""The programs in examples/ run, and the job scripts are what their schedulers would read."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from helpers.pool import Fresh

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = str(EXAMPLES.parent / "docs" / "gradients.md")  # a short one, to train on

# What a program prints, whatever the order of its ranks' lines.
OF_TORCHRUN = {
    "ddp.py": ["step 40: loss ", "40 backward passes have reduced"],
    "fsdp2.py": ["rank 0: keeps (64, 64) of (128, 64)", "rank 1: keeps (64, 64) of (128, 64)"],
    "fully_shard.py": [
        "rank 0: keeps (64, 64) of (128, 64)",
        "rank 1: keeps (64, 64) of (128, 64)",
    ],
    "hybrid.py": [
        "step 10: loss ",
        "fully sharded over 2 ranks, with 2 replicas, one copy of the ",
    ],
    "hooks.py": ["rank 0, step 10: norm ", "rank 1: 2 residuals to save"],
    "invariant.py": ["step 20: loss "],
    "numpy_ranks.py": ["2 ranks, inertia ", "centre 4.0"],
    "pipeline.py": ["rank 0: 1F1B: 8 actions in ", "rank 3: 1F1B: 8 actions in "],
    "sync_batch_norm.py": ["step 11 loss ", ", one process "],
    "tensor_parallel.py": ["rank 0: has 128 of 256 rows", "rank 1: has 128 of 256 rows"],
    "zero.py": ["bytes of this rank ", "ZeRO stage 1, 2 ranks", "ZeRO stage 3, 2 ranks"],
}
RANKS = {"pipeline.py": 4, "hybrid.py": 4}  # of others two
STRATEGIES = ["ddp", "server", "async", "local_sgd", "diloco", "gossip"]
OF_SPAWN = {
    "data_parallel.py": ["step 11 loss ", "a step on 2 replicas "],
    "shared_tensors.py": [
        "rank 0: the sum is 3.0; 1 call ran in place",
        "rank 1: the sum is 3.0; 1 call ran in place",
    ],
    "trace.py": ["Communication of rank 0 of 2", "wrote run.json"],
}


def command_of(name: str) -> str:
    """The line of the docstring that starts the program."""
    source = (EXAMPLES / name).read_text()
    found = re.search(rf"^    ((?:python|torchrun) .*examples/{name}.*)$", source, re.M)
    assert found, f"{name} does not say how it is started"
    return found[1]


def started(name: str, folder: Path) -> str:
    """What the program prints, started as its docstring says, with this interpreter."""
    program, *arguments = command_of(name).split()
    start = ["-m", "torch.distributed.run"] if program == "torchrun" else []
    arguments = [argument.replace("examples/", f"{EXAMPLES}/") for argument in arguments]
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def as_rank(rank: int, path: str, world: int, port: int, arguments: Sequence[str] = ()) -> str:
    """What a rank of torchrun prints. Its store is the test's, as torchrun's is its own."""
    sys.argv[1:] = arguments
    sys.path.insert(0, str(Path(path).parent))  # as Python does for a program
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def as_ranks(
    fresh: Fresh, name: str, arguments: Sequence[str] = (), world: int | None = None
) -> str:
    """What the ranks of a program print."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path, world = str(EXAMPLES / name), world or RANKS.get(name, 2)
    asked = (path, world, store.port, arguments)
    return "".join(fresh.run(as_rank, *asked, world=world, group=False))


def test_each_program_is_started_by_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*OF_TORCHRUN, *OF_SPAWN}
    for name in OF_TORCHRUN:
        assert command_of(name).startswith(f"torchrun --nproc-per-node {RANKS.get(name, 2)} ")
    assert command_of("strategies/train.py").startswith("torchrun --nproc-per-node 4 ")


# In ranks that have imported torch already, as torchrun itself takes seconds.
@pytest.mark.parametrize("name", sorted(OF_TORCHRUN.keys() - {"ddp.py", "pipeline.py", "zero.py"}))
def test_a_program_runs_as_under_torchrun(name: str, fresh: Fresh) -> None:
    printed = as_ranks(fresh, name)
    for line in OF_TORCHRUN[name]:
        assert line in printed


def code_of(name: str) -> set[str]:
    """Its lines, without the docstring and blank ones."""
    _, _, code = (EXAMPLES / name).read_text().split('"""', 2)
    return set(filter(None, code.split("\n")))


def test_fsdp2_goes_on_with_our_fully_shard_after_one_import(fresh: Fresh) -> None:
    old, new = code_of("fsdp2.py"), code_of("fully_shard.py")
    assert old - new == {"from torch.distributed.fsdp import FSDPModule, fully_shard"}
    assert new - old == {"from dreamcomm.zero import FSDPModule, fully_shard"}
    torchs, ours = (losses_of(as_ranks(fresh, name)) for name in ("fsdp2.py", "fully_shard.py"))
    assert list(ours) == [5, 10]
    assert ours == torchs  # of four digits


def losses_of(printed: str) -> dict[int, str]:
    """By step."""
    found = re.findall(r"^step (\d+): loss (\S+)$", printed, re.M)
    return {int(step): loss for step, loss in found}


def test_a_resumed_run_prints_the_losses_of_one_that_went_through(
    fresh: Fresh, tmp_path: Path
) -> None:
    """The first part ends in the middle of the second epoch: an epoch has two steps."""
    checkpoint, picture = str(tmp_path / "run.pt"), tmp_path / "losses.png"

    def losses(steps: int, *arguments: str) -> dict[int, str]:
        asked = ["--text", TEXT, "--steps", str(steps), *arguments]
        return losses_of(as_ranks(fresh, "ddp.py", asked))

    whole = losses(6)
    first = losses(3, "--checkpoint", checkpoint)
    draws = ["--picture", str(picture)] if importlib.util.find_spec("matplotlib") else []
    rest = losses(6, "--checkpoint", checkpoint, *draws)
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    assert (list(first), list(rest)) == ([1, 2, 3], [4, 5, 6])
    assert {**first, **rest} == whole
    assert not draws or picture.read_bytes().startswith(b"\x89PNG")


def test_zero_prints_the_same_losses_at_both_stages_and_from_a_checkpoint(
    fresh: Fresh, tmp_path: Path
) -> None:
    """The checkpoint is one of stage 2, of a wrapped module, and stage 1 goes on from it."""
    checkpoint = ["--checkpoint", str(tmp_path / "run")]

    def losses(how: str, stage: int, steps: int, *arguments: str) -> dict[int, str]:
        asked = ["--text", TEXT, "--how", how, "--stage", str(stage), "--steps", str(steps)]
        printed = as_ranks(fresh, "zero.py", [*asked, *arguments])
        for line in OF_TORCHRUN["zero.py"]:
            assert line in printed
        return losses_of(printed)

    whole = losses("bare", 1, 4)
    assert list(whole) == [1, 2, 3, 4]
    assert losses("bare", 2, 4) == whole
    first = losses("wrapped", 2, 2, *checkpoint)
    rest = losses("wrapped", 1, 4, *checkpoint)
    assert (list(first), list(rest)) == ([1, 2], [3, 4])
    assert {**first, **rest} == whole
    # torch's clipping adds up the squares in another order.
    under_torch = [float(loss) for loss in losses("torch", 1, 4).values()]
    assert under_torch == pytest.approx([float(loss) for loss in whole.values()], rel=1e-5)


def test_a_pipeline_prints_the_same_losses_under_all_schedules_and_from_a_checkpoint(
    fresh: Fresh, tmp_path: Path
) -> None:
    """The checkpoint is one of stage 2 and 1F1B, and interleaved stages go on from it."""
    checkpoint, picture = ["--checkpoint", str(tmp_path / "run")], tmp_path / "run.svg"

    def losses(schedule: str, data: str, steps: int, *arguments: str) -> dict[int, str]:
        asked = ["--text", TEXT, "--schedule", schedule, "--data", data, "--steps", str(steps)]
        asked += ["--timeline", str(picture)]
        printed = as_ranks(fresh, "pipeline.py", [*asked, *arguments])
        if schedule == "1f1b":
            for line in OF_TORCHRUN["pipeline.py"]:
                assert line in printed
        return losses_of(printed)

    whole = losses("1f1b", "ddp", 4)
    assert list(whole) == [1, 2, 3, 4]
    assert losses("gpipe", "zero1", 4) == whole
    assert losses("zb-h1", "zero2", 4) == whole
    first = losses("1f1b", "zero2", 2, *checkpoint)
    rest = losses("interleaved1f1b", "ddp", 4, *checkpoint)
    assert (list(first), list(rest)) == ([1, 2], [3, 4])
    assert {**first, **rest} == whole
    # One pipeline of four stages draws other masks, as micro-batches have other rows.
    alone = [float(loss) for loss in losses("1f1b", "none", 4).values()]
    assert alone == pytest.approx([float(loss) for loss in whole.values()], rel=1e-2)
    assert "<title>3B3: " in picture.read_text()


def test_numpy_ranks_has_the_result_of_one_process(fresh: Fresh) -> None:
    """In the digits that it prints."""
    alone, together = (
        as_ranks(fresh, "numpy_ranks.py", world=world).partition(", ") for world in (1, 2)
    )
    assert (alone[0], together[0]) == ("1 ranks", "2 ranks")
    assert alone[2] == together[2]
    assert alone[2].count("centre ") == 4


def lines_of_strategies(printed: str) -> dict[str, list[float]]:
    """The numbers in the table, by strategy: steps, seconds, accuracy, bytes, seconds of waits."""
    found = re.findall(rf"^({'|'.join(STRATEGIES)}) +([\d.,].*)$", printed, re.M)
    return {name: [float(n) for n in rest.replace(",", "").split()] for name, rest in found}


def test_all_strategies_run_in_one_loop(fresh: Fresh) -> None:
    """The bytes show that each is what its name says. Six steps are no whole round of four."""
    counts = ["--steps", "6", "--period", "4", "--every", "2", "--pace", "1", "--slow", "2"]
    printed = as_ranks(fresh, "strategies/train.py", ["--strategy", "all", *counts], world=3)
    found = lines_of_strategies(printed)
    assert list(found) == STRATEGIES
    size, around = 4 * (65 * 128 + 129 * 10), 4 / 3
    sent = {"ddp": around, "server": 1, "async": 1, "local_sgd": around / 6, "diloco": around / 6}
    for name, (steps, _, accuracy, nbytes, of_server, _) in found.items():
        assert nbytes == pytest.approx(sent.get(name, 2) * size, abs=250)  # gossip: 2 on a ring
        assert steps == 6 or (name == "async" and 6 <= steps <= 12)
        assert 0.2 < accuracy < 1
        assert (of_server > size) == (name in ("server", "async"))


def test_a_worker_without_a_step_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came when the others had made all steps, and sent nothing."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "strategies"))
    train = runpy.run_path(str(EXAMPLES / "strategies" / "train.py"))
    run = train["Run"]("async", 1.0, 1, [0, 12, 0], [0.5] * 3, [700, 1200, 0], [0.0] * 3, [])
    ((steps, _, _, of_a_worker, of_a_server, _),) = lines_of_strategies(
        train["table"]([run])
    ).values()
    assert (steps, of_a_worker, of_a_server) == (12, 100, pytest.approx(58, abs=1))


@pytest.mark.long
def test_all_strategies_learn(tmp_path: Path) -> None:
    """Under torchrun, with the number of steps that users get."""
    picture = tmp_path / "runs.svg"
    draws = f"--plot {picture}" if importlib.util.find_spec("matplotlib") else ""
    command = f"strategies/train.py --strategy all --pace 0 {draws}"
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "4"]
    done = subprocess.run(
        [sys.executable, *start, *command.split()],
        cwd=EXAMPLES,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = lines_of_strategies(done.stdout)
    assert list(found) == STRATEGIES
    for numbers in found.values():
        assert numbers[2] > 0.93
    # Two lines for each strategy, of 30 points and the one before.
    assert not draws or len(re.findall(r"^L ", picture.read_text(), re.M)) >= 2 * 6 * 30


def test_torchrun_starts_a_program(tmp_path: Path) -> None:
    printed = started("ddp.py", tmp_path)
    for line in OF_TORCHRUN["ddp.py"]:
        assert line in printed


@pytest.mark.parametrize("name", OF_SPAWN)
def test_a_program_that_spawns_its_ranks_runs(name: str, tmp_path: Path) -> None:
    printed = started(name, tmp_path)
    for line in OF_SPAWN[name]:
        assert line in printed
    if name == "trace.py":
        events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
        assert {"all_reduce", "barrier"} <= {event["name"] for event in events}


def test_the_slurm_script_is_one() -> None:
    path = EXAMPLES / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    text = path.read_text()
    assert text.startswith("#!/bin/bash\n")
    # Slurm stops to read its options at the first command.
    first_command = text.index("\nset -")
    options = [match.start() for match in re.finditer(r"^#SBATCH --[a-z-]+=\S+$", text, re.M)]
    assert options
    assert len(options) == text.count("#SBATCH")
    assert max(options) < first_command


def test_the_slurm_script_starts_one_torchrun_a_host(tmp_path: Path) -> None:
    """With srun and scontrol that say what they were asked."""
    for name, body in (("scontrol", "printf 'n7\\nn8\\n'"), ("srun", 'printf "%s\\n" "$@"')):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sbatch"), "train.py", "--epochs", "3"],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_NODELIST": "n[7-8]",
            "SLURM_JOB_ID": "42",
            "SLURM_NNODES": "2",
            "SLURM_CPUS_PER_TASK": "8",
            "RANKS_PER_HOST": "4",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[1:-1] == [
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=4",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=n7:29400",
        "--rdzv-id=42",
        "train.py",
        "--epochs",
        "3",
    ]


def test_the_kubernetes_example_is_a_service_and_a_job() -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    assert (service["kind"], service["apiVersion"]) == ("Service", "v1")
    assert (job["kind"], job["apiVersion"]) == ("Job", "batch/v1")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"]
    assert f"--nnodes={job['spec']['completions']}" in command
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    # The first pod keeps the rendezvous, under the name that the service gives it.
    name = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    port = service["spec"]["ports"][0]["port"]
    assert f"--rdzv-endpoint={name}:{port}" in command
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
