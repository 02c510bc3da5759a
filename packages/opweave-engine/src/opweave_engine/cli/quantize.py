"""``opweave quantize``: write a checkpoint with weights of 4 bits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from opweave.cli.options import Flag
from opweave.cli.output import CliError, out, print_json, progress_bar
from opweave_engine.cli.options import read_text

_MIB = 2**20


def quantize(
    model: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"))],
    w4: Flag = False,
    group: int = 64,
    perplexity: Path | None = None,
    json: Flag = False,
) -> None:
    """Quantize the weights of a checkpoint to 4 bits.

    Writes a compressed-tensors checkpoint, which opweave and vLLM load. Weights of linear layers
    are rounded to nearest; embeddings, the output matrix and experts are not quantized.

    Parameters
    ----------
    model
        A directory with config.json, safetensors and tokenizer.json.
    output
        The directory to write.
    w4
        Symmetric int4 weights. Required, as the only supported format.
    group
        Number of weights that share a scale: 32, 64 or 128.
    perplexity
        Report the perplexity on this text file before and after quantization.
    json
        Print the result as JSON.
    """
    if not w4:
        raise CliError("Say how to quantize: --w4 writes int4 weights.")
    text = None if perplexity is None else read_text("--perplexity", str(perplexity))
    if text is not None and not text.strip():
        raise CliError(f"--perplexity {str(perplexity)!r} is empty.")
    from opweave_engine.load.writer import quantize_checkpoint
    from opweave_engine.perplexity import token_ids

    if text is not None:
        token_ids(model, text)  # errors in the text or tokenizer come before the long work
    with progress_bar("quantizing") as bar:
        written = quantize_checkpoint(model, output, group=group, progress=bar)
    before, after = (None, None) if text is None else (_measured(p, text) for p in (model, output))
    if json:
        print_json({**asdict(written), "perplexity_before": before, "perplexity_after": after})
        return
    sizes = " to ".join(
        f"{size / _MIB:,.1f} MiB" for size in (written.bytes_before, written.bytes_after)
    )
    out.print(
        f"{output}: {len(written.quantized)} weights in int4, groups of {group}; {sizes}",
        markup=False,
    )
    if before is not None and after is not None:
        out.print(f"perplexity: {before:.3f} before, {after:.3f} after ({after / before - 1:+.2%})")


def _measured(model: Path, text: str) -> float:
    from opweave_engine.perplexity import perplexity

    with progress_bar("perplexity") as bar:
        return perplexity(model, text, progress=bar)
