"""The private parts of torch that opweave.compile touches, in one place.

The counterpart of :mod:`opweave.base.compat` for Dynamo, AOTAutograd and Inductor, which are slow
to import. ``tests/compile/test_compat.py`` has a canary for each name.
"""

from __future__ import annotations

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

from opweave.base.compat import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    unwrapped,
)
from opweave.compile import mutation_compat

__all__ = [
    "BackendCompilerFailed",
    "CustomGraphPass",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "SerializableCallable",
    "TorchDispatchMode",
    "cache_directory",
    "compile_fx",
    "fake_mode_of",
]

InductorConfig = Mapping[str, Any]

# What a ``with torch.autocast(...)`` block is in a graph.
ENTER_AUTOCAST: Callable[..., Any] = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST: Callable[..., Any] = torch.amp.autocast_mode._exit_autocast
# The operator ``_foreach_copy_``, which copies a list of tensors into another.
FOREACH_COPY: Any = torch.ops.aten._foreach_copy_.default


def fake_mode_of(values: Sequence[object]) -> FakeTensorMode | None:
    """Return the mode that the fake tensors among *values* belong to."""
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def is_wrapped(tensor: Tensor) -> bool:
    """Whether *tensor* is one of a transform's (``torch.vmap``, ``torch.func.grad``), of others."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def storage_key(tensor: Tensor) -> int | None:
    """Return what two tensors, real or fake, have in common if they are views of one storage."""
    *_, tensor = unwrapped(tensor)
    if tensor.layout is not torch.strided:
        return None
    return cast("int", cast("Any", tensor.untyped_storage())._cdata)


def trace(function: Callable[..., Any], inputs: Sequence[object]) -> GraphModule:
    """Trace *function* of fake tensors and symbolic integers into aten, as Inductor would have it.

    The decompositions are those of Inductor, so that code inlined from here and code that went
    through AOTAutograd come out the same.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.traceback import preserve_node_meta

    mode = fake_mode_of(inputs) or FakeTensorMode()
    with torch.no_grad(), mode, preserve_node_meta():
        return make_fx(function, decomposition_table=select_decomp_table())(*inputs)


def is_plain_fake(tensor: Tensor) -> bool:
    """Whether sizes, strides, dtype, device and memory are all that there is to a fake tensor."""
    plain = type(tensor) is FakeTensor and tensor.layout is torch.strided
    return plain and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def fresh_fake(fake: FakeTensor) -> Tensor:
    """Return a fake tensor like *fake* in memory of its own."""
    size, stride = fake.shape, fake.stride()
    with fake.fake_mode:
        return torch.empty_strided(size, stride, dtype=fake.dtype, device=fake.device)


class _Memory(Tensor):
    """A tensor for the sake of its storage, whose size may vary: torch has no way to make one."""

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(cls.__name__)


def new_fake_storage(size: int | torch.SymInt) -> torch.UntypedStorage:
    """Return memory for fake tensors.

    Args:
        size: in bytes.
    """
    make = cast("Any", Tensor)._make_wrapper_subclass
    holder = make(_Memory, (0,), (1,), dtype=torch.uint8, device="meta", storage_size=size)
    return cast("torch.UntypedStorage", holder.untyped_storage())


def fake_in(
    mode: FakeTensorMode, storage: torch.UntypedStorage, like: Tensor, offset: int | torch.SymInt
) -> Tensor:
    """Return a fake tensor of *mode* in *storage*, at *offset* in elements, that is *like* another.

    Call it without modes that are active (:func:`no_modes`).
    """
    whole = torch.empty(0, dtype=like.dtype, device="meta")
    whole.set_(storage, 0, (0,), (1,))
    view = whole.as_strided(like.shape, like.stride(), cast("int", offset))
    return FakeTensor(mode, view, like.device)


def leaves(value: object) -> list[Any]:
    """Return what is in *value*, however deep in lists, tuples and mappings."""
    return pytree.tree_leaves(value)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return *value* with what *function* makes of each tensor in it."""
    return pytree.tree_map_only(Tensor, function, value)


def data_dependent(values: Sequence[object]) -> set[Any]:
    """Return the symbols in fake tensors and numbers that stand for what only the data tell."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    kinds = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    found = (leaf for leaf in leaves(values) if isinstance(leaf, kinds))
    return {symbol for leaf in found for symbol in free_unbacked_symbols(leaf)}


@contextmanager
def no_modes() -> Iterator[None]:
    """Run the block as if nothing was being traced or compiled around it."""
    from torch._guards import tracing
    from torch.utils._python_dispatch import _disable_current_modes

    with cast("Any", tracing)(None), cast("Any", _disable_current_modes)():
        yield


