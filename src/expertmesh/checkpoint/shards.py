"""What this rank holds of a model's tensors, under the names that its state dict gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from expertmesh.checkpoint.boxes import Box, box_of, is_primary


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of one tensor.

    Attributes:
        shape: of the whole tensor.
        box: which part of it this is.
        tensor: its elements, of shape `box.shape`, where the model has them. Writing into it changes the model.
        primary: whether, among the ranks that hold this same part, this is the one that writes it.
    """

    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    primary: bool

    @classmethod
    def of(cls, tensor: Tensor) -> LocalShard:
        """A DTensor's local shard, or all of a plain tensor."""
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        return cls(tuple(tensor.shape), box_of(tensor), local, is_primary(tensor))

    def copied(self) -> LocalShard:
        """The same part in memory of its own, on the CPU."""
        return LocalShard(self.shape, self.box, self.tensor.to("cpu", copy=True), self.primary)

    def region(self, box: Box) -> Tensor:
        """The elements of a box inside this part, given in the whole tensor's coordinates."""
        return self.tensor[box.within(self.box).slices]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without `torch.compile` around it."""
    return getattr(model, "_orig_mod", model)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers as the model has them now, by the names of its state dict; tied ones once.

    Where several names mean one tensor, the name that Transformers calls the source of the tie is kept.
    """
    model = unwrapped(model)
    tensors = {
        name.replace("_orig_mod.", ""): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, source in tied.items():
        if name in tensors and tensors[name] is tensors.get(source):
            del tensors[name]
    return tensors


def tensors_to_save(model: nn.Module) -> dict[str, Tensor]:
    """`named_tensors` without those that Transformers leaves out of every checkpoint of this model."""
    ignored = getattr(unwrapped(model), "_keys_to_ignore_on_save", None) or ()
    return {name: tensor for name, tensor in named_tensors(model).items() if name not in ignored}


def local_shards(tensors: dict[str, Tensor]) -> dict[str, LocalShard]:
    """This rank's part of each tensor that it has a part of."""
    shards = {name: LocalShard.of(tensor) for name, tensor in tensors.items()}
    return {name: shard for name, shard in shards.items() if shard.box.numel}


def original_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The model's class before FSDP2 put one of its own in front."""
    fsdp = torch.distributed.fsdp.FSDPModule
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, fsdp))
