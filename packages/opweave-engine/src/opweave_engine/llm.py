"""Offline generation."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextvars import Context
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from opweave.config import EngineConfig
from opweave_engine.chat import ChatTemplate, Message, conversation
from opweave_engine.client import FairLock, make_core
from opweave_engine.core import PriorityLists, private_context
from opweave_engine.load.checkpoint import Checkpoint, Progress
from opweave_engine.load.loader import after_loading, reporting
from opweave_engine.metrics import EngineStats
from opweave_engine.outputs import RequestOutput
from opweave_engine.prompts import IOProcessors, Prompt, as_list, params_for
from opweave_engine.request import ActiveRequest
from opweave_engine.sampling.params import SamplingParams

_log = logging.getLogger(__name__)


class LLM:
    """A language model for offline generation. For encoders, see :class:`Embedder`.

    Thread-safe: each step computes the requests of all threads together.

    Args:
        model: the directory of a checkpoint.
        dtype: ``"auto"`` for the checkpoint's, or ``"float32"``, ``"bfloat16"`` or ``"float16"``,
            or the ``torch.dtype`` of that name.
        seed: seeds the sampling of requests without a seed.
        ir_op_priority: providers to prefer, by op; only for this object's forward passes.
        config: these and all other settings in one object.
        progress: called while loading, with the number of tensors loaded so far and in total; True:
            a bar on standard error, if that is a terminal.

    Raises:
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.
        InvalidArgumentError: (a ValueError) an argument is wrong, or conflicts with *config*.
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
        progress: Progress | bool | None = None,
    ) -> None:
        with reporting(progress, "loading", after_loading(config)) as report:
            core, self._priorities = make_core(model, dtype, seed, ir_op_priority, config, report)
        self._core, self.tokenizer, self.config = core, core.tokenizer, core.model_config
        self._checkpoint = Checkpoint(model)
        self._processors = IOProcessors(self._checkpoint, core.config)
        self._ids = count()
        self._lock = FairLock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress | bool | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """Generate outputs for *prompts*, batched; the results are in the same order.

        A request that fails while it runs leaves the others: its output has the ``error``, which is
        also logged. Only if all requests fail, the first error is raised. Arguments are checked
        before anything runs.

        Args:
            prompts: one or several prompts, each a text, a list of token ids, or a dict with
                ``prompt`` or ``prompt_token_ids`` and a ``cache_salt``: cached prefixes are shared
                only among prompts of the same salt.
            sampling_params: for all prompts, or one for each; None:
                :meth:`default_sampling_params`.
            progress: called with the number of tokens generated so far and the maximum; unused
                tokens of finished requests count as generated. True: a bar on
                standard error, if that is a terminal.
            add_special_tokens: add the tokenizer's special tokens; False if the texts already
                contain them.

        Raises:
            PromptError: a prompt is empty, too long, or has token ids outside the vocabulary.
            NonFiniteLogitsError: the logits of all requests are not finite.
        """
        texts = as_list(prompts)
        params = params_for(len(texts), sampling_params, self.default_sampling_params())
        # All prompts are checked before the first one runs.
        requests = [
            self._core.prepare(
                str(next(self._ids)), *item, streams=False, add_special_tokens=add_special_tokens
            )
            for item in zip(texts, params, strict=True)
        ]
        max_tokens = sum(request.max_tokens for request in requests)
        try:
            self._add(requests)
            with (
                private_context(self._priorities) as context,
                reporting(progress, "writing") as report,
            ):
                is_finished = not requests
                while not is_finished:
                    with self._lock.take():
                        is_finished = self._step(requests, context)
                    if report is not None:
                        report(sum(request.num_done for request in requests), max_tokens)
        finally:
            self._abort(requests)
        errors = [request.error for request in requests if request.error is not None]
        if errors and len(errors) == len(requests):
            raise errors[0]
        if errors:
            _log.error("%d of %d requests failed: %s", len(errors), len(requests), errors[0])
        return [request.output() for request in requests]

    def chat(
        self,
        /,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress | bool | None = None,
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or several.

        As in the server, messages are converted to the form that the template reads: content may be
        null, a string or text parts, and arguments of tool calls may be objects or JSON text.

        Args:
            messages: dicts with ``role`` and ``content``, as in OpenAI's API: a list of them for
                one conversation, a list of such lists for several.
            sampling_params: for all conversations, or one for each; None: the defaults.
            progress: as for :meth:`generate`.
            chat_template: a Jinja file, the template itself, or the name of one of the
                checkpoint's templates; None: the checkpoint's default.
            tools: the functions that the model may call.
            documents: the documents that the model may cite.
            add_generation_prompt: end the prompt with the header of an answer; None: unless the
                last message is continued.
            continue_final_message: end the prompt with the text of the last message, which the
                model continues.
            add_special_tokens: begin the prompt with the special tokens that the tokenizer adds,
                which most templates write themselves.
            chat_template_kwargs: variables of the template, by name.
            variables: the same, as keywords, if the template reads them.

        Raises:
            ChatTemplateError: there is no template, it refuses the messages, or it does not show
                the model the tools or documents.
            PromptError: *messages* are malformed, or a conversation is too long.
            UnexpectedKeywordError: (a TypeError) neither this method nor the template has a
                variable of that name.
            InvalidArgumentError: both *add_generation_prompt* and *continue_final_message* are set.
            NonFiniteLogitsError: as for :meth:`generate`.

        Example::

            llm.chat([{"role": "user", "content": "Hello"}])[0].outputs[0].text
        """
        if chat_template is None:
            template = self._chat_template
        else:
            template = conversation.template_for(self._checkpoint, chat_template)
        conversation.check_keywords(variables, template.chosen(tools), LLM.chat)
        texts = conversation.render_all(
            conversation.as_conversations(messages),
            template,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**conversation.checked_variables(chat_template_kwargs), **variables},
        )
        return self.generate(
            texts, sampling_params, progress, add_special_tokens=add_special_tokens
        )

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return conversation.template_for(self._checkpoint, None)

    def process(self, request: Any, *, io_processor: str | None = None) -> Any:
        """Process a request in the format of an I/O processor plugin.

        The plugin's :class:`~opweave_engine.prompts.IOProcessor` turns it into
        prompts, and their outputs into the result.

        Args:
            request: a request in the processor's format.
            io_processor: the plugin's name; None: the one that the checkpoint names.

        Raises:
            UnknownPluginError: (a LookupError) there is no such plugin.
            InvalidArgumentError: no I/O processor is named, or it is for encoders.
            PromptError: as for :meth:`generate`.
            NonFiniteLogitsError: the logits of a prompt are not finite.
        """
        processor = self._processors.get(io_processor, embeds=False)
        outputs = self.generate(processor.prompts(request), processor.sampling_params(request))
        for output in outputs:
            if output.error is not None:
                raise output.error
        return processor.result(request, outputs)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Iterator[RequestOutput]:
        """Yield the output of one prompt after each step, with everything generated so far.

        Text that may become a stop string is held back, so text never shrinks. Closing the iterator
        aborts the request.

        Raises:
            PromptError: the prompt is too long, or has token ids outside the vocabulary.
            NonFiniteLogitsError: the model's logits are not finite.
        """
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        request = self._core.prepare(
            str(next(self._ids)), prompt, params, add_special_tokens=add_special_tokens
        )
        try:
            self._add([request])
            num_done, is_finished = 0, False
            with private_context(self._priorities) as context:
                while not is_finished:
                    with self._lock.take():
                        is_finished = self._step([request], context)
                        is_new = is_finished or request.num_done > num_done
                        num_done, output = request.num_done, request.output()
                    if output.error is not None:
                        raise output.error
                    if is_new:
                        yield output
        finally:
            self._abort([request])

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the default sampling parameters.

        The checkpoint's ``generation_config.json`` sets them, unless the configuration has
        ``generation_config="none"``. :meth:`generate` uses the parameters that you pass unchanged;
        to override only some of the defaults, pass them here.

        Raises:
            SamplingParamsError: a value is out of range or of the wrong type.

        Example::

            llm.generate("Hello", llm.default_sampling_params(max_tokens=64))
        """
        return SamplingParams(**{**self._core.sampling_defaults, **changes})

    def stats(self) -> EngineStats:
        """Return the statistics since the engine started."""
        return self._core.stats()

    def shutdown(self) -> None:
        """Free the model, and stop the processes of other ranks; also called at exit.

        Aborts the requests of other threads; later prompts raise an error. A second call is a
        no-op.
        """
        with self._lock.take():
            self._core.shutdown()

    def _add(self, requests: Sequence[ActiveRequest]) -> None:
        with self._lock.take():
            for request in requests:
                self._core.add_request(request)

    def _step(self, requests: Sequence[ActiveRequest], context: Context) -> bool:
        """Compute a step unless *requests* have finished; return whether they have."""
        if not all(request.is_finished for request in requests):
            context.run(self._core.step)
        return all(request.is_finished for request in requests)

    def _abort(self, requests: Sequence[ActiveRequest]) -> None:
        self._lock.soon(partial(self._core.abort, [request.request_id for request in requests]))
