"""Facts about a machine with a GPU, in JSON, that dreamcomm's GPU half relies on.

    python benchmarks/gpu/facts.py OUT.json

Every probe runs in processes of its own, all at a time, with a deadline; one that fails says how,
and the others go on. Ends with 1 if one failed that dreamcomm needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DEADLINE_S = 45

# Each prints one line of JSON, its last.
VERSIONS = """
import json, platform, torch
properties = torch.cuda.get_device_properties(0)
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())), "device": properties.name,
    "devices": torch.cuda.device_count(),
    "capability": [properties.major, properties.minor],
    "multiprocessors": properties.multi_processor_count, "memory": properties.total_memory}))
"""

# A generic stream of c10 names the cudaStream_t that torch.cuda names.
STREAMS = """
import json, torch
found = {}
for name, stream in {"default": torch.cuda.default_stream(), "side": torch.cuda.Stream()}.items():
    with torch.cuda.stream(stream):
        current = torch.accelerator.current_stream()
        found[name] = {"cuda_stream": stream.cuda_stream, "native": current.native_handle
                       if hasattr(current, "native_handle") else None, "id": current.stream_id}
print(json.dumps(found))
"""

# The same memory seen by a second process on the one device, by its base and by an offset.
IPC = """
import json, multiprocessing, torch
def child(queue, answer):
    seen = queue.get()
    answer.put((seen[:4].tolist(), seen.data_ptr() % 512))
    del seen
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue, answer = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(queue, answer))
    process.start()
    whole = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    queue.put(whole[128:])
    values, offset = answer.get(timeout=25)
    print(json.dumps({"seen": values, "address % 512": offset}))
    process.join(5)
"""

NCCL = """
import json, os, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
def run(rank, path):
    os.environ["NCCL_HOSTID"] = f"virtual-{rank}"
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.cuda.set_device(0)
    x = torch.full((4,), float(rank + 1), device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 0: print(json.dumps({"two ranks on one device by NCCL_HOSTID": x.tolist()}))
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(run, args=(tempfile.mktemp(),), nprocs=2)
"""

# Multicast is for several devices: with one it may fail, or wait for the others for ever.
SYMMETRIC = """
import json, os, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
def run(rank, path):
    import torch.distributed._symmetric_memory as symm
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    x = symm.empty(1024, device="cuda")
    handle = symm.rendezvous(x, dist.group.WORLD)
    x.fill_(rank + 1)
    torch.cuda.synchronize(); dist.barrier()
    out = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", dist.group.WORLD.group_name)
    torch.cuda.synchronize(); dist.barrier()
    if rank == 0:
        print(json.dumps({"one_shot_all_reduce": out[:2].tolist(), "world": handle.world_size}))
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(run, args=(tempfile.mktemp(),), nprocs=2)
"""

PROBES = {
    "versions": VERSIONS,
    "streams": STREAMS,
    "ipc between processes": IPC,
    "nccl": NCCL,
    "symmetric memory": SYMMETRIC,
}
# What other libraries do with two ranks on one device; no result is required.
OF_OTHERS = {"nccl", "symmetric memory"}


def run_probe(name: str, code: str, folder: Path) -> object:
    """The probe's output, or how it ended."""
    file = folder / f"{name.replace(' ', '_')}.py"
    file.write_text(code)
    try:
        done = subprocess.run(
            [sys.executable, str(file)], capture_output=True, text=True, timeout=DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {DEADLINE_S} s"}
    if done.returncode != 0:
        return {"failed": done.stderr.strip().splitlines()[-8:]}
    return read_answer(done.stdout)


def read_answer(text: str) -> object:
    """The last line, because libraries may print others."""
    last = (text.strip().splitlines() or [""])[-1]
    try:
        answer: object = json.loads(last)
    except ValueError:
        return {"failed": f"printed {last!r}"}
    return answer


def command(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    return (done.stdout + done.stderr).strip()


def machine() -> dict[str, object]:
    query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,compute_mode"
    return {
        "commit": command("git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"),
        "nvidia-smi": command(
            "nvidia-smi", f"--query-gpu={query},mig.mode.current", "--format=csv"
        ).splitlines(),
        "nvcc": command("nvcc", "--version").splitlines()[-2:],
        "mps": {
            "pipe": os.environ.get("CUDA_MPS_PIPE_DIRECTORY"),
            "daemon": command("pgrep", "-a", "mps") or "none",
        },
        "user limits": command("sh", "-c", "ulimit -l; cat /proc/sys/kernel/yama/ptrace_scope"),
    }


def main(out: Path) -> int:
    found = machine()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(PROBES)) as threads:
        folder = Path(name)
        running = {
            probe: threads.submit(run_probe, probe, code, folder) for probe, code in PROBES.items()
        }
        found |= {probe: answer.result() for probe, answer in running.items()}
    out.write_text(json.dumps(found, indent=2) + "\n")
    print(out.read_text(), end="")
    failed = [p for p in PROBES if isinstance(a := found[p], dict) and "failed" in a]
    print(f"probes that failed: {', '.join(failed) or 'none'}")
    return 1 if set(failed) - OF_OTHERS else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    raise SystemExit(main(Path(sys.argv[1])))
