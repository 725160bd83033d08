"""An inspection as plain text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from math import prod

from expertmesh.checkpoint.inspection import Inspection, Verification
from expertmesh.checkpoint.sizes import format_size

_WIDTH = 80
_LABEL = 13
_AXES = ("dp_replicate", "dp_shard", "efsdp", "ep")


def table(inspection: Inspection, verification: Verification | None = None) -> str:
    """What was found, a row a line, and the files' sizes."""
    lines = [str(inspection.folder)]
    for label, value in [*_rows(inspection), *_verification_rows(verification)]:
        # A path stays whole, even if it is longer than a line.
        lines += textwrap.wrap(
            value,
            _WIDTH,
            initial_indent=f"  {label:<{_LABEL}}",
            subsequent_indent=" " * (2 + _LABEL),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join([*lines, "", *_size_lines(inspection)])


def _rows(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "kind", found.kind
    yield "complete", "NO" if found.problems else "yes"
    for problem in found.problems:
        yield "", problem
    for leftover in found.leftovers:
        yield "left over", f"{leftover}, from a save that did not end; it is ignored"
    if found.step is not None:
        yield "step", f"{found.step:,}"
    if found.manifest is not None:
        yield from _manifest_rows(found)
    if found.architecture:
        yield "model", found.architecture
    if found.num_layers:
        yield "layers", str(found.num_layers)
    if found.num_experts:
        yield "experts", f"{found.num_experts} a layer{_how_stored(found)}"
    yield from _tensor_rows(found)


def _manifest_rows(found: Inspection) -> Iterator[tuple[str, str]]:
    mesh = found.manifest.mesh
    if mesh:
        axes = " x ".join(f"{axis} {mesh[axis]}" for axis in _AXES if axis in mesh)
        yield "mesh", f"{axes} on {mesh['world_size']} processes" if "world_size" in mesh else axes
    if found.manifest.versions:
        yield "written by", ", ".join(f"{name} {version}" for name, version in found.manifest.versions.items())


def _how_stored(found: Inspection) -> str:
    match found.experts_are_single:
        case True:
            return ", each under names of its own, as published models have them"
        case False:
            return ", fused: one tensor for all of a layer"
        case None:
            return ""


def _tensor_rows(found: Inspection) -> Iterator[tuple[str, str]]:
    tensors = found.tensors
    if not tensors:
        return
    yield "parameters", f"{sum(prod(tensor.shape) for tensor in tensors):,} in {len(tensors):,} tensors"
    by_dtype: Counter[str] = Counter()
    for tensor in tensors:
        by_dtype[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    total = max(sum(by_dtype.values()), 1)
    yield "dtypes", ", ".join(f"{dtype} {_share(nbytes / total)}" for dtype, nbytes in by_dtype.most_common())


def _share(share: float) -> str:
    percent = f"{100 * share:.1f}"
    return f"{percent}%" if share == 1 or percent not in ("0.0", "100.0") else ("<0.1%" if share < 0.5 else ">99.9%")


def _verification_rows(verification: Verification | None) -> Iterator[tuple[str, str]]:
    if verification is None:
        return
    if verification.problems:
        yield "verified", "DAMAGED"
    elif verification.compared:
        yield "verified", f"{verification.compared:,} tensors and files are as they were written"
    for problem in verification.problems:
        yield "", problem
    if verification.loadable:
        yield "" if verification.compared else "verified", "stock from_pretrained finds every tensor of the model"
    if verification.only_read:
        yield "read", f"{verification.only_read:,} tensors and files, of which no checksum is known"


def _size_lines(found: Inspection) -> Iterator[str]:
    yield f"  {'':<{_LABEL}}{'files':>7}  {'size':>9}"
    for name, part in found.parts.items():
        yield f"  {name:<{_LABEL}}{part.files:>7,}  {format_size(part.nbytes):>9}"
    files = sum(part.files for part in found.parts.values())
    nbytes = sum(part.nbytes for part in found.parts.values())
    yield f"  {'all':<{_LABEL}}{files:>7,}  {format_size(nbytes):>9}"
