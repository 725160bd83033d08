"""Sizes in bytes as people write and read them: 5GB is 5 * 10^9, 5GiB is 5 * 2^30."""

from __future__ import annotations

import re

from expertmesh.errors import ConfigError

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """The bytes that `5GB`, `500 MiB` or `1000000` mean.

    Raises:
        ConfigError: it is no size, or less than a byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?", text.strip(), re.IGNORECASE)
    unit = match and (match[2] or "B").upper()
    if not match or unit not in _UNITS or not (size := int(float(match[1]) * _UNITS[unit])):
        raise ConfigError(f"{text!r} is no size: write for instance 5GB or 500MB.")
    return size


def format_size(nbytes: int) -> str:
    """Three digits and a decimal unit, for instance `1.23 GB`."""
    for unit in ("TB", "GB", "MB", "KB"):
        if nbytes >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:#.3g} {unit}".replace(". ", " ")
    return f"{nbytes} B"
