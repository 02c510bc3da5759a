"""A canary for each private name of torch that opweave uses: it exists, and means what we think."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opweave import ir, plain_call, torch_compat

SOURCE = Path(inspect.getfile(ir)).parents[1]


def test_every_name_has_a_canary() -> None:
    tree, tests = ast.parse(inspect.getsource(torch_compat)), Path(__file__).read_text("utf-8")
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    names |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign)}  # type: ignore
    names |= {n.targets[0].id for n in tree.body if isinstance(n, ast.Assign)}  # type: ignore
    assert len(names) > 50
    assert [name for name in sorted(names) if f"torch_compat.{name}" not in tests] == []


def test_is_dynamo_compiling() -> None:
    assert torch_compat.is_dynamo_compiling() is False

    @torch.compile(backend="eager", fullgraph=True)
    def traced(x: Tensor) -> Tensor:
        return x + 1 if torch_compat.is_dynamo_compiling() else x + 2

    torch.compiler.reset()
    assert traced(torch.zeros(1)).item() == 1
    with torch_compat.fake_tensor_mode():
        assert type(torch.empty(2)).__name__ == "FakeTensor"


def test_map_tensors() -> None:
    nested = {"a": [torch.ones(2), 3], "b": (torch.zeros(1), None)}
    found = torch_compat.map_tensors(Tensor.tolist, nested)  # type: ignore[arg-type]
    assert found == {"a": [[1, 1], 3], "b": ([0], None)}


def test_trace_instead() -> None:
    def quick(x: Tensor) -> Tensor:
        return x + 1

    def traced(x: Tensor) -> Tensor:
        return x + 2

    class Callee:
        def __call__(self, x: Tensor) -> Tensor: ...

    setattr(Callee, "__call__", lambda self, x: quick(x))  # noqa: B010
    torch_compat.trace_instead(Callee.__call__, lambda self, x: traced(x))
    callee, x = Callee(), torch.zeros(1)
    assert callee(x).item() == 1

    @torch.compile(backend="eager", fullgraph=True)
    def calling(x: Tensor) -> Tensor:
        return callee(x)

    torch.compiler.reset()
    assert calling(x).item() == 2
    assert torch.compile(callee, backend="eager", fullgraph=True)(x).item() == 2


def test_run_untraced() -> None:
    seen: list[bool] = []

    def inner(x: Tensor) -> Tensor:
        return x + 1

    def outer(x: Tensor) -> Tensor:
        return inner(x)

    def backend(graph_module: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        seen.append(True)
        return graph_module.forward

    @torch.compile(backend=backend)
    def calling(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return torch.compiler.disable(outer, recursive=False)(x)

    calling(torch.zeros(1))
    assert seen  # inner was compiled on its own
    seen.clear()
    torch.compiler.reset()
    torch_compat.run_untraced(outer)
    assert calling(torch.zeros(1)).item() == 1
    assert not seen


def test_before_loading_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That packages load is tested in packages/opweave/tests/compile/test_backend.py."""
    aoti, called = torch._C._aoti, []
    monkeypatch.setattr(aoti, "AOTIModelPackageLoader", aoti.AOTIModelPackageLoader)
    torch_compat.before_loading_packages(lambda: called.append(True))
    with pytest.raises(RuntimeError, match="open failed"):
        aoti.AOTIModelPackageLoader(str(tmp_path / "missing.pt2"), "model", False, 1, -1)
    assert called == [True]


def test_all_reduce_sum() -> None:
    """With ranks it is tested with the op that uses it, in compile/test_sequence.py."""
    with pytest.raises(RuntimeError, match="process group"):
        torch_compat.all_reduce_sum(torch.ones(2), "no such group")
    with FakeTensorMode():
        assert torch_compat.all_reduce_sum(torch.ones(2), "no such group").shape == (2,)


def test_all_gather() -> None:
    """With ranks it is tested in packages/opweave/tests/layers/test_linear.py."""
    with pytest.raises(RuntimeError, match="process group"):
        torch_compat.all_gather(torch.ones(2), 2, "no such group")
    with FakeTensorMode():
        assert torch_compat.all_gather(torch.ones(2, 3), 2, "no such group").shape == (4, 3)


