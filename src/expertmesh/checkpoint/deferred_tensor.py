"""Tensors whose elements are still in files: everybody may ask what they are, and whoever touches them reads them.

A `DeferredParameter` stands in a model for a weight that has not been read. It has the weight's shape, dtype and
device, and one element of memory. Questions about those are answered without reading; conversions of dtype and device
stay deferred; anything else, a forward or a look at `.data`, first reads the whole weight in place and turns the object
into the plain `nn.Parameter` it stood for, as torch's own `UninitializedParameter` does. So code that never heard of
deferred weights is right whatever it does, and frugal as long as it only asks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter


class Source(Protocol):
    """Where the elements of a deferred tensor are."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read_into(self, destination: Tensor) -> None:
        """Read the whole tensor into `destination`, `[*shape]` of this dtype."""

    def cast(self, dtype: torch.dtype) -> Source | None:
        """The same elements converted once more, to the bit; None if that cannot be done while reading."""


class DeferredTensor(Tensor):
    """A tensor that is read from its source when its elements are needed, and is a plain `Tensor` from then on."""

    source: Source
    becomes: type[Tensor] = Tensor

    @staticmethod
    def __new__(
        cls: type[DeferredTensor], source: Source, device: torch.device | str = "cpu", requires_grad: bool = False
    ) -> DeferredTensor:
        tensor = torch.Tensor._make_subclass(cls, one_element(source, device), requires_grad)
        tensor.source = source
        return tensor

    def materialize(self) -> None:
        """Read the whole tensor. The object stays the same and is of a plain class afterwards.

        Raises:
            CheckpointError: a file has changed since the tensor was deferred.
        """
        # What is read now outlives a caller's `torch.inference_mode()`, and must be trainable.
        with torch.inference_mode(False), torch.no_grad():
            data = torch.empty(self.source.shape, dtype=self.source.dtype, device=self.device)
            self.source.read_into(data)
            self.settle(data)

    def settle(self, data: Tensor) -> None:
        """Become the plain tensor or parameter that holds `data`."""
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.data.__set__(self, data)
        del self.source
        self.__class__ = self.becomes

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredTensor:
        if id(self) not in memo:
            memo[id(self)] = type(self)(self.source, self.device, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> Any:
        self.materialize()
        return self.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}(not read yet, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ANSWERED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _DEFERRED and isinstance(args[0], DeferredTensor):
            answer = _DEFERRED[func](func, *args, **kwargs)
            if answer is not NotImplemented:
                return answer
        for tensor in deferred_among((args, kwargs)):
            tensor.materialize()
        return func(*args, **kwargs)


class DeferredParameter(DeferredTensor, nn.Parameter):
    """A `DeferredTensor` that is a module's parameter, and a plain `nn.Parameter` once it was read."""

    becomes = nn.Parameter

    # Parameter switches it off.
    __torch_function__ = DeferredTensor.__torch_function__


def deferred_among(tree: Any) -> Iterator[DeferredTensor]:
    """The tensors in nested lists, tuples and dicts that are deferred when their turn comes."""
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, DeferredTensor))


def one_element(source: Source, device: torch.device | str) -> Tensor:
    """A tensor like the source's, with all its elements in one place.

    Whoever gets past `__torch_function__` (bindings that take C++ tensors) finds NaN, not something that looks right.
    """
    poison = float("nan") if source.dtype.is_floating_point or source.dtype.is_complex else 0
    return torch.full((1,), poison, dtype=source.dtype, device=device).expand(source.shape)


def _convert(func: Callable, tensor: DeferredTensor, *args: Any, **kwargs: Any) -> Any:
    """`to`, `float`, `cpu` and their like, decided by trying them on one element."""
    if "memory_format" in kwargs or (torch.is_grad_enabled() and tensor.requires_grad):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        probe = torch.empty((), dtype=tensor.dtype, device=tensor.device)
        result = func(probe, *args, **kwargs)
        if result is probe:
            return tensor
        if result.is_meta:
            return torch.empty(tensor.shape, dtype=result.dtype, device="meta")
    source = tensor.source.cast(result.dtype)
    return NotImplemented if source is None else DeferredTensor(source, result.device)


def _set_data(func: Callable, tensor: DeferredTensor, value: Tensor) -> Any:
    """`parameter.data = value`, by which `nn.Module.to` puts in what it has converted."""
    if value is tensor:
        return None
    if type(value) is not DeferredTensor:
        for other in deferred_among(value):
            other.materialize()
        tensor.settle(value)
        return None
    with torch._C.DisableTorchFunctionSubclass():
        func(tensor, one_element(value.source, value.device))
    tensor.source = value.source
    return None


def _detach(func: Callable, tensor: DeferredTensor) -> Any:
    """Reads; but `nn.Parameter(tensor)` insists on getting from `detach` the class that it saw a moment ago."""
    if not isinstance(tensor, nn.Parameter) or sys._getframe(2).f_code is not nn.Parameter.__new__.__code__:
        return NotImplemented
    tensor.materialize()
    alias = tensor.detach()
    alias.__class__ = nn.Parameter
    return alias


def _contiguous_stride(func: Callable, tensor: DeferredTensor, dim: int | None = None) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty(tensor.shape, device="meta")
    return like.stride() if dim is None else like.stride(dim)


def _is_contiguous(func: Callable, tensor: DeferredTensor, memory_format: Any = torch.contiguous_format) -> Any:
    return True if memory_format is torch.contiguous_format else NotImplemented


def _contiguous(func: Callable, tensor: DeferredTensor, memory_format: Any = torch.contiguous_format) -> Any:
    return tensor if memory_format in (torch.contiguous_format, torch.preserve_format) else NotImplemented


def _type(func: Callable, tensor: DeferredTensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return _convert(func, tensor, *args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(tensor)


def _getters(*names: str) -> set[Callable]:
    return {getattr(Tensor, name).__get__ for name in names}


# What depends on shape, dtype, device and autograd's bookkeeping only. Everything that is not here reads.
_ANSWERED: set[Callable] = {
    *_getters("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "name", "output_nr"),
    *_getters("requires_grad", "is_leaf", "grad", "grad_fn", "grad_dtype", "retains_grad", "_version", "_base"),
    *_getters("is_cpu", "is_cuda", "is_xpu", "is_mps", "is_mtia", "is_meta", "is_sparse", "is_sparse_csr", "is_nested"),
    *_getters("is_quantized", "is_mkldnn", "is_xla", "is_vulkan", "is_ipu", "is_maia"),
    *_getters("_backward_hooks", "_post_accumulate_grad_hooks", "_has_symbolic_sizes_strides"),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad", "grad_dtype", "_backward_hooks")),
    Tensor._post_accumulate_grad_hooks.__set__,
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.get_device,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.is_inference, Tensor.is_same_size,
    Tensor.requires_grad_, Tensor.retain_grad, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook,
    Tensor.data_ptr, Tensor.storage_offset,
    Tensor.__hash__, Tensor.__len__, Tensor.__dir__, Tensor.__format__,
    Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full,
    torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_inference, torch.is_same_size,
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch._has_compatible_shallow_copy_type, torch.result_type,
}  # fmt: skip

_DEFERRED: dict[Callable, Callable[..., Any]] = {
    **{getattr(Tensor, name): _convert for name in ("to", "float", "half", "bfloat16", "double", "cpu", "cuda")},
    Tensor.type: _type,
    Tensor.data.__set__: _set_data,
    Tensor.detach: _detach,
    Tensor.stride: _contiguous_stride,
    Tensor.is_contiguous: _is_contiguous,
    Tensor.contiguous: _contiguous,
}
