"""All uses of private torch APIs in opweave.compile."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo.aot_compile_types import (
    BundledAOTAutogradSerializableCallable,
    SerializableCallable,
)
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from opweave.torch_compat import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    no_autocast,
    unwrapped,
)

__all__ = [
    "BackendCompilerFailed", "CustomGraphPass", "FakeTensorMode", "HigherOrderOperator",
    "OpOverload", "OpOverloadPacket", "SerializableCallable", "TorchDispatchMode", "no_autocast",
]  # fmt: skip


# Patches of Inductor for kernels that write to their arguments.
#
# See docs/design/inductor-mutation.md.


def correct_mutations() -> None:
    """Apply the patches, once per process."""
    from torch._inductor.loop_body import LoopBody
    from torch._inductor.scheduler import SchedulerNode

    if not getattr(SchedulerNode._compute_attrs, "_opweave", False):
        _keep_mutation_order(cast("Any", SchedulerNode))
        _keep_written_buffers(cast("Any", LoopBody))


def _keep_mutation_order(scheduler_node: Any) -> None:
    """Run a kernel that writes to a buffer before the kernels that read it.

    To fuse two CPU loops of different rank, the scheduler recomputes the reads of one of them
    without the renames of mutated buffers. The fused loop then no longer depends on the kernel that
    fills its input.
    """
    original = scheduler_node._compute_attrs

    @functools.wraps(original)
    def compute_attrs(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.mutation_renames:  # idempotent, in case torch does it too
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    cast("Any", compute_attrs)._opweave = True
    scheduler_node._compute_attrs = compute_attrs


def _keep_written_buffers(loop_body: Any) -> None:
    """Do not reuse the memory of mutated buffers in fused loops.

    The C++ backend reads the index expression of every user of a buffer, and fails on users that
    only write.
    """
    from torch._inductor.virtualized import V

    original = loop_body.get_read_expr

    @functools.wraps(original)
    def get_read_expr(self: Any, buffer_name: str) -> Any:
        if buffer_name in V.graph.mutated_buffers:
            return None  # differs from the contiguous index that is required for reuse
        try:
            return original(self, buffer_name)
        except KeyError:
            return None

    loop_body.get_read_expr = get_read_expr


# All uses of private torch APIs in opweave.compile.
#
# The counterpart of :mod:`opweave.torch_compat` for Dynamo, AOTAutograd and Inductor, which are
# slow to import.


InductorConfig = Mapping[str, Any]

# The calls in a graph that begin and end a ``with torch.autocast(...)`` block.
ENTER_AUTOCAST: Callable[..., Any] = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST: Callable[..., Any] = torch.amp.autocast_mode._exit_autocast
# Copies a list of tensors into another.
FOREACH_COPY: Any = torch.ops.aten._foreach_copy_.default


def fake_mode_of(values: Sequence[object]) -> FakeTensorMode | None:
    """Return the mode of the fake tensors in *values*, or None without fake tensors."""
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a transform (``torch.vmap``, ``torch.func.grad``) wraps *tensor*."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def storage_key(tensor: Tensor) -> int | None:
    """Return a key that two tensors, real or fake, share if they have the same storage.

    Tensors that are not strided have None.
    """
    *_, tensor = unwrapped(tensor)
    if tensor.layout is not torch.strided:
        return None
    return cast("int", cast("Any", tensor.untyped_storage())._cdata)


def trace(function: Callable[..., Any], inputs: Sequence[object]) -> GraphModule:
    """Trace *function* on fake tensors and symbolic integers into an aten graph.

    It uses Inductor's decompositions, so that inlined implementations generate the same code as
    graphs from AOTAutograd.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.traceback import preserve_node_meta

    mode = fake_mode_of(inputs) or FakeTensorMode()
    with torch.no_grad(), mode, preserve_node_meta():
        return make_fx(function, decomposition_table=select_decomp_table())(*inputs)


