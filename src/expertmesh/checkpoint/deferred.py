"""Loading a model only where it is needed: weights stay in their files until each rank knows its share of them.

`DeferredLoad` is what one `from_pretrained` would have read. Its weights stand in the model as `DeferredParameter`s.
When the model is about to be sharded, `take_placeholders` turns them into plain parameters over memory that takes no
room, which any sharding code may cut up, and `DeferredWeights.fill` reads each rank's bytes into what came out of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.utils.logging import tqdm

from expertmesh.checkpoint.agree import agreed
from expertmesh.checkpoint.conversion import LoadPlan
from expertmesh.checkpoint.deferred_tensor import DeferredParameter
from expertmesh.checkpoint.load import check_against_writer
from expertmesh.checkpoint.manifest import MANIFEST, Manifest
from expertmesh.checkpoint.reader import Reading, check_fingerprints, read_shards
from expertmesh.checkpoint.same_files import Stamp, refuse_changed, refuse_differences
from expertmesh.checkpoint.shards import LocalShard
from expertmesh.checkpoint.trace import TracedTensor
from expertmesh.errors import CheckpointError
from expertmesh.host_memory import untouched
from expertmesh.ranks import gather, world

# Wrappers put these into the names of what they wrap.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
# The progress bar moves on after so many bytes.
_BATCH = 256 << 20


class DeferredLoad:
    """What one load left in files.

    Args:
        plan: how the model's tensors are read, under the names they had when it was loaded.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self._stamps = {path: Stamp.of(path) for path in {stored.path for stored in plan.stored.values()}}

    def source(self, name: str) -> DeferredSource:
        """Where one of the plan's tensors is."""
        traced = self.plan.tensors[name]
        return DeferredSource(self, name, tuple(traced.shape), traced.dtype, traced.dtype)

    def noted_checksums(self) -> dict[str, str]:
        """What the writer of the files noted of their tensors, if it was expertmesh: CRC-32 by stored name."""
        folders = {path.parent for path in self._stamps}
        noted: dict[str, str] = {}
        for folder in folders:
            if (folder / MANIFEST).is_file():
                noted.update(Manifest.read(folder).tensors)
        return noted

    def files(self, name: str) -> list[Path]:
        """What one of the plan's tensors is read from."""
        return sorted({self.plan.stored[source].path for source in self.plan.tensors[name].sources})

    def read(self, shards: Mapping[DeferredSource, LocalShard]) -> Reading:
        """Read parts of tensors, no name twice. Not collective.

        Raises:
            CheckpointError: a file has changed since the load, or is truncated.
            OSError: a file cannot be read.
        """
        refuse_changed({path: self._stamps[path] for source in shards for path in self.files(source.name)})
        tensors = {source.name: source.traced for source in shards}
        named = {source.name: shard for source, shard in shards.items()}
        return read_shards(replace(self.plan, tensors=tensors), named)


@dataclass(frozen=True)
class DeferredSource:
    """One tensor of a load, and the conversions it has been through since.

    Attributes:
        load: where it is.
        name: what it was called there.
        shape: of the whole tensor.
        rounded: dtype that the stored elements are converted to first.
        dtype: dtype that these are converted to.
    """

    load: DeferredLoad
    name: str
    shape: tuple[int, ...]
    rounded: torch.dtype
    dtype: torch.dtype

    @property
    def traced(self) -> TracedTensor:
        """What it is made of, in the dtype that reading rounds to."""
        traced = self.load.plan.tensors[self.name]
        return TracedTensor(self.shape, self.rounded, traced.pieces, traced.sources)

    def read_into(self, destination: Tensor) -> None:
        """Read the whole tensor; see `DeferredLoad.read`."""
        self.load.read({self: LocalShard.of(destination)})

    def cast(self, dtype: torch.dtype) -> DeferredSource | None:
        """The same elements converted once more, to the bit; None where that takes three conversions."""
        if _keeps_all(self.rounded, self.dtype):
            return replace(self, dtype=dtype)
        if all(_keeps_all(first, self.rounded) for first in self._first_dtypes()):
            return replace(self, rounded=self.dtype, dtype=dtype)
        return None

    def _first_dtypes(self) -> set[torch.dtype]:
        traced, stored = self.load.plan.tensors[self.name], self.load.plan.stored
        return {traced.dtype} if traced.opaque else {stored[source].dtype for source in traced.sources}