def is_mutable(target: object) -> bool:
    """Whether the operator *target* writes to an argument."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def let_inductor_call(operator: torch._ops.OpOverload[..., Any]) -> None:
    """Have Inductor call *operator* as it is, unless it knows how to lower it.

    It would do so by itself, but where the environment has ``CI``, it first raises for an operator
    that has a decomposition.
    """
    if operator.namespace != "aten":
        return
    from torch._inductor import lowering  # takes a second, and most operators do not need it

    if operator not in lowering.lowerings:
        cast("Any", lowering).make_fallback(operator, warn=False)


def process_groups() -> Mapping[torch.distributed.ProcessGroup, str]:
    """Return the name of every process group, once torch.distributed is initialised."""
    names: Any = torch.distributed.distributed_c10d._world.pg_names
    return cast("Mapping[torch.distributed.ProcessGroup, str]", names)


def function_name(node: Node) -> str:
    """Return what the function that *node* calls is called, without its overload."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2].removeprefix("sym_")
    return str(target) if node.op == "call_method" else str(getattr(target, "__name__", ""))


def makes_views(node: Node) -> bool:
    """Whether the function that *node* calls reads nothing where it returns views."""
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


_inside = threading.local()  # .count: how deep this thread is in Inductor's own entry point


def is_inside() -> bool:
    """Whether this thread is in :func:`compile_fx`: Inductor calls its own entry point again."""
    return getattr(_inside, "count", 0) > 0


def compile_fx(
    graph_module: GraphModule, example_inputs: Sequence[Any], config: InductorConfig, **more: Any
) -> Callable[..., Any]:
    """Compile with Inductor. Takes *graph_module* over, and may change it."""
    from torch._inductor import compile_fx as module

    mutation_compat.correct_mutations()
    _inside.count = getattr(_inside, "count", 0) + 1
    try:
        compiled = module.compile_fx(
            graph_module, example_inputs, config_patches=dict(config), **more
        )
    finally:
        _inside.count -= 1
    return cast("Callable[..., Any]", compiled)


def compiles_ahead_of_time() -> bool:
    """Whether torch is compiling for ``aot_compile``."""
    from torch._functorch import config

    return bool(getattr(config, "bypass_autograd_cache_key", False))


def serialize(compiled: Callable[..., Any]) -> bytes:
    """Return a function that Inductor compiled ahead of time as bytes."""
    bundled = BundledAOTAutogradSerializableCallable
    return bundled.serialize_compile_artifacts(bundled(compiled))


def deserialize(data: bytes) -> Callable[..., Any]:
    """Return the function that :func:`serialize` was given."""
    found = BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts(data)
    return cast("Callable[..., Any]", found.compiled_fn)


def replace_compile_fx(
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[[], None]:
    """Put ``make(original)`` in place of Inductor's entry point; return what undoes it."""
    from torch._inductor import compile_fx as module

    mutation_compat.correct_mutations()
    original = module.compile_fx
    module.compile_fx = cast("Any", make(original))

    def undo() -> None:
        module.compile_fx = original

    return undo


def compile_aot(
    graph_module: GraphModule, example_inputs: Sequence[Any], change: Callable[[GraphModule], None]
) -> Callable[..., Any]:
    """Compile with AOTAutograd only: *change* its graphs, then run them op by op."""
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.decomposition import select_decomp_table

    def compiler(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        change(module)

        def run(inputs: list[Any]) -> Any:
            given = list(inputs)
            inputs.clear()  # so that nobody but the graph holds them
            return module(*given)

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
    """Note fake values in a graph whose tracer left none."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(graph_module).propagate(*example_inputs)


def configured_passes(name: str) -> list[Any]:
    """Return the custom passes that Inductor's configuration holds under *name*."""
    from torch._inductor import config

    found = getattr(config, name)
    if found is None:
        return []
    return list(found) if isinstance(found, (list, tuple)) else [found]


def mode_options(mode: str | None) -> dict[str, Any]:
    """Return the Inductor options that ``torch.compile(mode=...)`` stands for."""
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def inductor_option_names() -> set[str]:
    """Return the options that Inductor knows."""
    from torch._inductor import list_options

    return {name.replace("-", "_") for name in list_options()}


def cache_directory() -> str:
    """Return the folder of Inductor's caches."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def record_artifact(path: str, content: Any) -> None:
    """Let a JSON file travel with ``torch.compiler.save_cache_artifacts()``.

    *path* is relative to :func:`cache_directory`. Of the kinds of artifacts that torch knows, that
    of autotuning results is the one that restores such a file. One of our own would make loading
    fail where opweave was not imported before.
    """
    from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact
    from torch.compiler._cache import CacheArtifactManager

    CacheArtifactManager.record_artifact(AutotuneCacheArtifact.type(), path, content)


def sort_topologically(graph: Graph) -> None:
    """Order the nodes so that each comes after its inputs, as little changed as possible."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)