def test_dispatch_mode_count() -> None:
    assert torch_compat.dispatch_mode_count() == 0
    with TorchDispatchMode():
        assert torch_compat.dispatch_mode_count() == 1
        with TorchDispatchMode():
            assert torch_compat.dispatch_mode_count() == 2
    with FakeTensorMode():
        assert torch_compat.dispatch_mode_count() > 0
    assert torch_compat.dispatch_mode_count() == 0


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def test_function_modes_and_overrides() -> None:
    x = torch.zeros(1)
    assert not torch_compat.function_mode_enabled()
    assert not torch_compat.has_torch_function_unary(x)
    assert not torch_compat.has_torch_function_unary(torch.nn.Parameter(x))
    assert torch_compat.has_torch_function_unary(x.as_subclass(Subclass))
    with Mode():
        assert torch_compat.function_mode_enabled()
        assert torch_compat.has_torch_function_unary(x)
    assert not torch_compat.function_mode_enabled()


def test_is_in_vmap_and_is_batched() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(
            (torch_compat.is_in_vmap(), torch_compat.is_batched(x), torch_compat.is_batched(y))
        )
        return x.sum()

    y = torch.zeros(2)
    look(y)
    torch.vmap(look)(torch.zeros(2, 2))
    torch.func.grad(look)(y)
    torch.func.grad(lambda x: torch.vmap(look)(x).sum())(torch.zeros(2, 2))
    torch.vmap(torch.func.grad(look))(torch.zeros(2, 2))
    outside, vmap, inner = (False, False, False), (True, True, False), (False, True, False)
    assert seen == [outside, vmap, outside, vmap, inner]


def test_sizes_that_only_the_data_tells() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        size = mode.from_tensor(torch.ones(3)).nonzero().shape[0]
        for otherwise in (False, True):
            assert torch_compat.decided(size > 2, otherwise=otherwise) is otherwise
            assert torch_compat.decided(size == size * 1, otherwise=otherwise)
            assert torch_compat.decided(condition=False, otherwise=otherwise) is False
        assert torch_compat.is_certain(size * 3 % size == 0)
        assert not torch_compat.is_certain(size > 2)
        assert not torch_compat.is_certain(condition=False)
        with pytest.raises(Exception, match="data-dependent") as raised:
            bool(size > 2)
    assert torch_compat.depends_on_data(raised.value)  # type: ignore[arg-type]
    assert not torch_compat.depends_on_data(ValueError("data-dependent"))


def test_what_is_active_inside_of_a_transform() -> None:
    seen, depths, traced = [], [], []

    def look(x: Tensor) -> Tensor:
        seen.append(torch_compat.functorch_interpreter() is not None)
        depths.append(len(list(torch_compat.unwrapped(x))))
        traced.append(torch_compat.jit_tracing_state() is not None)
        return x.sum()

    x = torch.zeros(2, 2)
    look(x)
    torch.vmap(torch.func.grad(look))(x)
    torch.func.jvp(look, (x,), (x,))
    assert seen == [False, True, True]
    assert depths[:2] == [1, 3]
    assert [t is x for t in torch_compat.unwrapped(x)] == [True]
    assert not any(traced)
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):
        torch.jit.trace(look, x, check_trace=False)
    assert traced.pop()
    assert torch_compat.functorch_interpreter() is torch_compat.jit_tracing_state() is None


def test_no_transforms() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        with torch_compat.no_transforms():
            seen.append((torch_compat.functorch_interpreter(), torch_compat.dispatch_mode_count()))
            torch.zeros(1).requires_grad_()
        assert torch_compat.is_in_vmap()
        assert torch_compat.dispatch_mode_count() == 1
        return x.sum()

    with FakeTensorMode():
        torch.func.grad(lambda x: torch.vmap(look)(x).sum())(torch.zeros(2, 2))
    assert seen == [(None, 0)]


