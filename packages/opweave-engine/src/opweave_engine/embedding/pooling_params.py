"""Pooling parameters of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opweave_engine.errors import SamplingParamsError
from opweave_engine.sampling.parameter_checks import check_flag, check_int


@dataclass(frozen=True)
class PoolingParams:
    """Pooling of one prompt's embedding.

    Attributes:
        dimensions: truncate the vector to this many numbers; None: all. The model must be trained
            for it: its ``config.json`` has ``matryoshka_dimensions`` or ``is_matryoshka``.
        normalize: normalize the vector to length 1; None: as in the checkpoint.
        token_type_ids: of a pair of texts, one for each token of the prompt: a cross-encoder scores
            the pair, and the score is the only number of the vector. None: the prompt is one text.

    Raises:
        SamplingParamsError: a value is out of range or of the wrong type.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    token_type_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1, "or None for all")
        if self.normalize is not None:
            check_flag("normalize", self.normalize)

    def check_dimensions(self, size: int, trained: object, *, any_size: bool) -> None:
        """Check that the model supports the dimensions.

        Args:
            size: the size of the model's vectors.
            trained: the dimensions that the model was trained for, or None.
            any_size: whether it was trained for any number of dimensions.

        Raises:
            SamplingParamsError: it does not.
        """
        wanted = self.dimensions
        if wanted is None or wanted == size:
            return
        known = trained if isinstance(trained, list) else []
        if wanted in known or (any_size and not known and wanted < size):
            return
        others = ", ".join(map(str, known)) or ("fewer" if any_size else "no other length")
        raise SamplingParamsError(
            f"dimensions={wanted} is not possible: the model's vectors have {size} numbers, and it "
            f"was trained for {others}.",
            "dimensions",
        )
