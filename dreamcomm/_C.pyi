"""The compiled part of dreamcomm. Import torch first."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, ErrorType, ProcessGroup, Store, Work
from torch.autograd.graph import Node
from torch.nn import Parameter

R = TypeVar("R")

class Options(Backend.Options):
    """Settings of a group, for ``pg_options``; all ranks must give equal ones."""

    timeout: timedelta
    algorithm: str
    fixed_order: bool
    page_bytes: int
    message_bytes: int
    shared_memory: bool
    heap_bytes: int
    costs: str
    cuda: str
    cuda_heap_bytes: int
    log: bool
    hosts: str
    internode_dtype: str
    halves_between_hosts: str  # an older name of internode_dtype
    def __init__(
        self,
        *,
        timeout: timedelta = ...,
        algorithm: str = "auto",
        fixed_order: bool = True,
        page_bytes: int = ...,
        message_bytes: int = ...,
        shared_memory: bool = True,
        heap_bytes: int = ...,
        costs: str = "auto",
        cuda: str = "nccl",
        cuda_heap_bytes: int = 0,
        log: bool = False,
        hosts: str = "",
        internode_dtype: str = "float32",
        halves_between_hosts: str | None = None,
    ) -> None: ...
    # For tests: an accelerator other than CUDA.
    def _serve_device(self, kind: object) -> None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, object]) -> Options: ...

class HeaderChannel:
    def __init__(self, backend: DreamBackend, tag: int) -> None: ...
    @staticmethod
    def fits(description: int, offsets: int) -> bool: ...
    def send(
        self, peer: int, key: tuple[int, ...], description: bytes, offsets: Sequence[int]
    ) -> bool: ...
    def next(
        self, milliseconds: int
    ) -> tuple[int, tuple[int, ...], bytes | int, tuple[int, ...]] | None: ...
    def pending(self) -> int: ...
    def cancel(self) -> None: ...

class EntryNode:
    @property
    def node(self) -> Node: ...
    def take(self) -> list[Tensor | None]: ...

def enter(tensors: Sequence[Tensor]) -> tuple[list[Tensor], EntryNode]: ...

# A thread's grad mode, autocast, modes, hooks and profiler. call() runs a function in that state in
# another thread: operators compute with so many threads, and draw from the generator.
class ThreadState:
    def __init__(self) -> None: ...
    def call(
        self, function: Callable[[], R], generator: torch.Generator | None, threads: int
    ) -> R: ...

# Ends the idle threads of this thread's operators.
def end_idle_threads() -> None: ...

# That of the innermost call() of this thread.
def thread_generator() -> torch.Generator | None: ...

# Sets a generator's state to `before`, if it is `now`.
def rewind(generator: torch.Generator, now: Tensor, before: Tensor) -> bool: ...

# With own the first term's memory may take the sum.
def add_in_order(terms: Sequence[Tensor], own: bool) -> Tensor | None: ...

# Collectives on arrays, in a group whose ranks share memory. Kinds and operations are the core's,
# by number; -1 is no operation.
class ArrayCalls:
    def __init__(self, backend: DreamBackend) -> None: ...
    # A capsule for quick_all_reduce().
    @property
    def door(self) -> object: ...
    # On tensors of the CPU, also strided ones. Sizes are those of the blocks, in bytes; none: one
    # block. copies: how often the input's block is sent. Ranks whose digests differ are a mismatch.
    def run_tensors(
        self,
        kind: int,
        op: int,
        root: int,
        input: Tensor | None,
        in_sizes: Sequence[int],
        copies: int,
        output: Tensor | None,
        out_sizes: Sequence[int],
        digest: int,
        asynchronous: bool,
    ) -> Work: ...
    # All-reduces in place, or without an operation broadcasts.
    def run_together(
        self, tensors: Sequence[Tensor], op: int, root: int, digest: int, asynchronous: bool
    ) -> Work: ...
    # The ranks' next collective fails with this text, as a mismatch. Returns at once.
    def refuse(self, why: str) -> None: ...

# The method all_reduce of a class, which serves contiguous arrays in place itself. Instances have
# _quick: the door, a list of pending calls, the numbers of operations, and the arrays' type; or
# None. _all_reduce serves the other calls.
def quick_all_reduce(type: type, text: str) -> Any: ...

# Batch norm over ranks. join_statistics returns the count, mean and variance of all rows.
def statistics_row(
    header: Sequence[float],
    count: int,
    channels: int,
    mean: Tensor | None,
    variance: Tensor | None,
) -> Tensor: ...
def join_statistics(
    rows: Tensor, header: int, dtype: torch.dtype
) -> tuple[int, Tensor, Tensor]: ...
def take_into_running(
    buffer: Tensor | None, found: Tensor, factor: float, share: float
) -> None: ...
def batch_norm_input_gradient(
    gradient: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    sums: Tensor,
    count: int,
) -> Tensor: ...

class PlacedMessage:
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def taken(self) -> bool: ...

class DreamBackend(Backend):
    """The c10d backend of one group; made by init_process_group."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        options: Options,
        make_inner: Callable[[Store, int, int, Options, str], Backend],
    ) -> None: ...
    @property
    def options(self) -> Options: ...
    @property
    def transport(self) -> str: ...
    @property
    def shares_memory(self) -> bool: ...
    # Whether all ranks map each other's heaps.
    @property
    def shares_heaps(self) -> bool: ...
    # The ranks of each host. There is one host if all share memory, and none if torch's own group
    # carries everything.
    @property
    def hosts(self) -> list[list[int]]: ...
    # Whether the process of a rank is known to have ended; for groups within one host.
    def _has_ended(self, rank: int) -> bool: ...
    # Costs within this host and between hosts, as predict_between() takes them; None within one
    # host.
    @property
    def _level_costs(self) -> tuple[str, list[float]] | None: ...
    @property
    def failure(self) -> str | None: ...
    # None if torch's own backends carry everything.
    @property
    def _recorder(self) -> Recorder | None: ...
    def stats(self) -> dict[str, dict[str, int]]: ...
    # A group of these ranks, in their order; its members alone make it.
    def _split(self, store: Store, ranks: Sequence[int], options: Options) -> DreamBackend: ...
    # Cancels the receives of a batch that an exception has ended. Does nothing without a batch.
    def _place(self, tensor: Tensor) -> PlacedMessage | None: ...
    def _take_placed(
        self, source: int, offset: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor: ...
    def _cancel_batch(self) -> None: ...
    def _cancel(self, receive: Work) -> None: ...
    def explain(self, op: str, nbytes: int, heap: bool = False) -> str: ...
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None: ...
    # Whether the tensor lies in the registered memory of the group's device.
    def _holds(self, tensor: Tensor) -> bool: ...
    # Whether dreamcomm itself averages such tensors, those of 16 bits in float32, and not torch's
    # Gloo or NCCL. Collective at a device's first tensor, like an all_reduce of it.
    def _averages(self, tensor: Tensor) -> bool: ...
    def get_error(self) -> ErrorType: ...
    # For the benchmark. Rows are calls of a burst. Before each burst every input is rewritten with
    # rank + 1, and memory that is output only with 0. Returns samples x rows durations in seconds.
    def _time_core(self, op: str, input: Tensor, output: Tensor, samples: int) -> list[float]: ...
    def _time_ceiling(
        self, op: str, input: Tensor, output: Tensor, samples: int
    ) -> list[float]: ...
    # The algorithm, and the seconds that the cost model expects for it.
    def _predict(self, op: str, nbytes: int, in_heap: bool) -> tuple[str, float]: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...

class Recorder:
    """A rank's records of its group's operations; see dreamcomm.observe.records."""

    @property
    def team(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    # Ranks in the job of the group's ranks; empty: they are the same.
    @property
    def world_ranks(self) -> list[int]: ...
    # For a group on several hosts: the records of its calls' parts within this rank's host.
    @property
    def parts(self) -> Recorder | None: ...
    # For a group on several hosts: the name of each host, and its ranks.
    @property
    def hosts(self) -> list[tuple[str, list[int]]]: ...
    def open_log(self, records: int) -> None: ...
    def log_lines(self) -> list[tuple[Any, ...]] | None: ...
    # The records of collectives, and those of messages.
    def log_records(self) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]] | None: ...
    # The same records, the timeline's spans, and how many there were of each of the three.
    def trace_records(
        self,
    ) -> (
        tuple[
            list[tuple[Any, ...]],
            list[tuple[Any, ...]],
            list[tuple[int, str, int, int]],
            int,
            int,
            int,
        ]
        | None
    ): ...

