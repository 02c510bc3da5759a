"""Transformers models with the engine's interface of models and encoders."""

import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.ir.errors import described
from opweave.layers.mamba_states import SequenceStates, StateCache, StatefulLayer, states_of
from opweave.layers.parallel import TensorParallel, current_tensor_parallel
from opweave.layers.registry import ShardingError
from opweave.optimization import optimize
from opweave_engine.models.causal_lm import LanguageModel
from opweave_engine.models.config import UnsupportedModelError
from opweave_engine.models.forward_context import ForwardContext, forward_context
from opweave_engine.transformers import attention
from opweave_engine.transformers.attention import NotSuitableError

# The two halves of a causal transformers model: hidden states and logits.


class Halves(nn.Module):
    """Computes hidden states with the base model, and logits with everything after it.

    Args:
        causal_lm: a causal language model of transformers.
        base: the module of it that computes the last hidden states.
        output_class: of the results of *base*.
    """

    def __init__(self, causal_lm: Any, base: Any, output_class: Any) -> None:
        super().__init__()
        self.causal_lm, self.base, self._output_class = causal_lm, base, output_class

    @classmethod
    def of(cls, causal_lm: Any, tokens: Tensor) -> tuple[Self, Tensor]:
        """Find the base model, and return the logits ``(T, vocab_size)`` of *tokens*, too.

        Raises:
            UnsupportedModelError: no module returns hidden states.
        """
        bases: list[tuple[Any, Any]] = []

        def note(module: nn.Module, _: Any, output: Any) -> None:
            if module is not causal_lm and hasattr(output, "last_hidden_state"):
                bases.append((module, type(output)))

        with ExitStack() as hooks:
            for module in causal_lm.modules():
                hooks.callback(module.register_forward_hook(note).remove)
            logits: Tensor = causal_lm(input_ids=tokens[None], use_cache=False).logits
        if not bases:
            raise UnsupportedModelError(
                f"{type(causal_lm).__name__} has no base model that returns hidden states."
            )
        # The outermost module is the last to return.
        return cls(causal_lm, *bases[-1]), logits[0]

    def hidden(self, input_ids: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """Return the hidden states ``(T, hidden_size)`` of one row of tokens, and all outputs.

        Args:
            input_ids: ``(T,)``, integer.
            options: further arguments of the base model.
        """
        output = self.base(input_ids=input_ids[None], **options)
        return output[0][0], output

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``(N, vocab_size)`` of ``(N, hidden_size)``.

        The model's own forward runs with *hidden* in place of its base model's result, so that
        scaling, soft caps and biases are the model's.
        """
        output = self._output_class(last_hidden_state=hidden[None])
        # Some models look at the shape of the ids.
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        vars(self.base)["forward"] = lambda *args, **kwargs: output
        try:
            logits: Tensor = self.causal_lm(input_ids=ids, use_cache=False).logits
        finally:
            del vars(self.base)["forward"]
        return logits[0]


def ropes_by_length(config: Any) -> set[str]:
    """Return the rope types of a configuration whose frequencies depend on a sequence's length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # Of all layers, or by kind of layer.
    ropes = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    kinds = {kind for rope in ropes if isinstance(kind := rope.get("rope_type"), str)}
    return kinds & {"dynamic", "longrope"}


# Forwards of packed sequences, with attention over the engine's paged cache.


class PackedSequences(nn.Module):
    """Computes packed sequences in one forward of a model.

    Args:
        halves: the model, whose attention layers have been recorded.
    """

    description: ClassVar[str] = "on packed sequences, with a paged cache"

    def __init__(self, halves: Halves) -> None:
        super().__init__()
        self.halves = halves

    @classmethod
    def of(cls, halves: Halves, tokens: Tensor, undo: ExitStack) -> Self:
        """Replace the attention of a model.

        Args:
            halves: the model.
            tokens: ``(T,)``: a sequence to record its attention layers with.
            undo: gets what brings back the model's attention.

        Raises:
            NotSuitableError: the model needs more than attention to earlier tokens.
        """
        model: Any = halves.causal_lm
        if by_length := ropes_by_length(model.config.get_text_config(decoder=True)):
            raise NotSuitableError(f"its rope ({', '.join(by_length)}) depends on the length")
        undo.callback(attention.remove, model, model.config._attn_implementation)
        attention.install(model)
        with attention.recording() as recorder:
            cls(halves).forward(tokens, torch.arange(len(tokens), device=tokens.device))
        if not recorder.callers:
            raise NotSuitableError("its layers do not use transformers' attention interface")
        return cls(halves)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states: ``(T, hidden_size)``."""
        hidden, _ = self.halves.hidden(input_ids, position_ids=positions[None], use_cache=False)
        return hidden


# Forwards that run one sequence at a time, for models that do not support packed sequences.


# The names under which models take their cache, and return it.
_CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state")


class RecomputedSequences(StatefulLayer):
    """Computes all tokens of a sequence in every step, without a cache.

    The engine gives each sequence a slot, as for layers with recurrent states; a slot holds the
    tokens of its sequence.

    Args:
        halves: the model.
    """

    description: ClassVar[str] = "one sequence at a time, and computes all its tokens in every step"

    def __init__(self, halves: Halves) -> None:
        super().__init__("sequences")
        # Every sequence counts one element, so that the engine can size the cache.
        self.state_shapes = {"conv": (1,)}
        self.halves = halves
        self._slots: dict[int, tuple[Tensor, Any]] = {}  # the tokens and the cache of each

    @classmethod
    def of(cls, halves: Halves, tokens: Tensor, undo: ExitStack) -> Self:
        """Return the forward of a model. The other arguments are those of packed sequences."""
        return cls(halves)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states ``(T, hidden_size)`` of the new tokens of packed sequences."""
        states = states_of(input_ids)
        ends, hidden = states.query_start_loc.tolist(), []
        for first, end, slot in zip(ends[:-1], ends[1:], states.slot_idx.tolist(), strict=True):
            if positions[first] == 0:
                self._slots.pop(slot, None)
            tokens, cache = self._slots.get(slot, (input_ids[:0], None))
            tokens = torch.cat([tokens, input_ids[first:end]])
            rows, cache = self.compute(tokens, end - first, cache)
            hidden.append(rows)
            if slot >= 0:  # a warm-up has the slot -1, and stores nothing
                self._slots[slot] = tokens, cache
        return torch.cat(hidden)

    def compute(self, tokens: Tensor, new: int, cache: Any) -> tuple[Tensor, Any]:
        """Return the hidden states of the last *new* tokens, and the sequence's cache.

        Args:
            tokens: ``(T,)``: the sequence up to here.
            new: how many of them have not been computed yet.
            cache: what was returned for the earlier ones; None for a new sequence.
        """
        hidden, _ = self.halves.hidden(tokens, use_cache=False)
        return hidden[-new:], None


class CachedSequences(RecomputedSequences):
    """Keeps the model's own cache of each sequence.

    The next token is computed with the cache. Several tokens that follow cached ones are computed
    together with those, in a new cache: recurrent layers of transformers continue with one token at
    a time only.

    Raises:
        NotSuitableError: the model does not take a cache.
    """

    description: ClassVar[str] = "one sequence at a time, with the model's own cache"

    def __init__(self, halves: Halves) -> None:
        super().__init__(halves)
        parameters = inspect.signature(halves.base.forward).parameters
        names = [name for name in _CACHE_ARGUMENTS if name in parameters]
        if not names:
            raise NotSuitableError("it does not take a cache")
        self._name, self._takes_positions = names[0], "position_ids" in parameters
        config = halves.causal_lm.config.get_text_config(decoder=True)
        self._may_be_outdated = bool(ropes_by_length(config))

    def _still_valid(self, tokens: Tensor, cache: Any) -> Any:
        """Return *cache*, or None if the model discards it for the last of *tokens*.

        Models whose rope depends on the length discard it where the rope changes: in
        ``prepare_inputs_for_generation``, which transformers' ``generate`` calls before each step.
        """
        prepared = self.halves.causal_lm.prepare_inputs_for_generation(
            tokens[None], next_sequence_length=1, use_cache=True, **{self._name: cache}
        )
        return prepared.get(self._name)

    def compute(self, tokens: Tensor, new: int, cache: Any) -> tuple[Tensor, Any]:
        options: dict[str, Any] = {"use_cache": True}
        if cache is not None and new == 1 and self._may_be_outdated:
            cache = self._still_valid(tokens, cache)
        if cache is None or new > 1:
            hidden, output = self.halves.hidden(tokens, **options)
            return hidden[-new:], getattr(output, self._name)
        if self._takes_positions:
            options["position_ids"] = torch.full_like(tokens[:1], len(tokens) - 1)[None]
        hidden, output = self.halves.hidden(tokens[-1:], **options, **{self._name: cache})
        return hidden, getattr(output, self._name)


# Shard the linear layers of a transformers model over tensor-parallel ranks.
#
# The model's plan lists the layers and their styles, by patterns such as
# ``model.layers.*.self_attn.q_proj``. Layers without an entry, and experts, are replicated.


# Parts of the output, which the next layer takes or which are gathered.
_COLUMNS, _GATHERED_COLUMNS = "colwise", "colwise_gather_output"
# Parts of the input, which the layer before gives or which are taken here. The results are added.
_ROWS, _SPLIT_ROWS = "rowwise", "rowwise_split_input"
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")


def first_rank(size: int) -> TensorParallel:
    """Return the first of *size* ranks, for a model that is built or checked, but not run."""

    def not_called(x: Tensor, dim: int = -1) -> Tensor:
        raise AssertionError("a model that is only checked needs no other ranks")

    return TensorParallel(0, size, not_called, not_called)


def check_ranks(model: Any, size: int) -> None:
    """Check that *model* can be divided over *size* ranks; it may be on the meta device.

    Raises:
        ShardingError: it cannot.
    """
    name, planned = type(model).__name__, dict(_planned(model))
    if not {style for _, style in planned.values()} & {_COLUMNS, _ROWS, _SPLIT_ROWS}:
        raise ShardingError(
            f"{name} runs by transformers' code, whose tensor-parallel plan does not divide its "
            f"layers, so that it cannot run on {size} ranks. Use tensor_parallel_size=1."
        )
    parallel = first_rank(size)
    text = model.config.get_text_config(decoder=True)
    for heads in _HEAD_COUNTS:
        if (count := getattr(text, heads, None)) is not None:
            parallel.divide(count, heads)
    for path, (layer, style) in planned.items():
        if style in (_COLUMNS, _ROWS):
            parallel.divide(_size(layer, style), f"a dimension of {path}")


def shard(model: Any, parallel: TensorParallel) -> None:
    """Keep this rank's part of each layer in the plan, with the collectives that it needs.

    Raises:
        ShardingError: it cannot be divided.
    """
    if parallel.size == 1:
        return
    check_ranks(model, parallel.size)
    for _, (layer, style) in list(_planned(model)):
        if _size(layer, style) % parallel.size:
            continue  # check_ranks() passed, so the style also fits a whole layer
        if style in (_COLUMNS, _GATHERED_COLUMNS):
            layer.out_features //= parallel.size
            layer.weight = _part(layer.weight, 0, parallel)
            if layer.bias is not None:
                layer.bias = _part(layer.bias, 0, parallel)
        else:
            layer.in_features //= parallel.size
            layer.weight = _part(layer.weight, 1, parallel)
            if layer.bias is not None and parallel.rank > 0:  # the sum has it once
                layer.register_parameter("bias", None)
            layer.register_forward_hook(_after(parallel.all_reduce))
        if style == _GATHERED_COLUMNS:
            layer.register_forward_hook(_after(parallel.all_gather))
        if style == _SPLIT_ROWS:
            layer.register_forward_pre_hook(
                lambda module, inputs: inputs[0].chunk(parallel.size, -1)[parallel.rank]
            )


def _planned(model: Any) -> Iterator[tuple[str, tuple[nn.Linear, str]]]:
    """Yield the linear layers in the plan, with their paths and styles."""
    plan = getattr(model, "tp_plan", None) or {}
    for path, module in model.named_modules():
        style = str(plan.get(re.sub(r"\b\d+\b", "*", path)))
        is_planned = style in (_COLUMNS, _GATHERED_COLUMNS, _ROWS, _SPLIT_ROWS)
        if is_planned and isinstance(module, nn.Linear):
            yield path, (module, style)


def _size(layer: nn.Linear, style: str) -> int:
    return layer.out_features if style in (_COLUMNS, _GATHERED_COLUMNS) else layer.in_features


def _part(whole: Tensor, dim: int, parallel: TensorParallel) -> nn.Parameter:
    part = whole.data.chunk(parallel.size, dim)[parallel.rank]
    return nn.Parameter(part.clone(), requires_grad=False)


def _after(collective: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda module, inputs, output: collective(output)


# Compare a way to run a model with the model's own forward, before it is used.


# Relative to the largest logit. Rows of logits outside are counted: in 16 bits, a mixture of
# experts may route a token differently for a difference in the last bit.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_ROWS_OUTSIDE = {torch.float32: 0.0, torch.float16: 0.2, torch.bfloat16: 0.2}
_LENGTHS = (11, 6)
# Tokens of both sequences in each step: prompts, a chunk after a token, single tokens, a chunk.
_STEPS = ((7, 1), (1, 4), (1, 1), (2, 0))
# The same as generation: a prompt that passes _SWITCH tokens later, and one that is longer already.
_GENERATION_STEPS = ((7, 10), (1, 0), (1, 1), (1, 0), (1, 0))
_SWITCH = 8

Forward = Callable[[Tensor, Tensor], Tensor]


def sample_tokens(vocab_size: int, avoid: Collection[int], device: torch.device) -> list[Tensor]:
    """Return two sequences of token ids, without special ones."""
    generator = torch.Generator().manual_seed(vocab_size)
    ids = torch.tensor([token for token in range(min(vocab_size, 4096)) if token not in avoid])
    return [
        ids[torch.randint(len(ids), (length,), generator=generator)].to(device)
        for length in _LENGTHS
    ]


def difference(
    forward: Forward,
    halves: Halves,
    tokens: Sequence[Tensor],
    expected: Sequence[Tensor],
    steps: Sequence[tuple[int, int]] = _STEPS,
) -> str:
    """Return how the logits of packed sequences in several steps differ; "" if they do not.

    Args:
        forward: takes ids and positions ``(T,)`` of packed sequences, in a forward context.
        halves: the model, which turns hidden states into logits.
        tokens: two sequences.
        expected: the logits ``(n, vocab_size)`` of the last tokens of each.
        steps: the number of tokens of both in each step.
    """
    dense, states, done = _Dense(), StateCache(2), [0, 0]
    logits: list[list[Tensor]] = [[], []]
    for counts in steps:
        present = [i for i in (0, 1) if counts[i]]
        parts = [slice(done[i], done[i] + counts[i]) for i in present]
        dense.sequences = [(i, counts[i]) for i in present]
        sizes, starts = [counts[i] for i in present], [done[i] for i in present]
        state = SequenceStates.of(sizes, starts, present, states, tokens[0].device)
        ids = torch.cat([tokens[i][part] for i, part in zip(present, parts, strict=True)])
        positions = torch.cat([torch.arange(p.start, p.stop, device=ids.device) for p in parts])
        with forward_context(ForwardContext(dense, state)):
            step = halves.logits(forward(ids, positions))
        for i, rows in zip(present, torch.split_with_sizes(step, sizes), strict=True):
            logits[i].append(rows)
            done[i] += counts[i]
    errors = []
    for chunks, reference in zip(logits, expected, strict=True):
        last, exact = torch.cat(chunks)[-len(reference) :].double(), reference.double()
        # Of each row, relative to the largest logit of all.
        errors.append((last - exact).abs().amax(-1) / exact.abs().amax().clamp(min=1e-6))
    error, dtype = torch.cat(errors), halves.causal_lm.dtype
    outside = (~(error <= _TOLERANCES[dtype])).double().mean().item()
    return "" if outside <= _ROWS_OUTSIDE[dtype] else f"its logits differ by {error.max():.2g}"


def generated_logits(causal_lm: Any, tokens: Tensor) -> list[Tensor]:
    """Return the logits of two generations of *tokens* by transformers' ``generate``.

    The first has a prompt below the length at which the model's rope changes, which is lowered; the
    second has a longer one. :func:`generation_difference` runs the same two.

    Args:
        causal_lm: a model whose rope depends on the length of a sequence.
        tokens: a sequence, to be generated.

    Raises:
        UnsupportedModelError: transformers cannot generate with the model.
    """
    import transformers

    library: Any = transformers  # without types

    class Forced(library.LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            forced = torch.full_like(scores, -torch.inf)
            forced[:, tokens[min(input_ids.shape[1], len(tokens) - 1)]] = 0.0
            return forced

    logits = []
    for prompt in _GENERATION_STEPS[0]:
        count = len(tokens) - prompt + 1  # the last token's logits, too
        config = library.GenerationConfig(
            max_new_tokens=count, do_sample=False, num_beams=1, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        try:
            with _lowered_switch(causal_lm.config):
                output = causal_lm.generate(
                    tokens[None, :prompt],
                    attention_mask=torch.ones_like(tokens[None, :prompt]),
                    generation_config=config,
                    logits_processor=library.LogitsProcessorList([Forced()]),
                )
        except Exception as error:  # code of the model, which may fail in any way
            raise UnsupportedModelError(
                f"{type(causal_lm).__name__} cannot run in the engine: its rope depends on the "
                f"length of a sequence, and transformers' generate fails ({described(error)})."
            ) from error
        logits.append(torch.cat(output.logits))
    return logits


def generation_difference(
    forward: Forward, halves: Halves, tokens: Tensor, expected: Sequence[Tensor]
) -> str:
    """Return how the logits of two generations of *tokens* differ; "" if they do not.

    Args:
        forward, halves: as for :func:`difference`.
        tokens: a sequence.
        expected: the result of :func:`generated_logits`.
    """
    with _lowered_switch(halves.causal_lm.config):
        return difference(forward, halves, [tokens, tokens], expected, _GENERATION_STEPS)


@contextmanager
def _lowered_switch(config: Any) -> Iterator[None]:
    """Let ropes that depend on the length change after _SWITCH tokens, for a quick check."""
    key, text = "original_max_position_embeddings", config.get_text_config(decoder=True)
    ropes = [text.rope_parameters, *text.rope_parameters.values()]
    places = [vars(config), vars(text), *(rope for rope in ropes if isinstance(rope, dict))]
    before = [(place, place[key]) for place in places if isinstance(place.get(key), int)]
    for place, _ in before:
        place[key] = _SWITCH
    try:
        yield
    finally:
        for place, value in before:
            place[key] = value


class _Dense:
    """Attention that keeps the keys and values of each sequence in one tensor."""

    def __init__(self) -> None:
        # The sequences of the current step, each with the number of its new tokens.
        self.sequences: list[tuple[int, int]] = []
        self._cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *options: Any
    ) -> Tensor:
        scale, window, soft_cap = options
        counts = [count for _, count in self.sequences]
        parts = (torch.split_with_sizes(x, counts) for x in (query, key, value))
        outputs = []
        for (sequence, _), q, *new in zip(self.sequences, *parts, strict=True):
            earlier = self._cache.get((layer, sequence))
            k, v = new if earlier is None else map(torch.cat, zip(earlier, new, strict=True))
            self._cache[layer, sequence] = k, v
            ends = [torch.tensor([0, len(x)], device=q.device) for x in (q, k)]
            outputs.append(ir.ops.varlen_attention(q, k, v, *ends, scale, True, window, soft_cap))
        return torch.cat(outputs)

    def attend_latent(self, *inputs: Any) -> Tensor:
        raise AssertionError("models of transformers expand latent attention themselves")


# A causal transformers model with the engine's interface of models.


_log = logging.getLogger(__name__)


class TransformersModel(LanguageModel):
    """A causal language model of transformers with loaded weights; on several ranks, a part of it.

    The fastest of three ways to run it is chosen whose logits agree with those of the model's own
    forward: packed sequences with a paged cache; one sequence at a time, with the model's own
    cache; or without any cache.

    Args:
        causal_lm: the model, in evaluation mode.

    Attributes:
        config: its configuration.
        report: which modules run opweave's ops.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.config = causal_lm.config
        self.dtype = causal_lm.dtype
        text = causal_lm.config.get_text_config(decoder=True)
        positions = getattr(text, "max_position_embeddings", None)
        self.max_positions = positions if positions and positions > 0 else None  # XLNet has -1
        causal_lm.requires_grad_(False)
        tokens = sample_tokens(text.vocab_size, _special_tokens(text), causal_lm.device)
        with torch.inference_mode():
            halves, first = Halves.of(causal_lm, tokens[0])
            expected = [first, Halves.of(causal_lm, tokens[1])[1]]
            # Of generations that pass the length at which the rope changes; others need no check.
            by_length = ropes_by_length(text)
            generated = generated_logits(causal_lm, tokens[0]) if "longrope" in by_length else None
            self.vocab_size = expected[0].shape[-1]
            shard(causal_lm, current_tensor_parallel())
            self.report = optimize(causal_lm)
            self.sequences, obstacles = _choose(halves, tokens, expected, generated)
        self.needs_whole_prompts = bool(by_length) or type(self.sequences) is RecomputedSequences
        outcome = f"{type(causal_lm).__name__} runs {self.sequences.description}"
        if obstacles:
            _log.warning("%s; %s", outcome, obstacles)
        else:
            _log.info("%s", outcome)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.sequences(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.sequences.halves.logits(hidden)


Sequences = PackedSequences | RecomputedSequences


def _choose(
    halves: Halves, tokens: list[Tensor], expected: list[Tensor], generated: list[Tensor] | None
) -> tuple[Sequences, str]:
    """Return the fastest way to run a model that gives *expected*, and why not a faster one.

    With *generated*, the result of ``generated_logits``, it must give these logits, too.

    Raises:
        UnsupportedModelError: none does.
    """
    reasons: list[str] = []
    for kind in (PackedSequences, CachedSequences, RecomputedSequences):
        try:
            with ExitStack() as undo:
                sequences = kind.of(halves, tokens[0], undo)
                # Without a cache, models need not be causal: then, the logits of other tokens than
                # the last one change with the tokens that follow.
                compared = slice(-1 if kind is RecomputedSequences else 0, None)
                logits = [rows[compared] for rows in expected]
                reason = difference(sequences, halves, tokens, logits)
                if not reason and generated is not None:
                    reason = generation_difference(sequences, halves, tokens[0], generated)
                if not reason:
                    undo.pop_all()
                    return sequences, "; ".join(reasons)
        except NotSuitableError as error:
            reason = str(error)
        except Exception as error:  # code of the model, which may fail in any way
            reason = f"it fails ({described(error)})"
        reasons.append(f"not {kind.description}: {reason}")
    raise UnsupportedModelError(
        f"{type(halves.causal_lm).__name__} cannot run in the engine: {'; '.join(reasons)}."
    )


def _special_tokens(config: Any) -> set[int]:
    """Return the ids that a configuration names, which models may treat specially."""
    ids = set()
    for name, value in config.to_dict().items():
        if name.endswith(("_token_id", "_token_index")):
            with suppress(TypeError):
                ids |= set(value) if isinstance(value, list) else {value}
    return ids
