"""From a checkpoint to a Hugging Face model folder without training state, in any dtype, on one process; or from an
adapter to such a folder, merged into its base model, or to an adapter folder in another layout.

Tensors pass through memory in parts, so a model of any size needs about `PEAK_BYTES` beside the libraries. A DCP folder
needs the tensors of one layer's experts on top, because only whole ones can be taken out of it. Merging needs the
adapter on top, and what one of the largest adapted matrices takes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor
from transformers.core_model_loading import build_glob_alternation

from expertmesh.checkpoint.architecture import model_without_weights, read_config
from expertmesh.checkpoint.dcp import MODEL_FOLDER
from expertmesh.checkpoint.file_io import CHUNK, bytes_of
from expertmesh.checkpoint.manifest import MANIFEST, Manifest, describe_files, file_checksum
from expertmesh.checkpoint.merged_stream import MergedStream
from expertmesh.checkpoint.object_store import ObjectStoreFolder, in_file_order, is_url
from expertmesh.checkpoint.publish import Publication, resolve
from expertmesh.checkpoint.safetensors_format import INDEX_FILE, PlannedFile, PlannedTensor, index_json, plan_files
from expertmesh.checkpoint.stored_weights import ADAPTER_FILE, StoredWeights, read_weights
from expertmesh.checkpoint.tensor_streams import DcpStream, SafetensorsStream, TensorStream
from expertmesh.checkpoint.writer import MAX_SHARD_SIZE
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.plugins import load_plugin

# One part as it is read, cast, and compared after the cast.
PEAK_BYTES = 8 * CHUNK
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_CAST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_CONFIG = "config.json"
# What a model folder has beside its weights: configurations, tokenizers, own code.
_COMPANIONS = ("*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja", "*.py", "additional_chat_templates/*")
_NO_COMPANIONS = (
    MANIFEST, INDEX_FILE, _CONFIG, "adapter_config.json", "trainer_state.json", "pytorch_model.bin.index.json",
)  # fmt: skip


def export(
    checkpoint: Path,
    output: str,
    *,
    dtype: torch.dtype | None = None,
    config: str | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint's model as a Hugging Face folder: at once and as a whole where `output` is a path.

    Every byte that is read is compared with the checksum noted when it was written, if there is one.

    Args:
        checkpoint: of expertmesh, of Accelerate's FSDP2 (`pytorch_model_fsdp_0`), or a Hugging Face model folder.
        output: a folder, or a URL that fsspec knows.
        dtype: for floating-point weights; those that the model's class keeps in float32 stay what they are.
        config: a folder or a model's name on the Hub, for a checkpoint that has no `config.json`.
        max_shard_size: of a weight file, in bytes.
        overwrite: replace the model that `output` holds. Files that no checkpoint wrote stay.

    Raises:
        ConfigError: the output is not empty or is the checkpoint, or there is no configuration.
        CheckpointError: the checkpoint is damaged or cannot be exported so; `output` is what it was.
    """
    checkpoint = _existing(checkpoint)
    _refuse_output(checkpoint, output, overwrite)
    weights = read_weights(checkpoint)
    if weights.form == "adapter":
        raise CheckpointError(
            f"{checkpoint} holds a PEFT adapter and no model: pass --merge to merge it into its base."
        )
    with _companions_of(checkpoint, None if config is None else _hub_folder(config, "--config")) as companions:
        _export(_open(checkpoint, weights, companions), _noted(checkpoint), companions, output, dtype, max_shard_size)


def export_merged(
    adapter: Path,
    output: str,
    *,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    overwrite: bool = False,
) -> None:
    """Write the model that an adapter makes of its base, tensor by tensor. See `export`.

    Every tensor has the name and, without `dtype`, the dtype that the base has it under. Tokenizer files come from the
    adapter's folder if it has some.

    Args:
        adapter: a folder that PEFT wrote, or a checkpoint of expertmesh that holds adapters.
        output: a folder, or a URL that fsspec knows.
        base: a folder or a model's name on the Hub; default: the one that the adapter's configuration names.
        dtype: as in `export`, after merging.
        max_shard_size: of a weight file, in bytes.
        overwrite: replace the model that `output` holds.

    Raises:
        ConfigError: the output is not empty, or is what is read; or there is no such base.
        CheckpointError: the adapter cannot be merged, or into another base; or one of both is damaged. Nothing has been
            written, except where damage of the base is found by a checksum on the way; `output` is what it was.
    """
    adapter = _existing_adapter(adapter)
    folder = _base_folder(adapter, base, weights=True)
    for read in (adapter, folder):
        _refuse_output(read, output, overwrite)
    weights = read_weights(folder)
    if weights.form != "model":
        raise CheckpointError(f"{folder} is no base model in safetensors: export it to a model first.")
    with _companions_of(adapter, folder) as companions:
        if "quantization_config" in json.loads((companions / _CONFIG).read_text(encoding="utf-8")):
            raise CheckpointError(f"the weights of the base {folder} are quantized, and nothing can be added to them.")
        model = model_without_weights(read_config(companions))
        peft = load_plugin("peft")
        adaptation = peft.PeftAdaptation(peft.load_adapter(model, adapter))
        stream = SafetensorsStream(weights.stored, _noted(folder).tensors)
        merged = MergedStream(stream, weights.stored, model, adaptation)
        _export(merged, _noted(adapter), companions, output, dtype, max_shard_size)