# The recorders of this process's groups.
def recorders() -> list[Recorder]: ...

# Traces all groups of this process, also later ones, until it is stopped. Returns how many traces
# of that name there were before.
def start_trace(name: str, records: int, spans: int) -> int: ...
def stop_trace() -> list[Recorder]: ...
def explain(op: str, nbytes: int, world: int, heap: bool) -> str: ...

# Costs within a host as text: seconds of a turn and of a byte moved.
def even_costs(turn: float, byte: float) -> str: ...

# The ways in which a call can be carried out, the selected one first. Each has: whether leaders
# exchange the data, the bytes at a time, and the seconds. wire: seconds of latency and of a further
# message, seconds per byte from one rank and from all that carry, seconds of each of their chunks
# and the part of these that overlaps (0 to 1); corrections by leaders, and by carriers.
def predict_between(
    op: str,
    nbytes: int,
    ranks_on: list[int],
    here: str,
    wire: Sequence[float],
) -> list[tuple[bool, int, float]]: ...

# Seconds of an all_reduce by one ring over all ranks.
def predict_flat_ring(
    nbytes: int, ranks_on: list[int], here: str, wire: Sequence[float]
) -> float: ...
def allocate(size: int, dtype: torch.dtype, heap_bytes: int) -> Tensor: ...

