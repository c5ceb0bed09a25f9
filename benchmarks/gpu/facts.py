"""What a machine with a GPU is like, in JSON: what dreamcomm's GPU half builds on.

    python benchmarks/gpu/facts.py OUT.json

Every probe runs in processes of its own, with a deadline; one that fails says how, and the others
go on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

DEADLINE_S = 60

VERSIONS = """
import platform, torch
print({"python": platform.python_version(), "torch": torch.__version__,
       "cuda": torch.version.cuda, "nccl": list(torch.cuda.nccl.version()),
       "device": torch.cuda.get_device_name(0), "capability": torch.cuda.get_device_capability(0),
       "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count})
"""

# A generic stream of c10 names the cudaStream_t that torch.cuda names.
STREAMS = """
import torch
found = {}
for name, stream in {"default": torch.cuda.default_stream(), "side": torch.cuda.Stream()}.items():
    with torch.cuda.stream(stream):
        current = torch.accelerator.current_stream()
        found[name] = {"cuda_stream": stream.cuda_stream, "native": current.native_handle
                       if hasattr(current, "native_handle") else None, "id": current.stream_id}
print(found)
"""

# The same memory seen by a second process on the one device, by its base and by an offset.
IPC = """
import multiprocessing, torch
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
    print({"seen": answer.get(timeout=50)})
    process.join(10)
"""

NCCL = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
def run(rank, path):
    os.environ["NCCL_HOSTID"] = f"virtual-{rank}"
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.cuda.set_device(0)
    x = torch.full((4,), float(rank + 1), device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 0: print({"two ranks on one device by NCCL_HOSTID": x.tolist()})
    dist.destroy_process_group()
if __name__ == "__main__":
    import tempfile
    mp.spawn(run, args=(tempfile.mktemp(),), nprocs=2)
"""

SYMMETRIC = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
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
    if rank == 0: print({"one_shot_all_reduce": out[:2].tolist(), "world": handle.world_size})
    dist.destroy_process_group()
if __name__ == "__main__":
    import tempfile
    mp.spawn(run, args=(tempfile.mktemp(),), nprocs=2)
"""

# 25 MiB of float32 in 200 tensors to bfloat16 and back; and a plain copy, read and write counted.
FOREACH = """
import torch
tensors = [torch.randn(32768, device="cuda") for _ in range(200)]
halves = [torch.empty_like(t, dtype=torch.bfloat16) for t in tensors]
def rate(call, moved, repeats=50):
    for _ in range(5): call()
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
    begin.record()
    for _ in range(repeats): call()
    end.record(); torch.cuda.synchronize()
    return moved * repeats / (begin.elapsed_time(end) * 1e-3) / 1e9
n = sum(t.numel() for t in tensors)
big = torch.empty(1 << 28, device="cuda"); other = torch.empty_like(big)
print({"foreach_copy_to_bf16_gb_s": rate(lambda: torch._foreach_copy_(halves, tensors), 6 * n),
       "foreach_copy_back_gb_s": rate(lambda: torch._foreach_copy_(tensors, halves), 6 * n),
       "device_copy_gb_s": rate(lambda: other.copy_(big), 8 * big.numel(), 10)})
"""

PROBES = {
    "versions": VERSIONS,
    "streams": STREAMS,
    "ipc between processes": IPC,
    "nccl": NCCL,
    "symmetric memory": SYMMETRIC,
    "foreach copy": FOREACH,
}


def run_probe(name: str, code: str, folder: Path) -> object:
    """What the probe printed, or how it ended."""
    file = folder / f"{name.replace(' ', '_')}.py"
    file.write_text(textwrap.dedent(code))
    try:
        done = subprocess.run(
            [sys.executable, str(file)], capture_output=True, text=True, timeout=DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {DEADLINE_S} s"}
    if done.returncode != 0:
        return {"failed": done.stderr.strip().splitlines()[-8:]}
    return done.stdout.strip()


def command(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    return (done.stdout + done.stderr).strip()


def main() -> None:
    import tempfile

    out = Path(sys.argv[1])
    found: dict[str, object] = {
        "nvidia-smi": command("nvidia-smi", "-q", "-d", "COMPUTE,MEMORY,CLOCK").splitlines()[:60],
        "nvcc": command("nvcc", "--version").splitlines()[-2:],
        "mps": {
            "pipe": os.environ.get("CUDA_MPS_PIPE_DIRECTORY"),
            "daemon": command("pgrep", "-a", "mps") or "none",
        },
        "user limits": command("sh", "-c", "ulimit -l; cat /proc/sys/kernel/yama/ptrace_scope"),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, code in PROBES.items():
            found[name] = run_probe(name, code, Path(folder))
            print(f"{name}: {found[name]}", flush=True)
    out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
