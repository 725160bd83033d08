"""What a checkpoint or model folder holds, whether it is complete, and whether its bytes are what was written."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from expertmesh.checkpoint.architecture import model_without_weights, read_config
from expertmesh.checkpoint.conversion import trace_load
from expertmesh.checkpoint.file_io import CHUNK, InputFiles, num_threads
from expertmesh.checkpoint.manifest import MANIFEST, Manifest, verify_files
from expertmesh.checkpoint.optimizer import optimizer_folder
from expertmesh.checkpoint.publish import incomplete, resolve
from expertmesh.checkpoint.safetensors_format import PlannedTensor, StoredTensor
from expertmesh.checkpoint.stored_weights import StoredWeights, read_dcp, read_weights
from expertmesh.errors import CheckpointError, some

WEIGHTS, OPTIMIZER, REST = "weights", "optimizer", "rest"
_PARTIAL = ".partial"
_TRAINER_STATE = "trainer_state.json"
_KINDS = {"model": "Hugging Face model", "adapter": "PEFT adapter", "dcp": "Accelerate checkpoint (DCP)"}
_OUR_FORMS = {"model": "", "adapter": " of a PEFT adapter", "dcp": " (DCP)"}
_WEIGHT_FILES = re.compile(r"(model|adapter_model)[^/]*\.safetensors|pytorch_model[^/]*\.bin|pytorch_model_fsdp_\d+/.*")
_OPTIMIZER_FILES = re.compile(r"optimizer(_\d+)?/.*|optimizer[^/]*\.(bin|pt)")
_OTHER_MODEL = re.compile(r"model_\d+")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


@dataclass(frozen=True)
class Part:
    """Some of a folder's files: how many, and their bytes."""

    files: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Inspection:
    """What was found without reading a tensor.

    Attributes:
        folder: what was looked at; where an interrupted replacement left it, if one did.
        kind: who wrote it, in words.
        manifest: its `expertmesh.json`, if it has a good one.
        config: its `config.json`, empty without one.
        step: optimizer steps done, if anything says so.
        weights: those of each model, by the model's sub-folder (empty for the first).
        parts: files and bytes of `weights`, `optimizer` and `rest`.
        leftovers: what unfinished saves left beside and in it.
        problems: why it is not complete, a line each; none if it is.
    """

    folder: Path
    kind: str
    manifest: Manifest | None
    config: Mapping[str, Any]
    step: int | None
    weights: Mapping[str, StoredWeights]
    parts: Mapping[str, Part]
    leftovers: tuple[Path, ...]
    problems: tuple[str, ...]

    @property
    def tensors(self) -> list[PlannedTensor]:
        """The tensors of all models."""
        return [tensor for weights in self.weights.values() for tensor in weights.tensors]

    @property
    def architecture(self) -> str | None:
        """The model class that the configuration names."""
        return next(iter(self.config.get("architectures") or ()), None)

    @property
    def num_layers(self) -> int | None:
        """Decoder layers, from the configuration."""
        return _setting(self.config, ("num_hidden_layers",))

    @property
    def num_experts(self) -> int | None:
        """Experts of a layer, from the configuration."""
        return _setting(self.config, _EXPERT_COUNTS)

    @property
    def experts_are_single(self) -> bool | None:
        """Whether every expert's weights are stored by themselves; None if no expert is stored."""
        names = [tensor.name for tensor in self.tensors if ".experts." in tensor.name]
        return all(re.search(r"\.experts\.\d+\.", name) for name in names) if names else None