class DeadlineStore(Store):
    """A store with a deadline, by which Gloo connects the ranks of different hosts."""

    # The time until the deadline when the store was made.
    timeout: timedelta
    # The reason that awaited keys will not arrive, or "". With a reason, all waits end.
    def trouble(self) -> str: ...
    # Ends all current and later waits.
    def leave(self) -> None: ...

def is_in_heap(tensor: Tensor) -> bool: ...

# Gives all free pages of malloc back to the system, where it is glibc's.
def give_back_free_pages() -> None: ...

# Instruction set of the CPU's kernels: "AVX-512" and the like.
def instruction_set() -> str: ...

# Processors that affinity and control groups leave to this process.
def usable_cpus() -> int: ...

# Version of the CUDA runtime that is linked, as 13000 for 13.0; 0 if the build has no CUDA.
def cuda_runtime_version() -> int: ...

# The number of devices that this process may use, and the reason if it is 0. Makes no CUDA context.
def cuda_devices() -> tuple[int, str]: ...

# Bytes read and written; see dreamcomm.ops.
def pack(
    tensors: list[Tensor], out: Tensor, scale: float, residual: Tensor | None
) -> tuple[int, int]: ...

# Bytes read and written; if inspected, the sum of squares and whether all are finite. For CUDA
# tensors these two are tensors without dimensions.
def unpack(
    buffer: Tensor, tensors: list[Tensor], divisor: int, factor: float, inspect: bool
) -> tuple[int, int, float | Tensor, bool | Tensor]: ...

# Label of the memory by which tools observe a rank: the link /proc/PID/fd/N is
# "/memfd:LABEL (deleted)".
WINDOW_LABEL: str
PROTOCOL_VERSION: int

def observe_rank(path: str) -> dict[str, Any] | None: ...

# Sums of the squares of a flat CPU tensor's blocks of 4,096 elements, in float64.
def block_squares(flat: Tensor, low: int, high: int) -> Tensor: ...
def owns_memory(tensor: Tensor) -> bool: ...

# The first row of a rank's, and the first beyond, by torch.chunk's rule.
def rows_of_rank(rows: int, world: int, rank: int) -> tuple[int, int]: ...

