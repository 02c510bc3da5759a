"""The model runner: decodes and prompts in forwards of their own."""

from __future__ import annotations

from collections.abc import Sequence

from acme_device.engine.usage import usage
from opweave_engine.decode_graphs import SequenceStep
from opweave_engine.errors import NonFiniteLogitsError
from opweave_engine.runner import ModelRunner
from opweave_engine.sampling.sampler import Sampled


class AcmeModelRunner(ModelRunner):
    """Runs the sequences with one new token first, then the others.

    The device is loaded with a program for each of the two, so that a step that has both is two
    forwards. Rows do not depend on what is computed next to them, and so neither do the tokens.
    """

    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        decodes = [step for step in steps if len(step.token_ids) == 1]
        prompts = [step for step in steps if len(step.token_ids) > 1]
        sampled: list[Sampled] = []
        if decodes:
            usage.decode_forwards += 1
            sampled += super().execute(decodes)
        if prompts:
            usage.prompt_forwards += 1
            try:
                sampled += super().execute(prompts)
            except NonFiniteLogitsError as error:
                # The engine asks which rows of the step, in which those of the decodes come first.
                rows = [len(sampled) + row for row in error.rows]
                raise NonFiniteLogitsError(str(error), rows) from error
        return sampled