def test_any_autocast_enabled() -> None:
    assert not torch_compat.any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch_compat.any_autocast_enabled()
        for disabled in (torch.autocast("cpu", enabled=False), torch_compat.no_autocast()):
            with disabled:
                assert not torch_compat.any_autocast_enabled()
                assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


def test_below_autograd() -> None:
    x = torch.ones(1, requires_grad=True)
    with torch_compat.below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


def test_the_keys_of_modes_are_included_while_a_mode_is_active() -> None:
    def included() -> list[bool]:
        keys = torch._C._dispatch_tls_local_include_set()
        return [keys.has(torch._C.DispatchKey(key)) for key in plain_call.MODE_KEYS]

    python, functorch, tracer = range(3)
    assert torch_compat.dispatch_key("Python") == plain_call.MODE_KEYS[python]
    assert included() == [False] * 3
    seen: list[list[bool]] = []

    def look(x: Tensor) -> Tensor:
        seen.append(included())
        return x + 1

    with TorchDispatchMode():
        assert included()[python]
    torch.vmap(look)(torch.zeros(2))
    assert seen.pop()[functorch]
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):
        torch.jit.trace(look, torch.zeros(1), check_trace=False)
    assert seen.pop()[tracer]
    for i, key in enumerate(plain_call.MODE_KEYS):
        with torch_compat.include_dispatch_key(key):
            assert included()[i]
    assert included() == [False] * 3


def test_forward_ad() -> None:
    x = torch.zeros(2)
    assert torch_compat.FORWARD_AD._current_level < 0
    assert not torch_compat.has_tangent(x)
    with torch.autograd.forward_ad.dual_level():
        assert torch_compat.FORWARD_AD._current_level == 0
        assert not torch_compat.has_tangent(x)
        assert torch_compat.has_tangent(torch.autograd.forward_ad.make_dual(x, x))
    assert torch_compat.FORWARD_AD._current_level < 0
    seen = []

    def look(t: Tensor) -> Tensor:
        seen.append(torch_compat.has_tangent(t))
        return t + 1

    torch.func.jvp(look, (x,), (x,))
    assert seen == [True]


def test_empty_strided_cpu() -> None:
    made = torch_compat.empty_strided_cpu((3, 4), (8, 1), torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype) == ((3, 4), (8, 1), torch.bfloat16)
    assert made.is_cpu
    assert made.untyped_storage().nbytes() == 2 * (2 * 8 + 4)
    assert torch_compat.empty_strided_cpu((2, 4), (4, 1), torch.int8).resize_(9).shape == (9,)


def test_share_storage() -> None:
    memory = torch.zeros(8)
    assert torch_compat.share_storage(memory[:4], memory[4:])
    assert torch_compat.share_storage(memory, memory.view(2, 4))
    assert not torch_compat.share_storage(memory, memory.clone())


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is without oneDNN")
def test_onednn_linear() -> None:
    x, weight, bias = torch.randn(3, 40, 8), torch.randn(5, 8), torch.randn(5)
    for given in (bias, None):
        wanted = torch.nn.functional.linear(x, weight, given)
        torch.testing.assert_close(torch_compat.onednn_linear(x, weight, given), wanted)


def test_features_of_the_cpu() -> None:
    """An AVX-512 CPU multiplies float16 by this name, AMD's and Intel's before 2023 do not."""
    has_onednn = "USE_MKLDNN=ON" in torch.__config__.show()
    assert torch_compat.has_onednn() == has_onednn
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if flags:
        has_float16 = "avx512_fp16" in flags or "amx_fp16" in flags
        assert torch_compat.multiplies_float16() == has_float16
        assert torch_compat.has_avx512() == ("avx512f" in flags)
        assert torch_compat.has_avx512_bf16() == ("avx512_bf16" in flags)
        assert torch_compat.has_amx() == ("amx_tile" in flags and has_onednn)
        assert torch_compat.has_vnni() == ("avx512_vnni" in flags and has_onednn)


