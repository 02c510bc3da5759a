"""An engine that answers with the texts that a test wants."""

from __future__ import annotations

from typing import Any

from opweave_engine import SamplingParams
from server.fake_engine import Answer, FakeEngine


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

    def answers(self, ids: list[int], params: SamplingParams) -> list[Answer]:
        answers = [self.tokenizer.encode(text, add_special_tokens=False) for text in self.texts]
        return [
            Answer(self.tokenizer, params, index, answer, self.reason)
            for index, answer in enumerate(answers)
        ]
