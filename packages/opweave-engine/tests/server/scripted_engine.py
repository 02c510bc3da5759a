"""An engine that answers with the texts that a test wants."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from opweave_engine import CompletionOutput, RequestOutput, RequestTimings, SamplingParams
from opweave_engine.detokenizer import Detokenizer
from server.fake_engine import Call, FakeEngine


class ScriptedEngine(FakeEngine):
    """Answers every request with *texts*, one for each of its answers, token by token.

    Attributes:
        texts: of the answers.
        reason: why they end.
    """

    def __init__(self, *texts: str, reason: Any = "stop") -> None:
        super().__init__()
        self.texts, self.reason = texts, reason
        self.max_model_len = 4096

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.calls.append(Call(ids, params, request_id, priority))
        tokens = [self.tokenizer.encode(text, add_special_tokens=False) for text in self.texts]
        texts = [Detokenizer.of(self.tokenizer, ids, params) for _ in tokens]
        for count in range(1, max(map(len, tokens)) + 1):
            outputs = []
            for index, (answer, text) in enumerate(zip(tokens, texts, strict=True)):
                if count <= len(answer):
                    text.push(answer[count - 1])
                is_done = count >= len(answer)
                if is_done:
                    text.finish()
                reason = self.reason if is_done else None
                outputs.append(CompletionOutput(index, text.text, answer[:count], reason))
            finished = all(output.finish_reason for output in outputs)
            timings = RequestTimings(0.0, 0.0, 0.0)
            yield RequestOutput(request_id, None, ids, outputs, finished, timings)