def test_multiply_int8() -> None:
    x, y = torch.randint(-128, 128, (2, 20, 24), dtype=torch.int8)
    wanted = x.to(torch.int32) @ y.t().to(torch.int32)
    found = torch_compat.multiply_int8(x, y.t())
    assert found.dtype is torch.int32
    assert torch.equal(found, wanted)
    same_rows, same_columns = y[:1].expand(20, 24), y[:, :1].expand(20, 24)
    for one, other in ((x[:1].expand(20, 24), y), (x, same_rows), (x, same_columns)):
        wanted = one.to(torch.int32) @ other.t().to(torch.int32)
        assert torch.equal(torch_compat.multiply_int8(one, other.t()), wanted)


def test_register_fake() -> None:
    library = torch_compat.new_library("opweave_canary")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x.clone(), "CPU")
    torch_compat.register_fake(library, "f", lambda x: x.new_empty(7))
    with FakeTensorMode() as mode:
        assert torch.ops.opweave_canary.f(mode.from_tensor(torch.zeros(2))).shape == (7,)
    assert torch.ops.opweave_canary.f(torch.zeros(2)).shape == (2,)


def test_remove_ops() -> None:
    for size in (7, 8):
        library = torch_compat.new_library("opweave_canary")
        library.define("g(Tensor x) -> Tensor")
        library.impl("g", lambda x, size=size: x.new_empty(size), "CPU")
        assert torch.ops.opweave_canary.g(torch.zeros(2)).shape == (size,)
        torch_compat.remove_ops(library)
        assert not hasattr(torch.ops.opweave_canary, "g")


def test_names_schemas_and_kinds_of_operators() -> None:
    assert all(map(torch_compat.is_taken_in_torch_ops, ("name", "__init__")))
    assert isinstance(torch.ops.opweave.name, str)
    assert not torch_compat.is_taken_in_torch_ops("rms_norm")
    assert "name" in torch_compat.namespace_attributes("opweave_test")
    assert torch_compat.is_op_namespace(torch.ops.aten)
    assert not torch_compat.is_op_namespace(torch.ops.load_library)
    assert isinstance(torch.ops.aten.add, torch_compat.OpOverloadPacket)
    assert isinstance(torch.ops.aten.add.Tensor, torch_compat.OpOverload)
    assert isinstance(torch.ops.higher_order.cond, torch_compat.HigherOrderOperator)
    assert torch_compat.parse_schema("f(Tensor x, float y=1.) -> Tensor").name == "f"
    with pytest.raises(RuntimeError):
        torch_compat.parse_schema("f(Tensor x, float y=inf) -> Tensor")
    with pytest.raises(Exception, match="item"):
        raise torch_compat.depends_on_values(torch.ops.aten.item.default)
    assert callable(torch_compat.lookup_backend("eager"))
    with pytest.raises(torch._dynamo.exc.InvalidBackend):
        torch_compat.lookup_backend("no_such_backend")


def test_graph_break() -> None:
    def breaking(x: Tensor) -> Tensor:
        torch_compat.graph_break("a reason of ours")
        return x + 1

    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a reason of ours"):
        torch.compile(breaking, backend="eager", fullgraph=True)(torch.zeros(1))
    torch.compiler.reset()
    assert torch.compile(breaking, backend="eager")(torch.zeros(1)).item() == 1


def test_size_hint() -> None:
    seen: list[int | None] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        seen.extend(torch_compat.size_hint(i.numel()) for i in inputs if isinstance(i, Tensor))
        return graph.forward

    torch.compiler.reset()
    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(torch.zeros(6, 7))
    assert seen == [42]
    assert torch_compat.size_hint(5) == 5


@pytest.mark.parametrize(
    ("bounds", "expected"), [({}, (2, float("inf"))), ({"min": 3, "max": 50}, (3, 50))]
)
def test_size_bounds(bounds: dict[str, int], expected: tuple[float, float]) -> None:
    seen: list[tuple[float, float] | None] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        values = [
            node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")
        ]
        for tensor in (value for value in values if isinstance(value, Tensor)):
            seen.extend(torch_compat.size_bounds(size) for size in tensor.shape)
        return graph.forward

    torch.compiler.reset()
    x = torch.zeros(6, 7)
    torch._dynamo.mark_dynamic(x, 0, **bounds)
    function = torch.compile(lambda x: x + 1, backend=backend)
    function(x)
    assert seen == [expected, (7, 7)]
    function(x.new_zeros(9, 7))
    assert len(seen) == 2  # no guard was added, so nothing is compiled again
    assert torch_compat.size_bounds(5) == (5, 5)
    assert torch_compat.size_bounds(None) is None