# Fills in the other ranks' rows of dense tensors of one type. Collective.
def gather_rows(group: ProcessGroup, wholes: Sequence[Tensor]) -> None: ...

# Where a flag is set on any rank, by the CPU. Collective.
def any_of(group: ProcessGroup, flags: Sequence[bool]) -> list[bool]: ...

class Region:
    """Memory that the ranks of a host share. It lives as long as this or a tensor on it does."""

    @property
    def bytes(self) -> int: ...
    # Whether writes to tensors that are not writable fault, unless they are allowed.
    @property
    def protects(self) -> bool: ...
    # The folder of its file; None: it is memory.
    @property
    def folder(self) -> RegionFolder | None: ...
    # Whether writes fault to tensors that are not writable, and to those that are: in this process.
    # They change nothing if the region does not protect.
    def allow_writes(self, allowed: bool) -> None: ...
    def allow_rows(self, allowed: bool) -> None: ...
    # A tensor from a byte on, with a storage of its own. Its elements are dense.
    def tensor(
        self,
        offset: int,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        writable: bool,
    ) -> Tensor: ...

class RegionFolder:
    """A folder of unnamed files that this process maps as regions."""

    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    # Bytes of the files that this process maps now, and of what it has dropped, each time.
    @property
    def bytes(self) -> int: ...
    @property
    def dropped(self) -> int: ...

class RegionOffer:
    """Makes a region, zeroed, and gives it to the other ranks of this host until it is closed."""

    def __init__(self, bytes: int, protects: bool, folder: RegionFolder | None = None) -> None: ...
    @property
    def address(self) -> str: ...
    @property
    def region(self) -> Region: ...
    def close(self) -> None: ...

# Maps the region of an offer's address: with its bytes, and protected as there.
def take_region(
    address: str,
    bytes: int,
    protects: bool,
    timeout_seconds: float,
    folder: RegionFolder | None = None,
) -> Region: ...

# A region of this process alone, in a file.
def make_own_region(bytes: int, folder: RegionFolder) -> Region: ...

# The path of the folder of the tensor's file; None: it lies in no file.
def folder_of(tensor: Tensor) -> str | None: ...

# For the tensors that lie in files: begins to write what has changed; waits for that and frees
# their pages; begins to read.
def write_files(tensors: Sequence[Tensor]) -> None: ...
def drop_files(tensors: Sequence[Tensor]) -> None: ...
def read_files(tensors: Sequence[Tensor]) -> None: ...

# What Python would ask of each of many tensors, which takes longer.
def versions_of(tensors: Sequence[Tensor]) -> list[int]: ...
def storages_of(tensors: Sequence[Tensor]) -> list[int]: ...

# Registers `after` in modules' dicts that have `before`, with what scripts have frozen there.
def register_instead(
    owns: list[dict[str, Parameter | None]],
    names: list[str],
    before: list[Parameter],
    after: list[Parameter],
) -> None: ...

# Whether all dicts have the whole parameter, or the DTensor on its local tensor.
def are_registered(
    owns: list[dict[str, Parameter | None]],
    names: list[str],
    wholes: list[Parameter],
    sharded: list[Parameter],
    locals: list[Tensor],
) -> bool: ...

# Autograd notices a write to either tensor in place, as for tensors of one storage.
def share_version(tensor: Tensor, owner: Tensor) -> None: ...

# Gives tensors' storages the memory of a block of bytes, from each one's offset on, and takes it
# back. Views that autograd has saved follow.
def lend(tensors: Sequence[Tensor], block: Tensor, offsets: Sequence[int]) -> None: ...
def take_back(tensors: Sequence[Tensor]) -> None: ...