def export_per_expert(adapter: Path, output: str, *, base: str | None = None, overwrite: bool = False) -> bool:
    """Write an adapter of stacked experts as one for each expert, under the names that the model is published with.

    Args:
        adapter: a folder that PEFT wrote, or a checkpoint of expertmesh that holds adapters.
        output: a folder.
        base: a folder or a model's name on the Hub, of which the configuration is read; default: the one that the
            adapter's configuration names.
        overwrite: replace what a checkpoint left in `output`.

    Returns:
        Whether PEFT itself can load the result, which it can for some families.

    Raises:
        ConfigError: as in `export_merged`, or `output` is a URL.
        CheckpointError: the adapter does not fit, has no stacked experts, or the model is published with stacks.
    """
    adapter = _existing_adapter(adapter)
    if is_url(output):
        raise ConfigError(f"{output} is a URL: export the adapter to a folder, and copy that.")
    _refuse_output(adapter, output, overwrite)
    model = model_without_weights(read_config(_base_folder(adapter, base, weights=False)))
    with Publication(Path(output)) as publication:
        folder = publication.folder
        loadable = load_plugin("peft").write_per_expert(model, adapter, folder)
        _copy_companions(adapter, folder)
        source = _noted(adapter)
        Manifest(_versions(), source.mesh, source.step, {}, describe_files(folder)).write(folder)
    return loadable


def _export(
    stream: TensorStream,
    source: Manifest,
    companions: Path,
    output: str,
    dtype: torch.dtype | None,
    max_shard_size: int,
) -> None:
    planned = _plan(stream, companions, dtype)
    _adapt_config(companions / _CONFIG, planned, dtype)
    files = plan_files(planned, max_shard_size)
    if is_url(output):
        _write_to_url(stream, files, companions, ObjectStoreFolder(output))
    else:
        _write_folder(stream, files, companions, Path(output), source)


def _existing(folder: Path) -> Path:
    folder = resolve(folder)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {str(folder)!r}: correct the path.")
    return folder


def _existing_adapter(folder: Path) -> Path:
    folder = _existing(folder)
    if not (folder / ADAPTER_FILE).is_file():
        raise CheckpointError(f"{folder} holds no PEFT adapter: there is no {ADAPTER_FILE}.")
    _check_files(folder, lambda path: path.name == ADAPTER_FILE)
    return folder


def _base_folder(adapter: Path, base: str | None, weights: bool) -> Path:
    name, revision = (base, None) if base is not None else load_plugin("peft").base_of(adapter)
    if name is None:
        raise ConfigError(f"{adapter} does not say which base model it is for: name it with --base.")
    folder = _hub_folder(name, "--base" if base is not None else f"the base model of {adapter},", weights, revision)
    if not (folder / _CONFIG).is_file():
        raise ConfigError(f"{folder} has no {_CONFIG}, so it is no base model: name one with --base.")
    return folder


def _write_folder(
    stream: TensorStream, files: list[PlannedFile], companions: Path, output: Path, source: Manifest
) -> None:
    with Publication(output) as publication:
        folder = publication.folder
        shutil.copytree(companions, folder, dirs_exist_ok=True)
        tensors = _write_weights(stream, files, lambda name: (folder / name).open("wb"))
        (folder / INDEX_FILE).write_text(index_json(files))
        Manifest(_versions(), source.mesh, source.step, tensors, describe_files(folder)).write(folder)


def _versions() -> dict[str, str]:
    return {package: version(package) for package in ("expertmesh", "torch", "transformers")}


def _write_to_url(stream: TensorStream, files: list[PlannedFile], companions: Path, folder: ObjectStoreFolder) -> None:
    folder.remove_model()
    _write_weights(stream, files, folder.open)
    folder.put_files(companions)
    folder.put(INDEX_FILE, index_json(files).encode())


def _write_weights(
    stream: TensorStream, files: list[PlannedFile], create: Callable[[str], AbstractContextManager[BinaryIO]]
) -> dict[str, str]:
    """Write every file from its first byte to its last. Returns the CRC-32 of each tensor as 8 hexadecimal digits."""
    checksums = {}
    for file in files:
        with create(file.filename) as output:
            output.write(file.header)
            for stored in in_file_order(file):
                crc = 0
                for part in stream.parts(stored.name):
                    content = bytes_of(_cast(part, stored.dtype, stored.name))
                    output.write(content)
                    crc = zlib.crc32(content, crc)
                checksums[stored.name] = f"{crc:08x}"
    return checksums


