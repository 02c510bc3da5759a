"""The number and size of a model's heads."""

from __future__ import annotations

from opweave_engine.models.errors import InvalidConfigError
from opweave_engine.models.fields import Fields

_SHARED = "num_key_value_heads"


def read_heads(
    fields: Fields,
    *,
    kv_heads: int | None,
    head_dim: int | None = None,
    hidden_size: int = 4096,
    heads: int = 32,
) -> dict[str, int]:
    """Read ``num_attention_heads``, ``num_key_value_heads`` and ``head_dim``.

    Args:
        fields: the configuration.
        kv_heads: the default of a missing number of key heads; None: the number of query heads,
            which is also the meaning of null.
        head_dim: the default of a missing head size; None: the hidden size divided by the number of
            heads, which is also the meaning of null.
        hidden_size, heads: the defaults of missing sizes.

    Raises:
        InvalidConfigError: a value is missing, of the wrong type, or does not fit the others.
    """
    hidden = fields.size("hidden_size", hidden_size)
    heads = fields.size("num_attention_heads", heads)
    absent = heads if _SHARED in fields.values or kv_heads is None else kv_heads
    shared = fields.count(_SHARED, absent)
    if head_dim is None or "head_dim" in fields.values:
        if "head_dim" not in fields and hidden % heads:
            raise InvalidConfigError(
                f"{fields.name} has no 'head_dim', and 'hidden_size' {hidden} is not a multiple of "
                f"'num_attention_heads' {heads}."
            )
        head_dim = fields.count("head_dim", hidden // heads)
    fields.require_multiple("num_attention_heads", heads, _SHARED, shared)
    if head_dim % 2:
        raise InvalidConfigError(
            f"{fields.name}: the head size {head_dim} is odd; rotary embedding needs pairs."
        )
    return {"num_attention_heads": heads, _SHARED: shared, "head_dim": head_dim}
