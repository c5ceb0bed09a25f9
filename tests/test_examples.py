"""The job scripts in examples/ are what their schedulers would read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

EXAMPLES = Path(__file__).parents[1] / "examples"


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
