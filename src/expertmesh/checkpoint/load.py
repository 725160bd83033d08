"""Reading a checkpoint's weights into a model that is already sharded, however it is sharded. Collective.

The folder may be ours, any Hugging Face model folder, or one that Accelerate wrote with FSDP2 (`SHARDED_STATE_DICT`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from torch import nn

from expertmesh.checkpoint.agree import agreed
from expertmesh.checkpoint.checksum import RunChecksum, combine_runs
from expertmesh.checkpoint.conversion import trace_load
from expertmesh.checkpoint.dcp import MODEL_FOLDER, load_dcp_model
from expertmesh.checkpoint.file_io import bytes_of
from expertmesh.checkpoint.manifest import MANIFEST, Manifest
from expertmesh.checkpoint.publish import resolve
from expertmesh.checkpoint.reader import check_fingerprints, read_shards, read_whole
from expertmesh.checkpoint.safetensors_format import StoredTensor, read_folder
from expertmesh.checkpoint.shards import local_shards, named_tensors
from expertmesh.errors import CheckpointError, some
from expertmesh.ranks import gather, world


def load_model(model: nn.Module, folder: Path | str, subfolder: str = "") -> None:
    """Make a model's parameters and persistent buffers those of a checkpoint. Collective.

    Every rank reads the bytes of its own shards. What was read is compared with the checksums that the writer noted,
    and what the model holds afterwards with what was read.

    Args:
        model: sharded or whole.
        folder: the checkpoint.
        subfolder: where in it the model is, if not at its top.

    Raises:
        CheckpointError: on every rank: tensors are missing, left over or misshapen (by name), a file is damaged (by
            name), or cannot be read. The model may then be half loaded.
    """
    checkpoint = resolve(Path(folder))
    folder = checkpoint / subfolder
    if (folder / MODEL_FOLDER).is_dir():
        load_dcp_model(model, folder)
        return
    with agreed(f"read the checkpoint {folder}"):
        plan = trace_load(model, read_folder(folder))
        plan.refuse_other_tensors(folder)
        noted = Manifest.read(checkpoint).tensors if (checkpoint / MANIFEST).exists() else {}
        expected = {name: noted.get(str(PurePosixPath(subfolder, name))) for name in plan.stored}
    with agreed(f"read the weights in {folder}"):
        own = named_tensors(model)
        reading = read_shards(plan, local_shards({name: own[name] for name in plan.tensors if name in own}))
    check_against_writer(reading.runs, expected, plan.stored)
    with agreed(f"load the weights in {folder}"):
        check_fingerprints(reading.fingerprints, local_shards(named_tensors(model)))


def check_against_writer(
    runs: Sequence[RunChecksum], expected: Mapping[str, str | None], stored: Mapping[str, StoredTensor]
) -> None:
    """Compare the bytes that all ranks read with the checksums that were noted when they were written. Collective.

    Args:
        runs: what this rank read.
        expected: CRC-32 by stored name, as 8 hexadecimal digits, None where unknown; equal on all ranks.
        stored: where the tensors are.

    Raises:
        CheckpointError: on every rank; names the damaged tensors and their files.
    """
    expected = {name: crc for name, crc in expected.items() if crc is not None}
    if not expected:
        return
    with agreed("check the weights"):
        by_tensor: dict[str, list[RunChecksum]] = {}
        for rank_runs in gather([run for run in runs if run.tensor in expected]):
            for run in rank_runs:
                by_tensor.setdefault(run.tensor, []).append(run)
        found = {name: combine_runs(parts, stored[name].nbytes) for name, parts in by_tensor.items()}
    rank, size = world()
    # Ranks whose strided parts overlap do not add up; such tensors are read once more, whole.
    overlapping = sorted(name for name, crc in found.items() if crc is None)
    with agreed("check the weights"):
        for name in overlapping[rank::size]:
            found[name] = zlib.crc32(bytes_of(read_whole(stored[name])[0]))
        damaged = [name for name, crc in found.items() if crc is not None and f"{crc:08x}" != expected[name]]
        if damaged:
            files = sorted({str(stored[name].path) for name in damaged})
            raise CheckpointError(
                f"{', '.join(files)} was damaged since it was written: the checksum of {some(damaged)} differs. "
                f"Use another checkpoint."
            )
