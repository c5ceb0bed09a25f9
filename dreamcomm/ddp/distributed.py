"""DistributedDataParallel with gradients that are born where they are reduced."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from dreamcomm._torch.ddp import (
    TorchDDP,
    broadcast_module,
    find_tensors,
    hidden_from_dynamo,
    unseen_by_dynamo,
)
from dreamcomm._torch.groups import given_group
from dreamcomm.buckets.averages import averages_of
from dreamcomm.buckets.clip import clip_
from dreamcomm.buckets.engine import thawed
from dreamcomm.buckets.protocol import ClipPart
from dreamcomm.ddp.checks import check_module, check_names
from dreamcomm.ddp.early_steps import refuse_early_steps
from dreamcomm.ddp.engine import Reducer
from dreamcomm.ddp.join import ReducerJoinHook
from dreamcomm.ddp.logger import Logger
from dreamcomm.ddp.report import Report
from dreamcomm.ddp.settings import WHAT, caps_of, device_index, group_of, is_module
from dreamcomm.ddp.sync_layers import SyncLayers
from dreamcomm.ddp.watch import BufferWatch
from dreamcomm.invariant.agreement import check_shards
from dreamcomm.invariant.loop import ShardLoop, loop_of
from dreamcomm.ranks.parameters import (
    TrainedParameter,
    check_equal_models,
    check_group,
    find_parameters,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DistributedDataParallel"]

MIB = 1 << 20


class DistributedDataParallel(TorchDDP):
    """Trains copies of a module on all ranks of a group, each on its own data.

    A backward pass leaves the average of all ranks' gradients in each parameter's ``grad``. The
    arguments and their order are those of :class:`torch.nn.parallel.DistributedDataParallel` (Li et
    al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"), of which
    this is a subclass without torch's Reducer. Where it differs:

    - Large gradients on the CPU are born in memory that the ranks share, and are reduced there:
      nothing is copied, and no second copy of the gradients is kept.
    - Parameters without a gradient are found in every pass, at its end: on the CPU always, on GPUs
      with ``find_unused_parameters``, as there the host would wait for the device. A parameter that
      no rank used keeps ``grad`` None, and one that some rank used gets the average, with zeros of
      the others.
    - ``no_sync()`` counts in the backward pass alone.
    - A second wrapper, ranks with different modules and an optimizer step on gradients of which
      only a part was reduced are errors.

    Args:
        module: has at least one parameter that requires a gradient; all on one type of device.
        device_ids: for a module on one GPU: ``[its number]``, and inputs are moved there.
        output_device: as in torch; unused for CPU modules.
        dim: as in torch.
        broadcast_buffers: False: each rank keeps its own buffers. torch 2.13 has
            ``forward_sync_buffers`` in its place.
        init_sync: check that the ranks' modules are equal, and take rank 0's values.
        process_group: None is the default group.
        bucket_cap_mb: mebibytes at which a bucket is closed; None is 25.
        find_unused_parameters: on GPUs, without it, a parameter without a gradient is an error. On
            the CPU without effect.
        check_reduction: accepted; without effect, as in torch.
        gradient_as_bucket_view: accepted; gradients are never copied out of buckets.
        static_graph: the parameters that are used are those of the first pass, and the ranks no
            longer tell each other which they are.
        device_mesh: a mesh of one dimension, in place of ``process_group``.
        skip_all_reduce_unused_params: accepted; without effect.
        bucket_cap_mb_list: mebibytes for each of the first buckets.
        batched_grad_copy: accepted; small gradients are always copied together.
        forward_sync_buffers: whether a forward pass begins with rank 0's buffers; None is True.
        reduce: "mean", "sum", a factor for the ranks' sum, or "tokens": the sum of all gradients
            over the sum of what :meth:`count` was given, over micro-batches and ranks.
        unused: names of parameters that get no gradient on any rank: they are not waited for. One
            that gets a gradient raises an error.
        invariant_shards: a power of two that the number of ranks divides. A step then is a loop
            over :attr:`shards`, and has the same bits at every number of ranks.
        seed: of random numbers in shards.

    Raises:
        ValueError: parameters are on devices of several types or where the group has no backend;
            modules differ between ranks; a parameter is wrapped already; options contradict each
            other. Nothing has moved then.
        RuntimeError: no parameter requires a gradient; both a group and a mesh are given, or a mesh
            of several dimensions.
        TypeError: ``module`` is no module.
        NotImplementedError: ``mixed_precision`` or ``delay_all_reduce_named_params`` is given.
    """

    find_unused_parameters: bool
    logger: Logger
    reducer: Reducer
    sync_layers: SyncLayers
    _divide_by_initial_world_size: bool

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: list[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        reduce: str | float = "mean",
        unused: Iterable[str] = (),
        invariant_shards: int | None = None,
        seed: int = 0,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        if delay_all_reduce_named_params is not None or param_to_hook_all_reduce is not None:
            raise NotImplementedError(
                f"{WHAT}: delay_all_reduce_named_params is not supported: leave it out"
            )
        if mixed_precision is not None:
            raise NotImplementedError(
                f"{WHAT}: mixed_precision is not supported, and torch's own fails with it on CPUs. "
                "docs/mixed_precision.md has a table of what to take: 'autocast' "
                "(torch.autocast), '16-bit hooks' (dreamcomm.hooks), 'master weights' "
                "(ZeroOptimizer with master_dtype=), or 'policy' (fully_shard with mp_policy=)"
            )
        self.process_group = group_of(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        averages = averages_of(reduce, WHAT)
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = [name for name, _ in module.named_parameters()] if is_module(module) else []
        self.declared_unused = check_names(unused, named, WHAT)
        self.parameters_to_ignore = ignored
        parameters = find_parameters(module, ignored) if is_module(module) else []
        check_module(module, parameters, WHAT)
        check_group(self.process_group, parameters, WHAT)
        shards = check_shards(invariant_shards, seed, self.process_group, module, parameters, WHAT)
        averages = replace(averages, shards=shards)
        self._set_devices(parameters, device_ids, output_device)
        self._set_settings(
            dim=dim,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            batched_grad_copy=batched_grad_copy,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        )
        self._set_buffers(broadcast_buffers, forward_sync_buffers)
        caps = caps_of(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = caps.bucket
        self.bucket_bytes_cap_list = list(caps.each)
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        if check_reduction:
            warnings.warn(f"{WHAT}: check_reduction has no effect", FutureWarning, stacklevel=2)
        self._averages, self._caps, self._init_sync = averages, caps, init_sync
        self.module = module
        self._seed = seed
        if init_sync:
            buffers = self._compared_buffers() if self._init_sync_buffers else []
            check_equal_models(self.process_group, parameters, WHAT, buffers)
        self._make_reducer()
        if init_sync:
            broadcast_module(
                self.module,
                self.process_group,
                self.parameters_to_ignore,
                buffers=self._init_sync_buffers,
            )
        if static_graph:
            self._set_static_graph()

    # Construction.

    def _set_devices(
        self,
        parameters: list[Any],
        device_ids: list[int | torch.device] | None,
        output_device: int | torch.device | None,
    ) -> None:
        first = parameters[0].parameter.device
        self.device, self.device_type = first, first.type
        self.is_multi_device_module = len({one.parameter.device for one in parameters}) > 1
        self.device_ids: list[int] | None = None
        self.output_device: int | None = None
        if first.type == "cpu" or self.is_multi_device_module or not device_ids:
            if device_ids or (output_device is not None and first.type == "cpu"):
                raise ValueError(
                    f"{WHAT}: device_ids and output_device are for a module on one GPU, got "
                    f"device_ids {device_ids} and output_device {output_device} for a module on "
                    f"{first}; leave them out"
                )
            return
        if len(device_ids) > 1:
            raise ValueError(f"{WHAT}: expected device_ids to name one device, got {device_ids}")
        self.device_ids = [device_index(device_ids[0])]
        self.output_device = device_index(device_ids[0] if output_device is None else output_device)

    def _set_settings(self, **settings: Any) -> None:
        self.static_graph = False
        self.mixed_precision = None
        self.require_forward_param_sync = True
        self.broadcast_bucket_size = 250 * MIB
        self.use_side_stream_for_tensor_copies = True
        self._use_python_reducer = False
        self._delay_all_reduce_params: list[nn.Parameter] = []
        self._delay_all_reduce_all_params = False
        self._delay_grad_buffer = None
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = False
        self._ddp_sink_clone = True
        self._accum_grad_hooks: list[Any] = []
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        for name, value in settings.items():
            setattr(self, name, value)

    def _set_buffers(self, broadcast: bool | None, forward: bool | None) -> None:
        if broadcast is not None and forward is not None and broadcast != forward:
            raise ValueError(
                f"{WHAT}: broadcast_buffers={broadcast} and forward_sync_buffers={forward} "
                "contradict each other; give forward_sync_buffers alone"
            )
        self._init_sync_buffers = True if broadcast is None else broadcast
        given = forward if forward is not None else broadcast
        self.broadcast_buffers = True if given is None else given

    def _make_reducer(self) -> None:
        """The reducer of the module's parameters, and what torch's methods need beside it."""
        _, parameters = found = self._find()
        check_module(*found, WHAT)
        self._assign_modules_buffers()
        self.sync_layers = SyncLayers(self.module)
        self.reducer = Reducer(
            parameters,
            self.process_group,
            self._caps,
            averages=self._averages,
            static_graph=self.static_graph,
            # On a GPU the exchange would have the host wait for the device.
            finds_unused=self.device_type == "cpu" or self.find_unused_parameters,
        )
        me = weakref.ref(self)
        self.reducer.follow(self, lambda: _found_by(me), WHAT, checks=self._init_sync)
        self.reducer.on_made(self._note_parameters)
        self._note_parameters()
        self._loop = self._loop_over_shards(me) if self._averages.shards else None
        agreed = self._compared_buffers() if self._init_sync and self._init_sync_buffers else []
        self._buffer_watch = BufferWatch(self.process_group, WHAT, agreed)
        self.logger = Logger(
            {
                "module_name": type(self.module).__name__,
                "backend_name": dist.get_backend(self.process_group),
            },
            {
                "world_size": dist.get_world_size(self.process_group),
                "rank": dist.get_rank(self.process_group),
                "bucket_cap_bytes": self.bucket_bytes_cap,
                "find_unused_parameters": int(bool(self.find_unused_parameters)),
                "gradient_as_bucket_view": int(bool(self.gradient_as_bucket_view)),
                "broadcast_buffers": int(self.broadcast_buffers),
                "static_graph": int(self.static_graph),
                "can_set_static_graph": 0,
                "num_parameter_tensors": len(parameters),
                "total_parameter_size_bytes": sum(one.parameter.nbytes for one in parameters),
            },
        )
        rank = dist.get_rank(self.process_group)
        named = dict(self.module.named_parameters())
        for name in self.declared_unused:
            refuse = _declared_unused(weakref.ref(self), name, rank)
            with thawed([named[name]]):  # it may be thawed later
                named[name].register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]

    def _loop_over_shards(self, me: weakref.ref[DistributedDataParallel]) -> ShardLoop:
        refuse_early_steps(self.reducer)
        return ShardLoop(
            lambda: _alive(me).reducer,
            lambda: _alive(me).module,
            self.process_group,
            self._averages.shards,
            self._seed,
            WHAT,
        )

    @property
    def shards(self) -> ShardLoop:
        """With ``invariant_shards``: called, it loops over this rank's shards of a step.

        Raises:
            RuntimeError: without.
        """
        return loop_of(self._loop, WHAT)

    def _find(self) -> tuple[nn.Module, list[TrainedParameter]]:
        """The module that is trained now, and its parameters."""
        left_out = self.parameters_to_ignore | set(self.declared_unused)
        return self.module, find_parameters(self.module, left_out)

    def _note_parameters(self) -> None:
        self._module_parameters = [one.parameter for one in self.reducer.all]

    def _compared_buffers(self) -> list[tuple[str, Tensor]]:
        """Those that get rank 0's values."""
        named = self.module.named_buffers()
        return [(name, one) for name, one in named if name not in self.parameters_to_ignore]

    def will_sync_module_buffers(self) -> bool:
        """As torch's, also where the module has got its first buffers since it was wrapped."""
        if self._loop is not None and self._loop.is_running:
            return False  # each shard begins with those of the step
        if not self.modules_buffers and self.reducer.watch.has_buffers():
            self._assign_modules_buffers()
        return super().will_sync_module_buffers()

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        self._buffer_watch.check(list(self.named_module_buffers.items()))
        super()._sync_module_buffers(authoritative_rank)

    # Forward and backward.

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes reduce; False under no_sync()."""
        return self.reducer.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if not value:
            self.reducer.refuse_accumulation("no_sync()")
        self.reducer.sync = value

    @hidden_from_dynamo
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module. The first backward pass through its outputs reduces the gradients."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            self.sync_layers.begin_step(self.module, joins=self._join_config.enable)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    @unseen_by_dynamo
    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled():
            self.reducer.prepare_for_backward(find_tensors(output))
        self.require_forward_param_sync = (
            torch.is_grad_enabled() and self.require_backward_grad_sync
        )
        return output

    def count(self, number: float | Tensor) -> None:
        """Says what the losses of the next backward pass are sums over; with ``reduce="tokens"``.

        Once before each backward pass, on every rank: those that reduce, and those under
        :meth:`no_sync`. Nothing is communicated here.

        Args:
            number: of tokens or samples, an int; or their weight, a float; or a tensor of one
                element. It may be 0.

        Raises:
            ValueError: the number is negative, infinite or NaN.
            TypeError: it is no number.
            RuntimeError: ``reduce`` is another.
        """
        self.reducer.count(number, WHAT)

    def mean(self, losses: Tensor | Sequence[Tensor | float]) -> Tensor:
        """As :meth:`dreamcomm.invariant.loop.ShardLoop.mean`, with ``invariant_shards``."""
        return self.shards.mean(losses)

    def reduce_gradients(self) -> None:
        """Reduces what has accumulated in the parameters' ``grad``, without a backward pass.

        Collective. For a step after backward passes that were all under :meth:`no_sync`.
        """
        self.reducer.refuse_accumulation("reduce_gradients()")
        self.reducer.reduce_now()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``. Collective.

        The 2-norm is found by all ranks together, each from its part of the gradients: squares in
        float64, summed over blocks of 4,096 elements, the blocks in the parameters' order. Every
        rank gets the same bits.

        Args:
            max_norm: the largest norm.
            norm_type: the p of the norm; ``inf`` is the largest absolute value.
            error_if_nonfinite: raise where the norm is infinite or NaN, and change nothing.

        Returns:
            The norm before, a float32 tensor of no dimension on the gradients' device.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
        """
        (part,) = self.clip_parts()
        return clip_(part, max_norm, norm_type, error_if_nonfinite)

    def clip_parts(self) -> list[ClipPart]:
        """What the norm of all gradients consists of: all parameters, the same on all ranks.

        Raises:
            RuntimeError: a ZeroOptimizer reduces the gradients.
        """
        if self.reducer.sharded_by:
            raise RuntimeError(
                f"{WHAT} on rank {dist.get_rank(self.process_group)}: {self.reducer.sharded_by} "
                "reduces the gradients: call its clip_grad_norm_() and clip_parts()"
            )
        return self.reducer.clip_parts()

    def report(self) -> Report:
        """The bucket plan, and times and bytes of the latest step; ``print`` it."""
        return Report.of(self.reducer.plan, self.reducer.report())

    # What torch's class has.

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Has ``hook(state, bucket)`` reduce each bucket; as in torch, once, before a backward."""
        if self._comm_hooks:
            raise RuntimeError(f"{WHAT}: a communication hook is registered already")
        self._check_comm_hook(hook)
        self.reducer.register_hook(state, hook)
        self.logger._set_comm_hook_name(getattr(hook, "__qualname__", type(hook).__name__))
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        halves = comm_hook_type.name == "FP16_COMPRESS"
        hook = default_hooks.fp16_compress_hook if halves else default_hooks.allreduce_hook
        self.register_comm_hook(self.process_group, hook)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def join_hook(self, **kwargs: Any) -> ReducerJoinHook:
        """What a rank without data does in a join; see torch's class."""
        self.reducer.refuse_accumulation("join()")
        return ReducerJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        found = self.reducer.report()
        return {
            **self.logger.strs_map,
            **self.logger.ints_map,
            "iteration": found["passes"],
            "num_buckets_reduced": len(self.reducer.plan.buckets),
            "has_rebuilt_buckets": int(self._has_rebuilt_buckets),
        }

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn(f"{WHAT}: static_graph is set already", stacklevel=2)
            return
        self.static_graph = True
        self._static_graph_delay_allreduce_enqueued = False
        self.reducer._set_static_graph()
        self.logger._set_static_graph()

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        state = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "logger", "_buffer_watch", "sync_layers"):
            del state[name]
        loop = state.pop("_loop", None)
        state["_loop_state"] = None if loop is None else loop.state_dict()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = given_group(None)
        loop_state = state.pop("_loop_state", None)
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self._make_reducer()
        if self._loop is not None and loop_state is not None:
            self._loop.load_state_dict(loop_state)
        for hook, kept in self._comm_hooks:
            self.reducer.register_hook(kept, hook)


def _found_by(
    wrapper: weakref.ref[DistributedDataParallel],
) -> tuple[nn.Module, list[TrainedParameter]]:
    found = wrapper()
    assert found is not None  # it calls this itself
    return found._find()


def _alive(wrapper: weakref.ref[DistributedDataParallel]) -> DistributedDataParallel:
    found = wrapper()
    if found is None:
        raise RuntimeError(f"{WHAT}: the module of this loop over shards has been deleted")
    return found


def _declared_unused(
    wrapper: weakref.ref[DistributedDataParallel], name: str, rank: int
) -> Callable[[Tensor], None]:
    def refuse(_: Tensor) -> None:
        if wrapper() is None:
            return
        raise RuntimeError(
            f"rank {rank}: parameter {name!r} got a gradient, but is declared unused; leave its "
            "name out of unused="
        )

    return refuse