def take_placeholders(model: nn.Module, trainable_dtype: torch.dtype | None = None) -> DeferredWeights:
    """Make every deferred parameter of a model a plain one that can be sharded, and note what belongs in it.

    Collective. The Parameters stay the objects that they are. They get memory of their own that nothing has been
    written to and that takes no room until something is; its elements are zeros until `fill` is called on the result.
    Sharding code need not copy its part of a Parameter whose `is_placeholder` is set; there is nothing to copy.

    Args:
        model: not sharded yet.
        trainable_dtype: dtype of the trainable ones (float32 master weights); by default the one they have.

    Raises:
        ExpertMeshError: the kernel does not grant the address space.
    """
    sources = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DeferredParameter):
            continue
        source = parameter.source
        if trainable_dtype is not None and parameter.requires_grad and source.dtype.is_floating_point:
            source = source.cast(trainable_dtype)
        if source is None:
            parameter.materialize()
            continue
        parameter.settle(untouched(source.shape, source.dtype))
        parameter.is_placeholder = True
        sources[_plain(name)] = source
    return DeferredWeights(sources, any(gather(bool(sources))))


class DeferredWeights:
    """The weights that a model's placeholders stand for. False when no rank has any.

    Args:
        sources: by qualified name.
        needed: whether any rank has some.
    """

    def __init__(self, sources: Mapping[str, DeferredSource], needed: bool) -> None:
        self._sources = sources
        self._needed = needed

    def __bool__(self) -> bool:
        return self._needed

    def holds(self, name: str) -> bool:
        """Whether a parameter, by its qualified name, is among them."""
        return _plain(name) in self._sources

    def fill(self, model: nn.Module) -> int:
        """Read this rank's part of every weight into the model, sharded by now. Collective, on all ranks or none.

        Returns:
            Bytes read on this rank.

        Raises:
            CheckpointError: on every rank: ranks have different files, a file has changed, is damaged or cannot be
                read, or a parameter does not hold in the end what was read for it.
        """
        refuse_differences({name: source.load.files(source.name) for name, source in self._sources.items()})
        done: list[tuple[list[str], Reading]] = []
        with agreed("read the model's weights"):
            shards = self._shards(model)
            for batch in _with_progress(list(self._batches(shards))):
                load = self._sources[batch[0]].load
                done.append((batch, load.read({self._sources[name]: shards[name] for name in batch})))
        self._check_against_writer(done)
        with agreed("load the model"):
            # Looked up anew: what counts is what the model has now.
            shards = self._shards(model)
            for batch, reading in done:
                own = {self._sources[name].name: shards[name] for name in batch}
                check_fingerprints(reading.fingerprints, own)
        return sum(reading.nbytes for _, reading in done)

    def _check_against_writer(self, done: Sequence[tuple[list[str], Reading]]) -> None:
        if len(set(gather(tuple(self._sources)))) > 1:
            # A script that looked at weights on some ranks only had them read there, unshared and without this check.
            return
        for load in dict.fromkeys(source.load for source in self._sources.values()):
            runs = [run for batch, reading in done if self._sources[batch[0]].load is load for run in reading.runs]
            check_against_writer(runs, load.noted_checksums(), load.plan.stored)

    def _shards(self, model: nn.Module) -> dict[str, LocalShard]:
        parameters = {_plain(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
        lost = [name for name in self._sources if name not in parameters]
        if lost:
            raise CheckpointError(
                f"{len(lost)} weights were still to be read when the model lost them, {lost[0]} for one: set "
                f"EXPERTMESH_DEFERRED_LOAD=0 to read all weights at once."
            )
        return {name: LocalShard.of(parameters[name]) for name in self._sources}

    def _batches(self, shards: Mapping[str, LocalShard]) -> Iterator[list[str]]:
        """Names of one load, none stored twice under the same name, and not much more than `_BATCH` bytes."""
        waiting: dict[int, dict[str, str]] = {}
        size: dict[int, int] = {}
        for name, shard in shards.items():
            source = self._sources[name]
            key = id(source.load)
            batch = waiting.setdefault(key, {})
            full = size.get(key, 0) > _BATCH and not source.traced.opaque
            if batch and (full or source.name in batch):
                yield list(batch.values())
                batch.clear()
                size[key] = 0
            batch[source.name] = name
            size[key] = size.get(key, 0) + shard.tensor.numel() * shard.tensor.element_size()
        yield from (list(batch.values()) for batch in waiting.values())


def _with_progress(batches: Sequence[list[str]]) -> Iterable[list[str]]:
    rank, _ = world()
    return tqdm(batches, desc="Reading weights", leave=False) if rank == 0 and len(batches) > 1 else batches


def _keeps_all(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every value of the one floating-point dtype is one of the other."""
    if narrow == wide:
        return True
    if not (narrow.is_floating_point and wide.is_floating_point):
        return False
    narrow_info, wide_info = torch.finfo(narrow), torch.finfo(wide)
    return (
        wide_info.eps <= narrow_info.eps
        and wide_info.max >= narrow_info.max
        and wide_info.smallest_normal <= narrow_info.smallest_normal
    )


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
