"""Calls of adapters against the signatures of the installed libraries, which are not imported.

The signatures are read from the source, because most of these libraries need a GPU to be imported.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import IrOpImpl
from opweave.ir.schema import ADAPTERS
from opweave.kernels.libraries import flash_attn, flashinfer
from opweave.kernels.wrap import ModuleFunction, Wrapped

WRAPPED = [
    (impl, wrapped, function)
    for op in ir.current_registry().ops.values()
    for impl in op.impls.values()
    if (wrapped := Wrapped.by(impl)) is not None
    for function in wrapped.named()
]
PACKAGES = {function.name.partition(".")[0] for _, _, function in WRAPPED}
REQUIRED = {"flag_gems", "flashinfer", "liger_kernel", "quack"}  # requirements.txt
LARGE = {"flash_attn", "sgl_kernel"}  # requirements-large.txt


def signature_of(function: ModuleFunction) -> inspect.Signature:
    file = function.file()
    assert file is not None, f"{function.name}: no such module"
    name = function.name.partition(":")[2]
    found = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(found) == 1, f"{file} does not define {name}"
    return _signature(found[0])


def _signature(node: ast.FunctionDef) -> inspect.Signature:
    arguments = node.args
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [each and ast.Constant(None) for each in arguments.kw_defaults]
    same = ast.Lambda(arguments, ast.Constant(None))
    function = eval(compile(ast.fix_missing_locations(ast.Expression(same)), "<ast>", "eval"))
    return inspect.signature(function)


def bind(wrapped: Wrapped, function: ModuleFunction) -> None:
    """Raise TypeError if the arguments do not fit the parameters of *function*."""
    given, signature = wrapped.arguments, signature_of(function)
    if isinstance(given, Mapping):
        signature.bind(**given)
    else:
        signature.bind(*given)


def test_every_library_is_checked() -> None:
    assert PACKAGES >= REQUIRED
    assert PACKAGES <= REQUIRED | LARGE
    assert {each for each in LARGE if find_spec(each)} <= PACKAGES
    assert {impl.provider for impl, _, _ in WRAPPED} <= {*ADAPTERS}


@pytest.mark.parametrize(
    ("impl", "wrapped", "function"),
    WRAPPED,
    ids=[f"{impl.op.name}:{function.name}" for impl, _, function in WRAPPED],
)
def test_the_call_fits(impl: IrOpImpl, wrapped: Wrapped, function: ModuleFunction) -> None:
    assert function.obstacle() is None
    bind(wrapped, function)


def test_no_library_is_imported() -> None:
    assert not PACKAGES & sys.modules.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x"], "missing a required argument: 'weight'"),
        (["x", "weight", 1e-6, None], "too many positional arguments"),
        ({"x": "x", "weight": "weight", "epsilon": 1e-6}, "unexpected keyword argument 'epsilon'"),
    ],
)
def test_a_call_that_does_not_fit(
    arguments: list[object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_norms").mkdir()
    (tmp_path / "acme_norms" / "__init__.py").write_text("raise ImportError('no GPU')")
    code = "def norm(x: Tensor, weight: Tensor, eps: float = EPSILON, *, out=None): ..."
    (tmp_path / "acme_norms" / "rms.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    function = ModuleFunction("acme_norms.rms:norm")
    bind(Wrapped(function, ["x", "weight", 1e-6]), function)
    with pytest.raises(TypeError, match=message):
        bind(Wrapped(function, arguments), function)
    with pytest.raises(AssertionError, match="does not define sum"):
        signature_of(ModuleFunction("acme_norms.rms:sum"))


# Calls that adapters make themselves: plans of FlashInfer, decodes of FlashAttention.


def _definition(module: str, *path: str) -> inspect.Signature:
    """Return the signature of a function or method in the source of an installed module."""
    file = ModuleFunction(f"{module}:{path[0]}").file()
    assert file is not None, f"{module}: no such module"
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    for name in path[:-1]:
        [body] = [n.body for n in body if isinstance(n, ast.ClassDef) and n.name == name]
    # Of overloads, the last one is the implementation.
    *_, found = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == path[-1]]
    return _signature(found)


def _bound(wrapper: str, method: str) -> inspect.Signature:
    if "MLA" in wrapper:
        return _definition("flashinfer.mla._batch_mla._wrapper", wrapper, method)
    module = "flashinfer.decode" if "Decode" in wrapper else "flashinfer.prefill"
    name = "_plan_impl" if (method, module) == ("plan", "flashinfer.decode") else method
    return _definition(module, wrapper, name)


class _Utils:
    @staticmethod
    def is_sm90a_supported(*args: Any) -> bool:
        _definition("flashinfer.utils", "is_sm90a_supported").bind(*args)
        return True


class _Metadata:
    @staticmethod
    def csr(*args: Any) -> _Metadata:
        module = flashinfer.LATENT_METADATA.name.partition(":")[0]
        _definition(module, "MLAPlanMetadata", "csr").bind(None, *args)
        return _Metadata()


class _Library:
    """FlashInfer's wrappers, with the signatures of the installed ones."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @property
    def mla(self) -> _Library:
        return self

    @property
    def utils(self) -> _Utils:
        return _Utils()

    def __getattr__(self, wrapper: str) -> Any:
        if wrapper == "MLAPlanMetadata":
            return _Metadata

        def construct(*args: Any, **kwargs: Any) -> Any:
            return _Wrapper(self, wrapper, args, kwargs)

        return construct