def is_plain_fake(tensor: Tensor) -> bool:
    """Return whether a fake tensor has no state besides layout, dtype, device and storage."""
    plain = type(tensor) is FakeTensor and tensor.layout is torch.strided
    return plain and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def fresh_fake(fake: FakeTensor) -> Tensor:
    """Return a fake tensor like *fake* in a new storage."""
    size, stride = fake.shape, fake.stride()
    with fake.fake_mode:
        return torch.empty_strided(size, stride, dtype=fake.dtype, device=fake.device)


class _Memory(Tensor):
    """A tensor that only serves to create a storage of dynamic size."""

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(cls.__name__)


def new_fake_storage(size: int | torch.SymInt) -> torch.UntypedStorage:
    """Return a storage of *size* bytes for fake tensors."""
    make = cast("Any", Tensor)._make_wrapper_subclass
    holder = make(_Memory, (0,), (1,), dtype=torch.uint8, device="meta", storage_size=size)
    return cast("torch.UntypedStorage", holder.untyped_storage())


def fake_in(
    mode: FakeTensorMode, storage: torch.UntypedStorage, like: Tensor, offset: int | torch.SymInt
) -> Tensor:
    """Return a fake tensor like *like* in *storage*, at *offset* in elements.

    Call it without active modes (:func:`no_modes`).
    """
    whole = torch.empty(0, dtype=like.dtype, device="meta")
    whole.set_(storage, 0, (0,), (1,))
    view = whole.as_strided(like.shape, like.stride(), cast("int", offset))
    return FakeTensor(mode, view, like.device)


def leaves(value: object) -> list[Any]:
    """Return the leaves of nested lists, tuples and mappings."""
    return pytree.tree_leaves(value)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply *function* to the tensors in *value*."""
    return pytree.tree_map_only(Tensor, function, value)


def data_dependent(values: Sequence[object]) -> set[Any]:
    """Return the symbols for data-dependent sizes in fake tensors and symbolic numbers."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    kinds = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    sized = (leaf for leaf in leaves(values) if isinstance(leaf, kinds))
    return {symbol for leaf in sized for symbol in free_unbacked_symbols(leaf)}


@contextmanager
def no_modes() -> Iterator[None]:
    """Disable active tracing and dispatch modes for the block."""
    from torch._guards import tracing
    from torch.utils._python_dispatch import _disable_current_modes

    with cast("Any", tracing)(None), cast("Any", _disable_current_modes)():
        yield


def is_mutable(target: object) -> bool:
    """Return whether *target* is an operator that writes to an argument."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def draws_random_numbers(target: object) -> bool:
    """Return whether *target* is an operator whose results depend on a random generator."""
    tag = torch.Tag.nondeterministic_seeded
    return isinstance(target, OpOverload) and tag in target.tags


def let_inductor_call(operator: torch._ops.OpOverload[..., Any]) -> None:
    """Make Inductor call *operator* as a fallback, unless it has a lowering.

    Inductor does so by default, but if the environment variable ``CI`` is set, it raises for
    operators that have a decomposition.
    """
    if operator.namespace != "aten":
        return
    from torch._inductor import lowering  # the import takes a second, and is rarely needed

    if operator not in lowering.lowerings:
        cast("Any", lowering).make_fallback(operator, warn=False)


def process_groups() -> Mapping[torch.distributed.ProcessGroup, str]:
    """Return the names of all process groups; torch.distributed must be initialized."""
    names: Any = torch.distributed.distributed_c10d._world.pg_names
    return cast("Mapping[torch.distributed.ProcessGroup, str]", names)


def function_name(node: Node) -> str:
    """Return the name of the function that *node* calls, without the overload."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2].removeprefix("sym_")
    return str(target) if node.op == "call_method" else str(getattr(target, "__name__", ""))


def makes_views(node: Node) -> bool:
    """Return whether the function that *node* calls can return a view."""
    if isinstance(node.target, torch._ops.OpOverload):
        return _is_view(node.target)
    name = function_name(node)
    packet: Any = getattr(torch.ops.aten, name, None)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        return any(_is_view(getattr(packet, name)) for name in cast("Any", packet).overloads())
    return name in ("getitem", "getattr")


