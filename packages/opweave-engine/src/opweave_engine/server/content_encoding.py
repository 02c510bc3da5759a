"""Compressed request bodies."""

from __future__ import annotations

import zlib

from opweave_engine.server.errors import ApiError, too_large

_FORMATS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_MOST_MEMBERS = 16  # of a gzip file; each further one copies the rest of the body


def decoded(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the decompressed body.

    Args:
        body: the body as sent.
        encoding: the value of Content-Encoding: ``gzip``, ``deflate`` or an empty string.
        limit: the maximum size of the result, so that a small body cannot fill the memory.

    Raises:
        ApiError: the encoding is unknown, the body is damaged, or the result is too large.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if (form := _FORMATS.get(name)) is None:
        raise ApiError(
            f"Content-Encoding {encoding!a} is not supported; send gzip, deflate or no encoding.",
            status=415,
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "gzip, deflate"},
        )
    try:
        return _decompressed(body, form, limit)
    except zlib.error as error:
        raise _damaged(name, error) from error


def _decompressed(body: bytes, form: int, limit: int) -> bytes:
    parts: list[bytes] = []
    left, size = body, 0
    for _ in range(_MOST_MEMBERS):
        decompressor = zlib.decompressobj(form)
        parts.append(decompressor.decompress(left, limit - size + 1))
        size += len(parts[-1])
        if size > limit:
            raise too_large(limit)
        if not decompressor.eof:
            raise zlib.error("it is incomplete")
        left = decompressor.unused_data
        if not left:
            return b"".join(parts)
    raise zlib.error(f"it has more than {_MOST_MEMBERS} parts")


def _damaged(name: str, why: object) -> ApiError:
    return ApiError(f"The body is not valid {name}: {why}.", code="invalid_content_encoding")
