"""The arms of the checkpoint benchmark: the same model, on the same ranks, saved and loaded in five ways.

An arm holds a sharded model and can save it to a folder and load it from there. Each does what a user of that library
would write, with its defaults.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import merge_fsdp_weights
from accelerate.utils.fsdp_utils import load_fsdp_model, save_fsdp_model
from step_arms import WORKLOADS, Workload, fsdp2_accelerator, load
from torch import Tensor, nn
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

SIZES = {
    "1GB": Workload(hidden_size=512, moe_intermediate_size=512, sequences=1, sequence_length=1, num_layers=5),
    "smoke": replace(WORKLOADS["smoke"], num_layers=1),
}


class Arm:
    """A sharded model that can be saved and loaded.

    Attributes:
        name: for the table.
        fsync: what reaches the disk before `save` returns.
        model: this rank's part.
    """

    name: str
    fsync = "nothing"

    def __init__(self, saved: Path) -> None:
        self.model = load(saved)

    def save(self, folder: Path) -> None:
        """Collective. `folder` does not exist yet; what is in it afterwards is what a user keeps."""
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        """Collective. Restore the weights from what `save` left."""
        raise NotImplementedError

    def forget(self) -> None:
        """Lose the weights, so that a load has to bring them back."""
        with torch.no_grad():
            for shard in self._shards():
                shard.zero_()

    def fingerprint(self) -> list[int]:
        """A checksum of what this rank holds of each weight."""
        return checksums(self._shards())

    def _shards(self) -> Iterator[Tensor]:
        for parameter in self.model.parameters():
            yield parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


class AccelerateFSDP2(Arm):
    """A model that `Accelerator.prepare` sharded, every weight over all ranks."""

    state_dict_type = "SHARDED_STATE_DICT"

    def __init__(self, saved: Path) -> None:
        super().__init__(saved)
        self.accelerator = fsdp2_accelerator(state_dict_type=self.state_dict_type)
        # Accelerate prepares an FSDP2 model only together with an optimizer. This one never steps and holds no state.
        self.model, _ = self.accelerator.prepare(self.model, torch.optim.SGD(self.model.parameters()))

    def _save_config(self, folder: Path) -> None:
        """What the formats that know only tensors lack before `from_pretrained` can read them."""
        if self.accelerator.is_main_process:
            self.model.config.save_pretrained(folder)


class FullStateDict(AccelerateFSDP2):
    """What `Trainer.save_model` does; loaded as Accelerate's `cpu_ram_efficient_loading` does."""

    name = "Accelerate FULL_STATE_DICT + save_pretrained"
    state_dict_type = "FULL_STATE_DICT"

    def save(self, folder: Path) -> None:
        state_dict = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            self.accelerator.unwrap_model(self.model).save_pretrained(folder, state_dict=state_dict)

    def load(self, folder: Path) -> None:
        whole = load(folder).state_dict() if self.accelerator.is_main_process else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, whole, options=options)


class ShardedStateDict(AccelerateFSDP2):
    """What Accelerate writes by default, and the command it offers to make a safetensors file of that."""

    name = "Accelerate SHARDED_STATE_DICT + merge_fsdp_weights"
    fsync = "DCP files"

    def save(self, folder: Path) -> None:
        save_fsdp_model(self.accelerator.state.fsdp_plugin, self.accelerator, self.model, folder)
        merge_fsdp_weights(folder / "pytorch_model_fsdp_0", folder)
        self._save_config(folder)

    def load(self, folder: Path) -> None:
        load_fsdp_model(self.accelerator.state.fsdp_plugin, self.accelerator, self.model, folder)


class TransformersEP(Arm):
    """Transformers' own expert parallelism, which gathers to save and loads by building the model anew."""

    name = "Transformers EP save_pretrained"

    def __init__(self, saved: Path) -> None:
        self.load(saved)

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder, is_main_process=dist.get_rank() == 0)

    def load(self, folder: Path) -> None:
        ranks = dist.get_world_size()
        distributed = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")
        self.model = load(folder, distributed_config=distributed)

    def forget(self) -> None:
        del self.model
        gc.collect()


class ConsolidatedDCP(AccelerateFSDP2):
    """PyTorch's safetensors storage: every rank writes its shards, then every rank puts one file together."""

    name = "DCP HuggingFaceStorageWriter + consolidation"
    fsync = "shards"

    def save(self, folder: Path) -> None:
        state_dict = get_model_state_dict(self.model)
        files = _even_files(state_dict, dist.get_world_size())
        shards = str(folder / "sharded")
        dcp.save(state_dict, storage_writer=HuggingFaceStorageWriter(shards, files, save_distributed=True))
        consolidate_safetensors_files_on_every_rank(shards, str(folder), files)
        self._save_config(folder)

    def load(self, folder: Path) -> None:
        state_dict = get_model_state_dict(self.model)
        dcp.load(state_dict, storage_reader=HuggingFaceStorageReader(str(folder)))
        set_model_state_dict(self.model, state_dict)


class ExpertMesh(Arm):
    """Ours: every rank writes its own bytes into the final files, and reads its own from there."""

    name = "expertmesh save_model"
    fsync = "everything"

    def __init__(self, saved: Path) -> None:
        from expertmesh import ExpertParallelConfig, parallelize

        super().__init__(saved)
        parallelize(self.model, ExpertParallelConfig(ep_size=dist.get_world_size()), device="cpu")

    def save(self, folder: Path) -> None:
        from expertmesh.checkpoint import save_model

        save_model(self.model, folder)

    def load(self, folder: Path) -> None:
        from expertmesh.checkpoint import load_model

        load_model(self.model, folder)


ARMS: dict[str, type[Arm]] = {
    "a": FullStateDict,
    "b": ShardedStateDict,
    "c": TransformersEP,
    "d": ConsolidatedDCP,
    "e": ExpertMesh,
}


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Of each tensor's bytes, in row-major order."""
    return [zlib.crc32(tensor.contiguous().numpy()) for tensor in tensors]


def _even_files(state_dict: dict[str, nn.Parameter | Tensor], files: int) -> dict[str, int]:
    """Which file, counted from 1, a weight goes to, so that the files are about equally large."""
    sizes = [0] * files
    chosen = {}
    for key, tensor in sorted(state_dict.items(), key=lambda item: -item[1].numel()):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += tensor.numel()
        chosen[key] = smallest + 1
    return chosen