def _is_view(operator: torch._ops.OpOverload[..., Any]) -> bool:
    returned = [value.alias_info for value in operator._schema.returns]
    return any(info is not None and not info.is_write for info in returned)


_inside = threading.local()  # .count: nested calls of compile_fx in this thread


def is_inside() -> bool:
    """Return whether this thread is in :func:`compile_fx`; Inductor calls it recursively."""
    return getattr(_inside, "count", 0) > 0


def compile_fx(
    graph_module: GraphModule, example_inputs: Sequence[Any], config: InductorConfig, **more: Any
) -> Callable[..., Any]:
    """Compile with Inductor, which may change *graph_module*."""
    from torch._inductor import compile_fx as module

    correct_mutations()
    _inside.count = getattr(_inside, "count", 0) + 1
    try:
        compiled = module.compile_fx(
            graph_module, example_inputs, config_patches=dict(config), **more
        )
    finally:
        _inside.count -= 1
    return cast("Callable[..., Any]", compiled)


def compiles_ahead_of_time() -> bool:
    """Return whether torch is compiling for ``aot_compile``."""
    from torch._functorch import config

    return bool(getattr(config, "bypass_autograd_cache_key", False))


def serialize(compiled: Callable[..., Any]) -> bytes:
    """Serialize a function that Inductor compiled ahead of time."""
    bundled = BundledAOTAutogradSerializableCallable
    return bundled.serialize_compile_artifacts(bundled(compiled))


def deserialize(data: bytes) -> Callable[..., Any]:
    """Load a function from the output of :func:`serialize`."""
    bundled = BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts(data)
    return cast("Callable[..., Any]", bundled.compiled_fn)


def replace_compile_fx(
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[[], None]:
    """Replace Inductor's entry point with ``make(original)``; return a function to undo it."""
    from torch._inductor import compile_fx as module

    correct_mutations()
    original = module.compile_fx
    module.compile_fx = cast("Any", make(original))

    def undo() -> None:
        module.compile_fx = original

    return undo


def compile_aot(
    graph_module: GraphModule, example_inputs: Sequence[Any], change: Callable[[GraphModule], None]
) -> Callable[..., Any]:
    """Compile with AOTAutograd only: apply *change* to its graphs, and run them op by op."""
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.decomposition import select_decomp_table

    def compiler(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        change(module)

        def run(inputs: list[Any]) -> Any:
            arguments = list(inputs)
            inputs.clear()  # lets the graph free inputs early, as the boxed convention demands
            return module(*arguments)

        cast("Any", run)._boxed_call = True
        return run

    compiled = cast("Any", aot_module_simplified)(
        graph_module,
        example_inputs,
        fw_compiler=compiler,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return cast("Callable[..., Any]", compiled)


def propagate_fakes(graph_module: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Compute the fake values of a graph that does not have any."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(graph_module).propagate(*example_inputs)


def configured_passes(name: str) -> list[Any]:
    """Return the custom passes in the Inductor option *name*."""
    from torch._inductor import config

    passes = getattr(config, name)
    if passes is None:
        return []
    return list(passes) if isinstance(passes, (list, tuple)) else [passes]


def mode_options(mode: str | None) -> dict[str, Any]:
    """Return the Inductor options for ``torch.compile(mode=...)``."""
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def inductor_option_names() -> set[str]:
    """Return the names of Inductor's options."""
    from torch._inductor import list_options

    return {name.replace("-", "_") for name in list_options()}


def cache_directory() -> str:
    """Return Inductor's cache directory."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def record_artifact(path: str, content: Any) -> None:
    """Include a JSON file in ``torch.compiler.save_cache_artifacts()``.

    *path* is relative to :func:`cache_directory`. The file is recorded as an autotuning result,
    the only artifact type of torch that restores such a file. Loading a custom type would fail in
    processes that have not imported opweave.
    """
    from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact
    from torch.compiler._cache import CacheArtifactManager

    CacheArtifactManager.record_artifact(AutotuneCacheArtifact.type(), path, content)


def sort_topologically(graph: Graph) -> None:
    """Sort the nodes of *graph* topologically; the sort is stable."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)
