"""Arithmetic of sizes."""

__all__ = ["cdiv", "next_power_of_2", "prev_power_of_2", "round_down", "round_up"]


def cdiv(a: int, b: int) -> int:
    """Return ``a / b``, rounded up.

    >>> cdiv(7, 2)
    4
    """
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not less than *n*, at least 1.

    >>> next_power_of_2(5)
    8
    """
    return 1 if n < 1 else 1 << (n - 1).bit_length()


def prev_power_of_2(n: int) -> int:
    """Return the largest power of two that is not greater than *n*, or 0.

    >>> prev_power_of_2(5)
    4
    """
    return 0 if n < 1 else 1 << (n.bit_length() - 1)


def round_up(x: int, y: int) -> int:
    """Return *x*, rounded up to a multiple of *y*."""
    return cdiv(x, y) * y


def round_down(x: int, y: int) -> int:
    """Return *x*, rounded down to a multiple of *y*."""
    return x // y * y
