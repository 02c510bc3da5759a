"""Builds requests from prompts and sampling parameters."""

from __future__ import annotations

from itertools import count

from opweave.platforms import Platform
from opweave_engine.request.active_request import ActiveRequest
from opweave_engine.request.detokenized_output import DetokenizedOutput
from opweave_engine.request.prompts import Prompt, PromptReader, split_prompt
from opweave_engine.request.request import Request, check_priority
from opweave_engine.sampling.bad_words import BadWords
from opweave_engine.sampling.randomness import derived_seed
from opweave_engine.sampling.sampling_params import SamplingParams, check_params
from opweave_engine.sampling.seeds import RequestSeeds
from opweave_engine.sampling.token_mask import token_mask
from opweave_engine.structured.grammar_compiler import GrammarCompiler
from opweave_engine.tokenization.detokenizer import Detokenizer


class RequestFactory:
    """Turns prompts and sampling parameters into requests that the engine can run.

    Args:
        prompts: tokenizes prompts and checks their length.
        grammars: compiles the grammars of structured outputs.
        platform: may reject a request.
        eos_token_ids: the model's end-of-text tokens.
        seed: of the engine; requests without a seed derive theirs from it.
    """

    def __init__(
        self,
        prompts: PromptReader,
        grammars: GrammarCompiler,
        platform: Platform,
        eos_token_ids: frozenset[int],
        seed: int,
    ) -> None:
        self.prompts, self.seeds = prompts, RequestSeeds(seed)
        self._grammars, self._platform = grammars, platform
        self._eos_token_ids = eos_token_ids
        self._numbers = count()

    def tokens(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the tokens of one prompt, truncated as *params* ask.

        Raises:
            PromptError: the prompt is empty, too long, or has token ids outside the vocabulary.
        """
        keep = None if params is None else params.prompt_limit(self.prompts.max_positions)
        return self.prompts.tokens(prompt, add_special_tokens=add_special_tokens, keep=keep)

    def make(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        streams: bool = True,
        deltas: bool = False,
        add_special_tokens: bool = True,
    ) -> ActiveRequest:
        """Return a new request; see :meth:`EngineCore.prepare`."""
        check_params(params)
        check_priority(priority)
        content, salt = split_prompt(prompt)
        tokenizer, size = self.prompts.tokenizer, self.prompts.vocab_size
        tokens = self.tokens(content, params, add_special_tokens=add_special_tokens)
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        bad_words, allowed = BadWords(params.bad_words, tokenizer), params.allowed_token_ids
        params.check_vocabulary(size, eos, bad_words.single)
        mask = None if allowed is None else token_mask(allowed, size)
        self._platform.validate_request(params)
        room = self.prompts.max_positions - len(tokens)
        seed = self.seeds.of(params)
        outputs = [
            DetokenizedOutput(
                index,
                Request(self._sequence_id(request_id), tokens, priority=priority, cache_salt=salt),
                params,
                derived_seed(seed, index),
                Detokenizer.of(tokenizer, tokens, params),
                max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
                eos_token_ids=eos,
                grammar=self._grammars.start(params),
                allowed=mask,
                bad_words=bad_words,
            )
            for index in range(params.n)
        ]
        # The prefix cache stores no logits, so prompt logprobs need the whole prompt computed.
        outputs[0].request.uses_prefix = params.prompt_logprobs is None
        text = content if isinstance(content, str) else None
        return ActiveRequest(request_id, text, outputs, streams=streams, deltas=deltas)

    def _sequence_id(self, request_id: str) -> str:
        """Return a unique name for a sequence, even if request ids contain ``#``."""
        return f"{request_id}#{next(self._numbers)}"
