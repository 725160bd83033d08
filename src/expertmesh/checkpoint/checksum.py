"""CRC-32 of a tensor from the CRC-32s of its parts, which different ranks computed.

A CRC-32 is a remainder of polynomials over GF(2), so appending n bytes multiplies it by x^(8n) before the new bytes'
own remainder is added: parts combine without their bytes. As in zlib, polynomials are reflected: bit 31 is x^0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X_TO_THE_8 = 1 << 23


@dataclass(frozen=True)
class RunChecksum:
    """What one rank knows of consecutive bytes of a tensor.

    Attributes:
        tensor: the tensor's name.
        start: first byte, relative to the tensor's first byte.
        length: bytes.
        crc: `zlib.crc32` of these bytes.
    """

    tensor: str
    start: int
    length: int
    crc: int


def combine(crc1: int, crc2: int, len2: int) -> int:
    """`zlib.crc32(a + b)` from `crc1 = zlib.crc32(a)`, `crc2 = zlib.crc32(b)` and `len2 = len(b)`, in bytes."""
    if len2 == 0:
        return crc1
    return _multiply(_shift(len2), crc1) ^ crc2


def combine_runs(runs: Iterable[RunChecksum], nbytes: int) -> int | None:
    """The CRC-32 of one tensor of `nbytes` bytes from its runs, in any order.

    Runs that several ranks report alike (replicas) count once.

    Returns:
        None when the runs leave a hole, overlap, contradict each other or reach past `nbytes`.
    """
    crc = position = 0
    for run in sorted(set(runs), key=lambda run: (run.start, run.length)):
        if run.start != position:
            return None
        crc = combine(crc, run.crc, run.length)
        position += run.length
    return crc if position == nbytes else None


@cache
def _shift(length: int) -> int:
    """x^(8 * length): what `length` more bytes multiply a CRC by. Cached, as most runs of a tensor are equally long."""
    product, exponent = _ONE, 0
    while length >> exponent:
        if length >> exponent & 1:
            product = _multiply(_power_of_two(exponent), product)
        exponent += 1
    return product


@cache
def _power_of_two(exponent: int) -> int:
    """x^(8 * 2^exponent), by squaring."""
    if exponent == 0:
        return _X_TO_THE_8
    root = _power_of_two(exponent - 1)
    return _multiply(root, root)


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo CRC-32's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
