"""Usage counters of the device's parts in this process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Usage:
    """Each number has one writer, the part that is named; the HTTP route shows all of them.

    Attributes:
        warm_up_on_host: operators of the first forward that had no kernel, and how often each ran
            on the host (worker).
        decode_forwards, prompt_forwards: how often the model ran, by what it ran on (model runner).
        aligned_parts: parts of prompts that were cut to end with a block (scheduler).
        attention_calls: by all layers (attention backend).
        sampled_tokens: chosen from the scores of the device (sampler).
        collectives: between devices (communicator).
        busy_seconds: spent in steps (stat logger).
        peak_bytes: the most memory that was in use between two steps (stat logger).
    """

    warm_up_on_host: dict[str, int] = field(default_factory=dict)
    decode_forwards: int = 0
    prompt_forwards: int = 0
    aligned_parts: int = 0
    attention_calls: int = 0
    sampled_tokens: int = 0
    collectives: int = 0
    busy_seconds: float = 0.0
    peak_bytes: int = 0


usage = Usage()