class _Wrapper:
    def __init__(self, library: _Library, name: str, args: Any, kwargs: Any) -> None:
        self._library, self._name = library, name
        self._call("__init__", args, kwargs)

    def _call(self, method: str, args: Any, kwargs: Any) -> None:
        _bound(self._name, method).bind(self, *args, **kwargs)
        self._library.calls.append(f"{self._name}.{method}")

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._call("plan", args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        self._call("run", args, kwargs)
        if args:
            return torch.zeros_like(args[0])
        return torch.zeros_like(kwargs["query"][..., :512])


@pytest.mark.parametrize(
    ("counts", "is_recorded"), [((1, 1), False), ((1, 1), True), ((1, 5), False)]
)
def test_plans_of_flashinfer(
    counts: tuple[int, int], is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _Library()
    monkeypatch.setattr(flashinfer, "import_module", lambda name: library)
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 16)
    starts, lengths = [0, counts[0], sum(counts)], [9, 30]
    tables, seq_lens, cu_seqlens_q = (
        torch.tensor(x, dtype=torch.int32) for x in ([[1, 2], [3, 0]], lengths, starts)
    )
    ir.note_lengths(seq_lens, cu_seqlens_q, lengths, starts, is_recorded=is_recorded)
    query, cache = torch.zeros(sum(counts), 4, 64), torch.zeros(4, 2, 16, 64)
    options = 0.5, True, None, 30.0
    flashinfer._paged_attention(query, cache, cache, tables, seq_lens, cu_seqlens_q, *options)
    kind = "Decode" if counts == (1, 1) else "Prefill"
    wrapper = f"Batch{kind}WithPagedKVCacheWrapper"
    assert library.calls == [f"{wrapper}.{method}" for method in ("__init__", "plan", "run")]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_plans_of_latent_attention(is_recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Library()
    monkeypatch.setattr(flashinfer, "import_module", lambda name: library)
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 16)
    lengths, starts = [9, 30], [0, 1, 2]
    tables, seq_lens, cu_seqlens_q = (
        torch.tensor(x, dtype=torch.int32) for x in ([[1, 2], [3, 0]], lengths, starts)
    )
    ir.note_lengths(seq_lens, cu_seqlens_q, lengths, starts, is_recorded=is_recorded)
    tensors = torch.zeros(2, 4, 192), torch.zeros(4, 16, 576), torch.zeros(4 * 256, 512)
    out = flashinfer._mla_attention_decode(*tensors, tables, seq_lens, cu_seqlens_q, None)
    assert out.shape == (2, 4, 128)
    wrapper = "BatchMLAPagedAttentionWrapper"
    assert library.calls == [f"{wrapper}.{method}" for method in ("__init__", "plan", "run")]


def test_sizes_of_latent_attention() -> None:
    """The sizes are those that the library names, and its backends for recorded plans exist."""
    file = ModuleFunction("flashinfer.mla._core:deepseek_mla_dimensions").file()
    assert file is not None
    sizes = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MLAHeadDimensions":
            named = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
            sizes.add((named["kv_lora_rank"], named["qk_rope_head_dim"]))
    assert {*flashinfer.LATENT_SIZES} == {(latent, rope) for latent, rope in sizes if rope}
    names = [ir.ops.mla_attention_decode.impls["flashinfer"].unsupported_reason]
    assert names != [flashinfer._TOO_OLD]
    for backend in ("fa2", "fa3"):
        name = f"flashinfer.mla._batch_mla._backends.{backend}_backend:_"
        source = ModuleFunction(name).file()
        assert source is not None
        assert "supports_cuda_graph_replan=True" in source.read_text()


@pytest.mark.skipif(not find_spec("flash_attn"), reason="make test-libraries-large installs it")
def test_decodes_of_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        signature_of(flash_attn.DECODE).bind(*args, **kwargs)
        calls.append(1)
        return torch.zeros_like(args[0])

    monkeypatch.setattr(flash_attn, "_decode", lambda: kernel)
    tensors = [torch.tensor(x, dtype=torch.int32) for x in ([[1]], [9], [0, 1])]
    ir.note_lengths(*tensors[1:], [9], [0, 1])
    query, cache = torch.zeros(1, 4, 64), torch.zeros(4, 2, 256, 64)
    flash_attn._paged_attention(query, cache, cache, *tensors, 0.5, True, None, 30.0)
    assert calls