def _cast(part: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    cast = part.to(dtype)
    if dtype == torch.float16 and not torch.equal(cast.isinf(), part.isinf()):
        raise CheckpointError(f"{name} has values that float16 cannot hold: export as bf16 or fp32.")
    return cast


def _plan(stream: TensorStream, companions: Path, dtype: torch.dtype | None) -> list[PlannedTensor]:
    """The tensors as they are to be written."""
    if dtype is None:
        return list(stream.tensors)
    kept = _kept_in_float32(companions, dtype)
    return [
        PlannedTensor(tensor.name, dtype, tensor.shape) if tensor.dtype in _CAST and not kept(tensor.name) else tensor
        for tensor in stream.tensors
    ]


def _kept_in_float32(companions: Path, dtype: torch.dtype) -> Callable[[str], bool]:
    """Which tensors the model's class wants in float32 where the others are in `dtype`."""
    try:
        plan = model_without_weights(read_config(companions))._get_dtype_plan(dtype)
    except CheckpointError:
        # A model with code of its own, which is not run here.
        plan = {}
    pattern = build_glob_alternation(list(plan))[0] if plan else None
    return lambda name: pattern is not None and pattern.search(name) is not None


def _open(checkpoint: Path, weights: StoredWeights, companions: Path) -> TensorStream:
    if weights.form == "dcp":
        _check_files(checkpoint, lambda path: path.parent.name == MODEL_FOLDER)
        return DcpStream(checkpoint, weights.tensors, model_without_weights(read_config(companions)))
    return SafetensorsStream(weights.stored, _noted(checkpoint).tensors)


def _check_files(checkpoint: Path, chosen: Callable[[Path], bool]) -> None:
    """The tensors of a DCP folder or an adapter have no checksums of their own; files that expertmesh wrote have."""
    for name, entry in _noted(checkpoint).files.items():
        path = checkpoint / name
        if chosen(path) and entry.crc32 not in (None, file_checksum(path)):
            raise CheckpointError(f"{path} was damaged since it was written: its checksum differs.")


def _noted(checkpoint: Path) -> Manifest:
    return Manifest.read(checkpoint) if (checkpoint / MANIFEST).exists() else Manifest()


def _refuse_output(checkpoint: Path, output: str, overwrite: bool) -> None:
    if is_url(output):
        empty = ObjectStoreFolder(output).is_empty()
    else:
        path = Path(output)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{output} is a file: name a folder.")
        if path.resolve() == checkpoint.resolve():
            raise ConfigError(f"{output} is the checkpoint itself: name another folder.")
        empty = not path.exists() or not any(path.iterdir())
    if not empty and not overwrite:
        raise ConfigError(f"{output} is not empty: name another folder, or pass --overwrite to replace its model.")


@contextmanager
def _companions_of(checkpoint: Path, given: Path | None) -> Iterator[Path]:
    """A folder with what a model folder has beside its weights; its configuration is the given folder's, if any."""
    source = (given or checkpoint) / _CONFIG
    if not source.is_file():
        raise ConfigError(f"{source.parent} has no {_CONFIG}: pass --config with a folder or a model's name that has.")
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary)
        for folder in (given, checkpoint):
            if folder is not None:
                _copy_companions(folder, target)
        shutil.copyfile(source, target / _CONFIG)
        yield target


def _copy_companions(folder: Path, target: Path) -> None:
    for path in _companions(folder):
        copy = target / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def _companions(folder: Path) -> Iterator[Path]:
    for pattern in _COMPANIONS:
        yield from (path for path in folder.glob(pattern) if path.is_file() and path.name not in _NO_COMPANIONS)


def _hub_folder(name: str, what: str, weights: bool = False, revision: str | None = None) -> Path:
    if Path(name).is_dir():
        return Path(name)
    patterns = [*_COMPANIONS, "*.safetensors"] if weights else list(_COMPANIONS)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{what} {name!r} is no folder, and no model on the Hub: {reason}") from error


def _adapt_config(path: Path, planned: list[PlannedTensor], dtype: torch.dtype | None) -> None:
    """Let a configuration say the dtype of most of the weights. Quantized models keep theirs."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if "quantization_config" in config:
        if dtype is not None:
            raise ConfigError(
                f"the weights are quantized ({path.name} says how), and cannot be cast: leave out --dtype."
            )
        return
    nbytes: Counter[torch.dtype] = Counter()
    for tensor in planned:
        if tensor.dtype in _CAST:
            nbytes[tensor.dtype] += tensor.nbytes
    if nbytes:
        main = str(nbytes.most_common(1)[0][0]).removeprefix("torch.")
        path.write_text(json.dumps(_with_dtype(config, main) | {"dtype": main}, indent=2, sort_keys=True) + "\n")


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The configuration with this dtype wherever it, or one that it is put together of, says one."""
    adapted = {key: _with_dtype(value, dtype) if isinstance(value, dict) else value for key, value in config.items()}
    for key in ("dtype", "torch_dtype"):
        if isinstance(adapted.get(key), str):
            del adapted[key]
            adapted["dtype"] = dtype
    return adapted