def inspect(folder: Path) -> Inspection:
    """Look at a checkpoint of expertmesh, a Hugging Face model folder, or a checkpoint of Accelerate's FSDP2.

    What is wrong with it is in `problems`.

    Raises:
        CheckpointError: there is no such folder, or nothing in it that could be a model.
    """
    folder = resolve(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {str(folder)!r}: correct the path.")
    problems: list[str] = []
    manifest = _read_manifest(folder, problems)
    parts = _parts(folder)
    if manifest is None and not parts[WEIGHTS].files and not (folder / "config.json").is_file():
        raise CheckpointError(_no_model(folder))
    weights = _read_all_weights(folder, problems)
    _check_optimizer(folder, problems)
    config = _read_json(folder / "config.json", problems)
    state = _read_json(folder / _TRAINER_STATE, problems)
    if folder.name.endswith(_PARTIAL):
        problems.insert(0, f"{folder} is what a save that did not end has left.")
    return Inspection(
        folder=folder,
        kind=_kind(manifest, weights, parts),
        manifest=manifest,
        config=config,
        step=state.get("global_step") if manifest is None or manifest.step is None else manifest.step,
        weights=weights,
        parts=parts,
        leftovers=tuple(incomplete(folder)),
        problems=tuple(problems),
    )


@dataclass
class Verification:
    """What reading every byte has shown.

    Attributes:
        compared: tensors and files whose checksum was compared with one noted when they were written.
        only_read: tensors and files that nobody noted a checksum of; they could be read to their ends.
        loadable: whether `from_pretrained` finds all of the model's tensors; None if its class is not known here.
        problems: what is damaged, a line each, with the files' names.
    """

    compared: int = 0
    only_read: int = 0
    loadable: bool | None = None
    problems: list[str] = field(default_factory=list)


def verify(inspection: Inspection) -> Verification:
    """Read a folder's files and compare them with the checksums in its manifest, if it has one."""
    result = Verification()
    manifest = inspection.manifest or Manifest()
    if inspection.manifest is not None:
        try:
            verify_files(inspection.folder)
        except CheckpointError as error:
            result.problems.append(str(error))
        result.compared += sum(entry.crc32 is not None for entry in manifest.files.values())
    _verify_tensors(inspection, manifest, result)
    for name, path in _files(inspection.folder):
        if name not in manifest.files and _part(name) != REST and path.suffix != ".safetensors":
            with path.open("rb", buffering=0) as file:
                while file.read(CHUNK):
                    pass
            result.only_read += 1
    _verify_names(inspection, result)
    return result


def _verify_names(inspection: Inspection, result: Verification) -> None:
    """Ask Transformers' own conversion whether the stored tensors are all that the model needs."""
    weights = inspection.weights.get("")
    if weights is None or weights.form != "model":
        return
    try:
        model = model_without_weights(read_config(inspection.folder))
    except CheckpointError:
        return
    plan = trace_load(model, weights.stored)
    wrong = [*plan.missing, *(name for name, *_ in plan.misshapen)]
    result.loadable = not wrong
    if wrong:
        result.problems.append(f"{inspection.folder} lacks tensors of {inspection.architecture}: {some(wrong)}.")


def _verify_tensors(inspection: Inspection, manifest: Manifest, result: Verification) -> None:
    stored = [
        (tensor, manifest.tensors.get(str(PurePosixPath(subfolder, tensor.name))))
        for subfolder, weights in inspection.weights.items()
        for tensor in weights.stored.values()
    ]
    damaged: dict[Path, list[str]] = {}
    with ThreadPoolExecutor(num_threads()) as threads:
        found = threads.map(lambda item: _checksum(item[0]), stored)
        for (tensor, expected), crc in zip(stored, found, strict=True):
            if expected is not None and crc != expected:
                damaged.setdefault(tensor.path, []).append(tensor.name)
    noted = sum(expected is not None for _, expected in stored)
    result.compared += noted
    result.only_read += len(stored) - noted
    result.problems += [
        f"{path} was damaged since it was written: the checksum of {some(names)} differs. Use another checkpoint."
        for path, names in sorted(damaged.items())
    ]


def _checksum(stored: StoredTensor) -> str:
    crc, buffer = 0, memoryview(bytearray(min(CHUNK, stored.nbytes)))
    with InputFiles() as files:
        for start in range(0, stored.nbytes, CHUNK):
            part = buffer[: min(CHUNK, stored.nbytes - start)]
            files.read(stored, start, part)
            crc = zlib.crc32(part, crc)
    return f"{crc:08x}"


def _read_manifest(folder: Path, problems: list[str]) -> Manifest | None:
    if not (folder / MANIFEST).exists():
        return None
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        problems.append(str(error))
        return None
    problems += [f"{misfit}." for misfit in manifest.misfits(folder)]
    return manifest


def _read_all_weights(folder: Path, problems: list[str]) -> dict[str, StoredWeights]:
    others = sorted(path.name for path in folder.iterdir() if path.is_dir() and _OTHER_MODEL.fullmatch(path.name))
    found = {}
    known = len(problems)
    for name in ("", *others):
        try:
            found[name] = read_weights(folder / name)
        except CheckpointError as error:
            # The manifest has already named the file that is missing or cut.
            if not known:
                problems.append(str(error))
    return found


def _check_optimizer(folder: Path, problems: list[str]) -> None:
    path = optimizer_folder(folder)
    if not path.is_dir() or problems:
        return
    try:
        read_dcp(path)
    except CheckpointError as error:
        problems.append(str(error))


def _no_model(folder: Path) -> str:
    checkpoints = sorted(path.name for path in folder.glob("checkpoint*") if path.is_dir())
    if checkpoints:
        return f"{folder} holds no model itself, but {len(checkpoints)} checkpoints: name one, {some(checkpoints)}."
    return f"{folder} holds no model: name a checkpoint, or a Hugging Face model folder."


def _kind(manifest: Manifest | None, weights: Mapping[str, StoredWeights], parts: Mapping[str, Part]) -> str:
    form = weights[""].form if "" in weights else "model"
    if manifest is None:
        return _KINDS[form]
    if not parts[OPTIMIZER].files:
        return f"{_KINDS[form]} with checksums"
    return f"expertmesh checkpoint{_OUR_FORMS[form]}"


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        # The manifest has already named a file that is cut.
        if not any(str(path) in problem for problem in problems):
            problems.append(f"{path} is no JSON ({error}): fetch it again, or use another checkpoint.")
        return {}
    return content if isinstance(content, dict) else {}


def _setting(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """The first of these settings in a configuration, or in one of those that it is put together of."""
    nested = [value for value in config.values() if isinstance(value, dict)]
    return next((level[name] for level in (config, *nested) for name in names if level.get(name)), None)


def _parts(folder: Path) -> dict[str, Part]:
    parts = dict.fromkeys((WEIGHTS, OPTIMIZER, REST), Part())
    for name, path in _files(folder):
        part = parts[_part(name)]
        parts[_part(name)] = Part(part.files + 1, part.nbytes + path.stat().st_size)
    return parts


def _part(name: str) -> str:
    name = re.sub(rf"^{_OTHER_MODEL.pattern}/", "", name)
    if _WEIGHT_FILES.fullmatch(name):
        return WEIGHTS
    return OPTIMIZER if _OPTIMIZER_FILES.fullmatch(name) else REST


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """A folder's own files by their paths in it, without those of other checkpoints inside it."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(("checkpoint-", "checkpoints/", ".")):
            yield name, path
