"""The queue: every stage, and every job of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast

from gpu_queue.job import ROOT, Job, Stage
from gpu_queue.sources import closure, files_in
from opweave import ir
from opweave.ir import IrOpImpl
from opweave.ir.priority import without_values
from opweave.kernels.wrap import Wrapped

STAGES = (
    Stage("smoke", repeats_first=True),
    Stage("conformance", share=0.25, repeats_first=True),
    Stage("decode"),
    Stage("prefill"),
    Stage("attention"),
    Stage("host"),
    Stage("kernels"),
    Stage("greedy"),
    Stage("compiled"),
)
CPU_PROVIDERS = ("opweave_c", "opweave_c_invariant", "vllm_c")  # C++ for the CPU
BATCHES = (1, 8, 64)
PROMPTS = (512, 4096)
POINTWISE = (
    "silu_and_mul",
    "gelu_and_mul",
    "rms_norm",
    "fused_add_rms_norm",
    "rotary_embedding",
    "static_quant_fp8",
    "dynamic_per_token_quant_fp8",
)
KERNELS = {
    "paged_attention": ((1, 8192), (16, 2048), (64, 2048)),
    "fused_add_rms_norm": ((16, 0), (2048, 0), (8192, 0)),
    "silu_and_mul": ((16, 0), (2048, 0), (8192, 0)),
}
_FAMILIES = ("llama", "mixtral", "deepseek", "gemma3", "mamba2")
_BODIES = "tests/runs/gpu_queue/bodies"
# Kernels and their definitions; the checks are those of the tests for the CPU.
_KERNELS = ("opweave.kernels", "opweave.ir.ops")
_ENGINE = (
    "packages/opweave-engine/src/opweave_engine",
    *(
        f"packages/opweave/src/opweave/{part}"
        for part in ("compile", "ir", "kernels", "layers", "platforms")
    ),
)


def all_jobs(device: str = "cuda", size: str = "full") -> list[Job]:
    """Return every job, in the order in which they run when none has run yet.

    Args:
        device: where: ``"cuda"``, or ``"cpu"`` to try them.
        size: of the models: ``"full"``, or ``"tiny"`` to try them.
    """
    return [
        *_implementations(device),
        *_generation(device, size),
        *_kernels(device),
        *_greedy(device),
    ]


def _implementations(device: str) -> Iterator[Job]:
    registry = ir.current_registry()
    registry.ensure_ready()
    found = [
        impl
        for op in registry.ops.values()
        for impl in op.impls.values()
        if impl.base not in CPU_PROVIDERS
    ]
    # opweave's kernels first, then those of installed libraries, then torch's own, the definitions.
    found.sort(key=lambda impl: (impl.provider == "native", impl.provider != "triton"))
    core = files_in("packages/opweave/src/opweave/ir")
    for impl in found:
        arguments = {"op": impl.op.name, "provider": impl.provider, "device": device}
        name = f"{impl.op.name}:{impl.provider}"
        kernel = partial(_sources, impl)
        yield Job(
            f"smoke/{name}", "smoke", "gpu_queue.bodies.smoke:run", 60, 2, arguments,
            lambda kernel=kernel: (*kernel("smoke"), *core), is_fresh=False,
        )  # fmt: skip
        yield Job(
            f"conformance/{name}", "conformance", "gpu_queue.bodies.conformance:run", 120, 15,
            arguments, partial(kernel, "conformance"), is_fresh=False,
        )  # fmt: skip
        yield Job(
            f"compiled/{name}", "compiled", "gpu_queue.bodies.conformance:run", 180, 40,
            {**arguments, "compiles": True}, partial(kernel, "conformance"), is_fresh=False,
        )  # fmt: skip


def _sources(impl: IrOpImpl, body: str) -> tuple[Path, ...]:
    functions = (impl.impl_fn, impl.op.native)
    files = [Path(_code(function).co_filename) for function in functions]
    if (wrapped := Wrapped.by(impl)) is not None:  # its code is generated, and not in a file
        files = [file for each in wrapped.named() if (file := each.file())]
        files.append(Path(_code(impl.op.native).co_filename))
    return (*closure([*files, Path(impl.site.file)], _KERNELS), *_body(body))


def _code(function: Callable[..., Any]) -> CodeType:
    return cast("FunctionType", inspect.unwrap(without_values(function))).__code__


def _body(*names: str) -> tuple[Path, ...]:
    return tuple(ROOT / _BODIES / f"{name}.py" for name in names)


def _generation(device: str, size: str) -> Iterator[Job]:
    own = {"opweave": 30, "opweave-compiled": 80}
    theirs = {"transformers": 30, "transformers-compiled": 90}
    shared: Mapping[str, Any] = {"device": device, "size": size}
    bodies = _body("generation", "models")

    def sources(contender: str) -> tuple[Path, ...]:
        return bodies if contender in theirs else (*files_in(*_ENGINE), *bodies)

    for batch in BATCHES:
        for contender, expected in {**own, **theirs}.items():
            yield Job(
                f"decode/{batch}/{contender}", "decode", "gpu_queue.bodies.generation:decode",
                240, expected, {"contender": contender, "batch": batch, **shared},
                partial(sources, contender),
            )  # fmt: skip
    for prompt in PROMPTS:
        for contender in ("opweave", "opweave-compiled", "transformers"):
            yield Job(
                f"prefill/{prompt}/{contender}", "prefill", "gpu_queue.bodies.generation:prefill",
                240, {**own, **theirs}[contender],
                {"contender": contender, "prompt": prompt, **shared}, partial(sources, contender),
            )  # fmt: skip


def _kernels(device: str) -> Iterator[Job]:
    sources = partial(
        files_in, "packages/opweave/src/opweave/kernels/triton", "packages/opweave/src/opweave/ir"
    )
    body = _body("kernels")
    on: Mapping[str, Any] = {"device": device}
    if device == "cpu":
        on = {**on, "provider": "native"}
    for tokens in PROMPTS:
        yield Job(
            f"attention/{tokens}", "attention", "gpu_queue.bodies.kernels:prompt_attention",
            90, 20, {"tokens": tokens, **on}, lambda: (*sources(), *body),
        )  # fmt: skip
    yield Job(
        "host/pointwise", "host", "gpu_queue.bodies.kernels:host",
        120, 30, {"ops": POINTWISE, **on}, lambda: (*sources(), *body),
    )  # fmt: skip
    for op, shapes in KERNELS.items():
        yield Job(
            f"kernels/{op}", "kernels", "gpu_queue.bodies.kernels:cells",
            180, 50, {"op": op, "shapes": shapes, **on}, lambda: (*sources(), *body),
        )  # fmt: skip


def _greedy(device: str) -> Iterator[Job]:
    for mode, name, limit, expected in ((0, "eager", 120, 30), (3, "compiled", 240, 90)):
        for family in _FAMILIES:
            yield Job(
                f"greedy/{family}/{name}", "greedy", "gpu_queue.bodies.greedy:run",
                limit, expected, {"family": family, "mode": mode, "device": device},
                lambda: (*files_in(*_ENGINE), *_body("greedy")),
            )  # fmt: skip