class UnitGather:
    """Gathers the parameters of a unit into a block: each one's place is its offset, its bytes,
    those of the first owner's rows, and whether a collective of its own gathers it."""

    def __init__(
        self,
        group: ProcessGroup,
        number: int,
        places: Sequence[tuple[int, int, int, bool]],
        owners: Sequence[int],
    ) -> None: ...
    # With a number for the other ranks.
    def start(self, block: Tensor, rows: Sequence[Tensor], note: int) -> None: ...
    # The number of the unit that each rank has gathered; if they differ, the block has nothing.
    def wait(self) -> list[int]: ...
    def drop(self) -> None: ...
    # The notes of all ranks at the last gather that has ended.
    @property
    def notes(self) -> list[int]: ...
    @property
    def is_under_way(self) -> bool: ...
    # Bytes from other ranks, in all.
    @property
    def received(self) -> int: ...

class BucketSet:
    """Parameters whose gradients are reduced together, and their buckets."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        sparse: Sequence[bool],
        buckets: Sequence[Sequence[int]],
        group: ProcessGroup,
        averages: bool,
        factor: float,
        own_bytes: int,
        finds_unused: bool,
    ) -> None: ...
    @property
    def parameters(self) -> list[Tensor]: ...
    def set_hook(self, state: object, hook: Callable[..., Any] | None, in_turn: bool) -> None: ...
    def set_group(self, group: ProcessGroup, averages: bool, own_bytes: int) -> None: ...
    # A gradient is the ranks' sum times its factor; 0: as the set's. All of a bucket have the same.
    def set_factors(self, factors: Sequence[float]) -> None: ...
    def set_divisor(self, ranks: int) -> None: ...
    def set_static_graph(self) -> None: ...
    # Gradients are averaged over counts, of which there is one before each backward pass.
    # over: they stay sums within the set's group, and divisor() is that of this larger group.
    def set_counted(self, over: ProcessGroup | None = None) -> None: ...
    def set_finishes(self, finishes: bool) -> None: ...
    def exchange_counts(self) -> None: ...
    def divisor(self) -> float: ...
    # A whole number, or a weight in its place, unless that is negative.
    def count(self, whole: int, weight: float = -1.0) -> None: ...
    # What all gradients that are there are sums over, in place of their passes' counts.
    def replace_count(self, whole: int, weight: float = -1.0) -> None: ...
    # Before a pass: gradients of earlier ones are on other tensors.
    def note_kept(self) -> None: ...
    def adopt_counting(self, other: BucketSet) -> None: ...
    # Gradients are sums over so many shards; per_rank of them are this rank's.
    def set_shards(self, shards: int, per_rank: int) -> None: ...
    def mixed(self) -> list[Tensor]: ...

class BackwardPass:
    """Reduces a module's gradients in backward passes."""

    sync: bool
    owner: Callable[[], object]  # gives what made it, as long as that lives
    def __init__(
        self,
        set: BucketSet,
        replan: Callable[[list[list[int]]], list[list[int]]],
        mixed: Callable[[], None],
        unchecked: Callable[[], None],
        # Called at the end of each pass that succeeded: whether it reduced.
        finished: Callable[[bool], None] | None = None,
        # Called before a pass adds to its first gradient, unless enter() was called in it.
        starting: Callable[[], None] | None = None,
    ) -> None: ...
    # Within a run of autograd: begins a pass if that makes any of the gradients.
    def enter(self) -> None: ...
    def check_planned(self) -> bool: ...
    def recover(self) -> None: ...
    def reduce_now(self) -> None: ...
    def reduce_zeros(self) -> None: ...
    def begin_shards(self) -> None: ...
    def begin_shard(self) -> None: ...
    def end_shard(self) -> None: ...
    def leave_shards(self) -> None: ...
    def missing_shards(self) -> int: ...
    def relearn(self) -> None: ...
    # How many buckets the pass has launched, and waiting for those that all ranks have.
    def launched(self) -> int: ...
    def await_launched(self, count: int) -> None: ...
    def report(self) -> dict[str, Any]: ...

class PassHooks:
    """The hooks of a pass on its parameters."""

    def __init__(self, backward: BackwardPass) -> None: ...
    def detach(self) -> None: ...
    def await_backward(self, outputs: Sequence[Tensor]) -> None: ...
    # The pass whose hooks are on a parameter.
    @staticmethod
    def pass_of(parameter: Tensor) -> BackwardPass | None: ...

