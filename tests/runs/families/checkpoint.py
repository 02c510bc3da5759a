"""Tiny checkpoints with random weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from runs.families.architectures import make_config

_GAIN = 1.5  # of each layer's matrices; enough that all layers show in the logits
# A model whose output layer is its embedding repeats its last token, unless the embedding is small
# and what the layers add to it is large. With others, that repeats one token after any prompt.
_TIED = ((3.0, 0.05), (_GAIN, 1.0))  # gain, and standard deviation of the embedding; by seed
_LOGITS = 3.0  # standard deviation of the logits: greedy choices are clear
# Here, transformers' two implementations round the biases of positions differently.
_ATTENTION = {"falcon:alibi": "sdpa"}


def build(name: str, seed: int = 0) -> Any:
    """Return transformers' model of an architecture, with random float32 weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        make_config(name), attn_implementation=_ATTENTION.get(name, "eager"), dtype=torch.float32
    ).eval()
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is table
    gain, spread = _TIED[seed % len(_TIED)] if is_tied else (_GAIN, 1.0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter is table:
                parameter.normal_(std=spread)
            else:
                _randomize(parameter_name, parameter, gain)
        for buffer_name, buffer in model.named_buffers():
            # Of routers; a causal mask may have the name, too.
            if "bias" in buffer_name and buffer.is_floating_point() and buffer.dim() == 1:
                buffer.add_(0.1 * torch.randn_like(buffer))
    if head is not None and not is_tied:
        _scale_logits(model, head)
    return model


def _randomize(name: str, parameter: Tensor, gain: float) -> None:
    """Replace a matrix, and shift anything else a little from its initial value.

    Vectors and the parameters of state-space models have a meaning that limits their range.
    """
    if parameter.dim() >= 2 and parameter.std() > 0 and "A_log" not in name:
        fan_in = math.prod(parameter.shape[1:]) if parameter.dim() == 2 else parameter.shape[-1]
        parameter.normal_(std=gain / math.sqrt(fan_in))
    else:
        parameter.add_(0.1 * torch.randn_like(parameter))


def _scale_logits(model: Any, head: Any) -> None:
    """Scale the output layer so that greedy choices are clear."""
    ids = torch.randint(4, 190, (1, 20))
    with torch.inference_mode():
        spread = model(input_ids=ids, use_cache=False).logits.std().item()
    with torch.no_grad():
        head.weight.mul_(_LOGITS / max(spread, 1e-3))
