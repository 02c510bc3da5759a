"""Offline generation: prompts in, answers out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from contextvars import Context
from pathlib import Path
from typing import TypeVar

import torch

from opweave.config import EngineConfig, compilation_config
from opweave.engine.checkpoint import Checkpoint
from opweave.engine.compilation import check_backend
from opweave.engine.completion import Completion
from opweave.engine.errors import InvalidArgumentError
from opweave.engine.loader import Progress, check_dtype, load_model
from opweave.engine.model_runner import ModelRunner
from opweave.engine.outputs import RequestOutput
from opweave.engine.priorities import PriorityLists, engine_priorities, private_context
from opweave.engine.prompts import Prompt, PromptReader, as_list, params_for
from opweave.engine.sampler import SamplingRequest, sample
from opweave.engine.sampling_params import SamplingParams
from opweave.engine.sequence import Sequence
from opweave.engine.tokenizer import IncrementalDecoder, Tokenizer
from opweave.layers.unused import warn_of_unused_ops

T = TypeVar("T")

MAX_RUNNING = 64  # sequences that decode together
MAX_PREFILL_TOKENS = 2048  # prompt tokens in one forward; a longer prompt goes alone


class LLM:
    """A language model that answers prompts.

    Args:
        model: the directory of a checkpoint.
        dtype: ``"auto"`` for the checkpoint's, or ``"float32"``, ``"bfloat16"`` or ``"float16"``,
            or the ``torch.dtype`` of that name.
        seed: seeds the sampling of requests that bring no seed of their own.
        ir_op_priority: which kernels to prefer, by op; holds for this object's forwards only.
        config: the same settings, and more, in one object; how to compile is one of them.
        progress: called while loading, with the number of tensors loaded so far and in total.

    Raises:
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.
        InvalidArgumentError: (a ValueError) an argument is wrong, or given differently in *config*.
        IrError: an op or provider is unknown.

    Example::

        llm = LLM("path/to/checkpoint")
        print(llm.generate("Hello")[0].outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        ir_op_priority: PriorityLists | None = None,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
    ) -> None:
        given = EngineConfig() if config is None else config
        if not isinstance(given, EngineConfig):
            raise InvalidArgumentError(f"config={config!r} is no EngineConfig.")
        dtype = check_dtype(_once("dtype", check_dtype(dtype), given.dtype, default="auto"))
        seed = _check_seed(_once("seed", seed, given.seed, default=0))
        self._priorities = engine_priorities(ir_op_priority, given)
        check_backend(given.compilation)
        self.tokenizer = Tokenizer(Checkpoint(model))
        with compilation_config(given.compilation) as compiling:
            loaded = load_model(model, dtype=dtype, progress=progress)
        warn_of_unused_ops(compiling)
        self._runner = ModelRunner(loaded, compiling)
        self.config = self._runner.model.config
        self._prompts = PromptReader(
            self.tokenizer, self.config.vocab_size, self.config.max_position_embeddings
        )
        self._seeds = torch.Generator().manual_seed(seed)

    def generate(
        self,
        prompts: Prompt | Items[Prompt],
        sampling_params: SamplingParams | Items[SamplingParams] | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answer *prompts*, several at a time; the results are in their order.

        Args:
            prompts: one text or several; or token ids, of one prompt or of several.
            sampling_params: for all prompts, or one for each; None: the defaults.
            progress: called with the number of tokens generated so far, and the most there can
                be; those that a finished request did not need count as generated.

        Raises:
            PromptError: a prompt is empty, too long or not made of the model's tokens.
            NonFiniteLogitsError: the model's scores are not numbers.
        """
        texts = as_list(prompts)
        params = params_for(len(texts), sampling_params)
        # All prompts are checked before the first one runs.
        tokens = [self._prompts.tokens(prompt) for prompt in texts]
        sequences = [self._sequence(*item) for item in zip(texts, tokens, params, strict=True)]
        waiting, running = deque(sequences), list[Sequence]()
        most = sum(sequence.max_tokens for sequence in sequences)
        with private_context(self._priorities) as context:
            while waiting or running:
                admitted = _admit(waiting, MAX_RUNNING - len(running))
                self._step(admitted or running, context)
                running = [s for s in running + admitted if s.finish_reason is None]
                if progress is not None:
                    progress(sum(s.num_done for s in sequences), most)
        return [sequence.output() for sequence in sequences]

    def _step(self, batch: list[Sequence], context: Context) -> None:
        logits = context.run(self._runner.forward, batch)
        tokens = sample(logits, [sequence.sampling for sequence in batch])
        for sequence, token in zip(batch, tokens, strict=True):
            sequence.append(token)

    def _sequence(self, prompt: Prompt, tokens: list[int], params: SamplingParams) -> Sequence:
        room = self.config.max_position_embeddings - len(tokens)
        return Sequence(
            prompt if isinstance(prompt, str) else None,
            tokens,
            SamplingRequest(params, self._generator(params)),
            Completion(IncrementalDecoder(self.tokenizer, tokens), params.stop),
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            eos_token_ids=frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids,
        )

    def _generator(self, params: SamplingParams) -> torch.Generator:
        seed = params.seed
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), generator=self._seeds))
        return torch.Generator().manual_seed(seed)


def _admit(waiting: deque[Sequence], places: int) -> list[Sequence]:
    """Take the prompts that one forward can compute: at least one, if there is a place."""
    admitted: list[Sequence] = []
    tokens = 0
    while waiting and len(admitted) < places:
        tokens += waiting[0].num_prompt_tokens
        if admitted and tokens > MAX_PREFILL_TOKENS:
            break
        admitted.append(waiting.popleft())
    return admitted


def _once(name: str, direct: T, configured: T, *, default: T) -> T:
    if default not in (direct, configured) and direct != configured:
        raise InvalidArgumentError(
            f"{name} is given twice: {direct!r}, and {configured!r} in config. Give it once."
        )
    return configured if direct == default else direct


def _check_seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InvalidArgumentError(f"seed={seed!r} must be an integer from 0.")
    return seed
