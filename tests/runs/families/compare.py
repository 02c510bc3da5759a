"""Run the engine on a tiny checkpoint of an architecture, and compare it with transformers."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opweave.config import EngineConfig
from opweave.config.engine import CacheConfig
from opweave_engine import LLM, EngineError, RequestOutput, SamplingParams
from opweave_engine.models import ModelError
from runs.families.oracle import COUNT, Continuation, reference

TOLERANCE = 1e-3  # of log-probabilities
_PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=0)


@dataclass(frozen=True)
class Result:
    """How the engine did on one architecture.

    Attributes:
        name: of the architecture or variant.
        status: ``"equal"``, ``"different"``, ``"refused"`` (by the engine), ``"failed"`` (in any
            other way), or ``"not built"`` (transformers itself cannot run it).
        ran: how the engine ran the model.
        detail: what differs, the error, or why the engine does not run the model in a faster way.
        seconds: for all of it.
    """

    name: str
    status: str
    ran: str = ""
    detail: str = ""
    seconds: float = 0.0


def compare(name: str, model_impl: Any = "auto") -> list[Result]:
    """Compare greedy tokens and their log-probabilities, of single prompts and of all together.

    Args:
        name: of an architecture or variant.
        model_impl: as in :class:`~opweave.config.EngineConfig`. "auto": a model that opweave
            implements itself is compared with transformers' code, too.
    """
    start = time.perf_counter()
    try:
        model, wanted = reference(name)
    except Exception as error:
        return [Result(name, "not built", detail=line(error))]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        model.save_pretrained(path)
        del model
        results = [_run(name, path, wanted, model_impl)]
        if results[0].ran == "native" and model_impl == "auto":
            results.append(_run(name, path, wanted, "transformers"))
    seconds = (time.perf_counter() - start) / len(results)
    return [replace(result, seconds=seconds) for result in results]


def _run(name: str, path: Path, wanted: Sequence[Continuation], model_impl: Any) -> Result:
    config = EngineConfig(
        model_impl=model_impl,
        generation_config="none",
        cache=CacheConfig(block_size=16, memory_bytes=64 << 20),
    )
    ran, warnings = "", _Warnings()
    try:
        with warnings:
            llm = LLM(path, dtype="float32", config=config)
        ran = _how(llm)
        prompts = [each.prompt for each in wanted]
        together = llm.generate(prompts, _PARAMS)
        single = [llm.generate(prompt, _PARAMS)[0] for prompt in prompts]
        llm.shutdown()
    except (ModelError, EngineError) as error:
        return Result(name, "refused", ran, line(error))
    except Exception as error:
        return Result(name, "failed", ran, line(error))
    for kind, outputs in (("together", together), ("alone", single)):
        for expected, output in zip(wanted, outputs, strict=True):
            if difference := _difference(expected, output):
                prompt = f"{len(expected.prompt)} tokens {kind}"
                return Result(name, "different", ran, f"{prompt}: {difference}")
    return Result(name, "equal", ran, warnings.text)


class _Warnings(logging.Handler):
    """Collects what is logged about a model of transformers while the block runs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self._log = logging.getLogger("opweave_engine.transformers")

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:300]

    def __enter__(self) -> None:
        self._log.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)


def _how(llm: LLM) -> str:
    worker: Any = llm._core.executor.worker  # type: ignore[attr-defined]
    sequences = getattr(worker.runner.model, "sequences", None)
    return "native" if sequences is None else type(sequences).__name__.removesuffix("Sequences")


def _difference(expected: Continuation, output: RequestOutput) -> str:
    (answer,) = output.outputs
    if answer.token_ids != expected.tokens:
        return f"{answer.token_ids}, not {expected.tokens}"
    assert answer.logprobs is not None
    off = max(
        abs(found[token].logprob - logprob)
        for token, found, logprob in zip(
            expected.tokens, answer.logprobs, expected.logprobs, strict=True
        )
    )
    return f"log-probabilities differ by {off:.2g}" if off > TOLERANCE else ""


def line(error: BaseException) -> str:
    """Return the type and the start of the message of *error* in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