class ShardedGradients:
    """Gradients of which each rank keeps its rows alone.

    ``sum_types`` are those of the averages, ``stand_ins`` what ``grad`` becomes. ``heaps``: the
    backend whose ranks map each other's parameters and gradients.
    """

    def __init__(
        self,
        set: BucketSet,
        stage: int,
        sum_types: Sequence[torch.dtype],
        stand_ins: Sequence[Tensor | None],
        heaps: DreamBackend | None,
    ) -> None: ...
    def reduced(self) -> list[Tensor | None]: ...
    # The same in the shapes and strides of other tensors of as many elements.
    def reduced_as(self, likes: Sequence[Tensor]) -> list[Tensor | None]: ...
    def memory(self, index: int) -> Tensor | None: ...
    # Whether they hold all that has accumulated, on all ranks; None where digests differ.
    # Collective.
    def agree(self, digest: int = 0) -> bool | None: ...
    # At stage 3: whether each average is still a gradient of the script. The next reduction
    # replaces those that are not, and leaves their memory alone if another tensor has it, too. True
    # changes nothing.
    def hold(self, flags: Sequence[bool]) -> None: ...
    def hold_gradients(self) -> bool: ...
    def note_seen(self) -> None: ...
    def changed(self) -> list[bool]: ...
    def end(self) -> None: ...

class OptimizerPass:
    """An optimizer's steps over the ranks' heaps."""

    def __init__(
        self,
        set: BucketSet,
        masters: Sequence[Tensor | None],
        states: Sequence[Sequence[Tensor]],
    ) -> None: ...
    # Averages if it reduces, steps by the rules, writes. Without rules it only writes. Gives for
    # each parameter whether any rank has a gradient.
    def step(
        self, rules: Sequence[AdamRule | SgdRule], rule_of: Sequence[int], reduces: bool
    ) -> list[bool]: ...

class AdamRule:
    """The numbers of one step of Adam or AdamW, as torch's _single_tensor_adam computes them."""

    decay: float  # parameters are multiplied by it first: 1 - lr * weight_decay; 1: none
    weight_decay: float  # not decoupled; 0: none
    lerp_weight: float  # 1 - beta1
    beta2: float
    square_weight: float  # 1 - beta2
    bias_correction2_sqrt: float
    eps: float
    step_size: float  # lr / bias_correction1
    amsgrad: bool
    maximize: bool
    # Whether square roots are torch's own: MKL's, up to one unit in the last place off. False:
    # correctly rounded, which is faster. Always False if torch has no MKL, where both are the same.
    torch_roots: bool
    def __init__(
        self,
        *,
        decay: float = 1.0,
        weight_decay: float = 0.0,
        lerp_weight: float = 0.0,
        beta2: float = 0.0,
        square_weight: float = 0.0,
        bias_correction2_sqrt: float = 1.0,
        eps: float = 0.0,
        step_size: float = 0.0,
        amsgrad: bool = False,
        maximize: bool = False,
        torch_roots: bool = True,
    ) -> None: ...

class SgdRule:
    """The numbers of one step of SGD."""

    lr: float
    weight_decay: float
    momentum: float
    dampening: float
    nesterov: bool
    maximize: bool
    first: bool  # the momentum buffer has no value yet, and becomes the gradient
    def __init__(
        self,
        *,
        lr: float = 0.0,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        first: bool = False,
    ) -> None: ...

# Steps a parameter and its state in place: exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq;
# or the momentum buffer. All are contiguous CPU tensors, float32 or float64.
def optimizer_step(
    rule: AdamRule | SgdRule,
    parameter: Tensor,
    state: Sequence[Tensor | None],
    gradient: Tensor,
) -> None: ...

# Steps rows that have a gradient, and their states, in place, each by the rule of its number. All
# are dense CPU tensors, float32 or float64; gradients and states are flat, or lie as the row does.
def step_rows(
    rules: Sequence[AdamRule | SgdRule],
    rule_of: Sequence[int],
    rows: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    states: Sequence[Sequence[Tensor]],
) -> None: ...