def test_tensor_length() -> None:
    found = [
        torch_compat.tensor_length(torch.zeros(s)) for s in ((), (0,), (3,), (0, 2), (5, 0), (4, 2))
    ]
    assert found == [0, 0, 3, 0, 5, 4]
    with pytest.raises(TypeError):
        torch_compat.tensor_length(None)  # type: ignore[arg-type]


def test_is_wrapper() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    assert torch_compat.is_wrapper(nested)
    assert not any(
        map(torch_compat.is_wrapper, (torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), 1))
    )


@pytest.mark.parametrize(
    ("machine", "expected"),
    [("x86_64", True), ("AMD64", True), ("aarch64", False), ("arm64", False)],
)
def test_is_x86(monkeypatch: pytest.MonkeyPatch, machine: str, expected: bool) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert torch_compat.is_x86() is expected


def test_no_torch_function() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(1)
        count = len(seen)
        with torch_compat.no_torch_function():
            torch.ones(1)
    assert count
    assert len(seen) == count


@pytest.mark.parametrize(
    "mark", [torch_compat.mark_dynamic, torch_compat.maybe_mark_dynamic], ids=lambda f: f.__name__
)
def test_mark_dynamic(mark: Callable[[Tensor, int], None]) -> None:
    sizes = []

    def backend(graph: Any, inputs: Any) -> Any:
        sizes.append([value for value in inputs if isinstance(value, torch.SymInt)])
        return graph

    x = torch.ones(4, 2)
    mark(x, 0)
    torch.compiler.reset()
    torch.compile(lambda t: t * 2, backend=backend)(x)
    assert len(sizes[0]) == 1


def test_a_group_after_one_that_could_not_be_joined_has_the_name_of_the_first() -> None:
    def join(size: int, seconds: float) -> None:
        timeout = timedelta(seconds=seconds)
        distributed.init_process_group(
            "gloo", store=distributed.HashStore(), rank=0, world_size=size, timeout=timeout
        )

    torch_compat.forget_failed_groups()
    with pytest.raises(distributed.DistStoreError):
        join(2, 0.1)
    torch_compat.forget_failed_groups()
    join(1, 5.0)
    try:
        assert distributed.group.WORLD.group_name == "0"
        torch_compat.forget_failed_groups()  # does nothing while there is one
        assert distributed.new_group([0]).group_name == "1"
    finally:
        distributed.destroy_process_group()


def names_of_torch(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a module takes from torch, spelled in full, and its line."""
    roots = {"torch": "torch"}  # name in the module -> what it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    roots[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                roots[alias.asname or alias.name] = full
                yield node.lineno, full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in roots:
                yield node.lineno, f"{roots[root]}.{rest}"


def private_names(source: str) -> list[str]:
    return [
        f"{line} {name}"
        for line, name in names_of_torch(ast.parse(source))
        if re.search(r"\._(?!_)", name) and re.fullmatch(r"[\w.]+", name)
    ]


def test_only_compat_modules_read_private_names_of_torch() -> None:
    found = {
        str(path.relative_to(SOURCE)): names
        for path in sorted(SOURCE.rglob("*.py"))
        if not path.name.endswith("compat.py")
        and (names := private_names(path.read_text(encoding="utf-8")))
    }
    assert not found, "move them to opweave.torch_compat or the compat module of the package"


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._subclasses import fake_tensor",
        "from torch.utils import _pytree as pytree",
        "def f():\n    import torch\n    return torch._C._get_tracing_state()",
        "import torch\ndef f(op: torch._ops.OpOverload): ...",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "import torch.nn.functional as F\nF._private(1)",
    ],
)
def test_the_search_finds_private_names(source: str) -> None:
    assert private_names(source)
    assert not private_names("import torch\ntorch.nn.functional.linear(x).__class__")
