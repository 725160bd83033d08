"""`Linear`, `GroupedLinear` and `RMSNorm`, and what all modules of Transformer Engine have in common."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from emulation import te_device
from emulation.errors import EmulationError, require
from emulation.te_gemm import assert_dim_for_fp8_exec, linear
from emulation.te_quantization import FP8GlobalStateManager, get_align_size_for_quantization
from emulation.te_recipe import Recipe


class ExtraState(nn.Module):
    """Every module has an extra state, an empty one where the recipe keeps none."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        if state is None:
            return
        if not isinstance(state, Tensor):
            raise RuntimeError("Unsupported checkpoint format.")
        require(state.numel() == 0, "the state of DelayedScaling, pickled")


class TransformerEngineBaseModule(ExtraState):
    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        te_device.check_available()
        self.name = name
        self.activation_dtype: torch.dtype | None = None
        self._initialisers: dict[str, Callable[[Tensor], object]] = {}

    def new_parameter(self, name: str, shape: tuple[int, ...], initialise: Callable[[Tensor], object], **where) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(*shape, **where)))
        self._initialisers[name] = initialise

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Every Parameter is replaced by another one; what was on "meta" is then on the device."""
        if defer_init:
            return
        for name, param in self.named_parameters(recurse=False):
            local = param._local_tensor if isinstance(param, DTensor) else param
            if local.device.type == "meta":
                local = torch.empty_like(local, device=te_device.default())
            with torch.no_grad():
                self._initialisers[name](local)
            if isinstance(param, DTensor):
                layout = dict(shape=param.size(), stride=param.stride())
                local = DTensor.from_local(local.detach(), param.device_mesh, param.placements, **layout)
            setattr(self, name, nn.Parameter(local.detach()))

    def prepare_forward(self, inp: Tensor, may_differ: bool = False) -> Recipe | None:
        """Check an input and say how it is rounded."""
        te_device.check_input(inp)
        self.activation_dtype = te_device.autocast_dtype(inp.device)
        if self.activation_dtype is None:
            for name, param in self.named_parameters():
                if param.dtype != inp.dtype and not may_differ:
                    raise TypeError(
                        "Data types for parameters must match when outside of autocasted "
                        f"region. Found input dtype: {inp.dtype} and {name!r} dtype: {param.dtype}"
                    )
            self.activation_dtype = inp.dtype
        return FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None


def _normal(tensor: Tensor) -> None:
    nn.init.normal_(tensor, mean=0.0, std=0.023)


def _only_once() -> Callable[[Tensor], None]:
    """A hook that refuses a second backward: the first one frees what was kept, whoever retains the graph."""
    passed = []

    def hook(grad: Tensor) -> None:
        require(not passed, "clear_tensor_data: a second backward multiplies with empty inputs")
        passed.append(True)

    return hook


def _not_emulated(**options: object) -> None:
    for name, value in options.items():
        if value:
            raise EmulationError(f"{name} is not emulated")


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: tuple[str, ...] | dict[str, int] | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        # FSDP2 reduces gradients that autograd returns, and these two do not return them.
        require(not fuse_wgrad_accumulation, "gradients in main_grad, past FSDP2's reduce-scatter")
        require(not delay_wgrad_compute, "gradients that backward_dw computes, past FSDP2's reduce-scatter")
        _not_emulated(sequence_parallel=sequence_parallel, tp_group=tp_group, parallel_mode=parallel_mode)
        _not_emulated(tp_size=tp_size != 1, return_bias=return_bias, parameters_split=parameters_split)
        # Only the string defers: `torch.device("meta")` is materialised, on the GPU.
        is_deferred = device == "meta" if isinstance(device, str) else False
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        where = dict(device=device, dtype=params_dtype or torch.get_default_dtype())
        self.new_parameter("weight", (out_features, in_features), init_method or _normal, **where)
        if bias:
            self.new_parameter("bias", (out_features,), nn.init.zeros_, **where)
        else:
            self.bias = torch.empty(0, **where)
        self.reset_parameters(defer_init=is_deferred)

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Tensor:
        if not isinstance(is_first_microbatch, bool | None):
            raise EmulationError("is_first_microbatch is no tensor")
        _not_emulated(is_first_microbatch=is_first_microbatch is not None, fp8_output=fp8_output, fp8_grad=fp8_grad)
        recipe = self.prepare_forward(inp)
        if inp.shape[-1] != self.weight.shape[-1]:
            raise AssertionError("GEMM not possible")
        if recipe is not None:
            assert_dim_for_fp8_exec(inp, self.weight)
        return linear(inp, self.weight, self.bias if self.use_bias else None, self.activation_dtype, recipe)


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__(name)
        require(not fuse_wgrad_accumulation, "gradients in main_grad, past FSDP2's reduce-scatter")
        require(not delay_wgrad_compute, "gradients that backward_dw computes, past FSDP2's reduce-scatter")
        _not_emulated(sequence_parallel=sequence_parallel, tp_group=tp_group, parallel_mode=parallel_mode)
        _not_emulated(tp_size=tp_size != 1, return_bias=return_bias, use_grouped_tensor=use_grouped_tensor)
        _not_emulated(single_grouped_weight=single_grouped_weight, single_grouped_bias=single_grouped_bias)
        if ub_overlap_rs or ub_overlap_ag:
            raise ValueError("GroupedLinear doesn't support Userbuffer overlap.")
        self.num_gemms = num_gemms
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        where = dict(device=device, dtype=params_dtype or torch.get_default_dtype())
        for i in range(num_gemms):
            self.new_parameter(f"weight{i}", (out_features, in_features), init_method or _normal, **where)
            if bias:
                self.new_parameter(f"bias{i}", (out_features,), nn.init.zeros_, **where)
            else:
                setattr(self, f"bias{i}", torch.empty(0, **where))
        self.reset_parameters(defer_init=torch.device(device).type == "meta")

    @torch._dynamo.disable
    def forward(
        self,
        inp: Tensor,
        m_splits: Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor:
        _not_emulated(is_first_microbatch=is_first_microbatch is not None, out=out, dgrad_out=dgrad_out)
        if not isinstance(m_splits, Tensor):
            m_splits = torch.tensor(m_splits, dtype=torch.int64, device="cpu")
        if m_splits.size() != (self.num_gemms,):
            raise ValueError(
                f"Shape of splits tensor ({tuple(m_splits.size())}) does not match number of GEMMs ({self.num_gemms})."
            )
        recipe = self.prepare_forward(inp)
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        # The first one's answer is taken for all.
        require(len({weight.requires_grad for weight in weights}) == 1, "weights[0].requires_grad")
        if inp.size(-1) != weights[0].size(-1):
            raise ValueError(
                f"Input tensor (shape={tuple(inp.size())}) is not compatible with "
                f"weight tensor (shape={tuple(weights[0].size())})"
            )
        splits = m_splits.tolist()
        require(inp.numel() > 0, "no rows at all: whether its kernels take that is not known")
        if recipe is not None:
            align = get_align_size_for_quantization(recipe)
            require(not any(size % align for size in splits), f"rows of a GEMM that are no multiple of {align}")
            require(not any(size % 16 for size in weights[0].shape), "dimensions of weights that are no multiple of 16")
        results = [
            linear(
                rows, weights[i], getattr(self, f"bias{i}") if self.use_bias else None, self.activation_dtype, recipe
            )
            for i, rows in enumerate(inp.reshape(-1, inp.shape[-1]).split(splits))
        ]
        result = torch.cat(results).view(*inp.shape[:-1], self.out_features)
        if result.requires_grad:
            result.register_hook(_only_once())
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *arguments: object) -> None:
        """Stacked weights and biases are taken too."""
        for kind in ("weight", "bias") if self.use_bias else ("weight",):
            names = [f"{prefix}{kind}{i}" for i in range(self.num_gemms)]
            is_stacked = f"{prefix}{kind}" in state_dict
            if all(name in state_dict for name in names):
                state_dict.pop(f"{prefix}{kind}", None)
            elif is_stacked:
                state_dict.update(zip(names, state_dict.pop(f"{prefix}{kind}").unbind(0), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class RMSNorm(ExtraState):
    """One of the fusable operations: those may be built without a GPU."""

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__()
        if normalized_shape is None:
            if hidden_size is None:
                raise RuntimeError("Neither `normalized_shape` nor `hidden_size` (deprecated) args are provided")
            warnings.warn("`hidden_size` arg has been renamed", DeprecationWarning, stacklevel=2)
            normalized_shape = hidden_size
        elif hidden_size is not None:
            raise RuntimeError("Both `normalized_shape` and `hidden_size` (deprecated) args are provided")
        if params_dtype is not None:
            if "dtype" in kwargs:
                raise RuntimeError("Both `dtype` and `params_dtype` (deprecated) kwargs are provided")
            kwargs["dtype"] = params_dtype
        self.sequence_parallel = sequence_parallel
        self._build(normalized_shape, eps, zero_centered_gamma, **kwargs)

    def _build(
        self,
        normalized_shape: Iterable[int] | int,
        eps: float,
        zero_centered_gamma: bool,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        shape = tuple(normalized_shape) if isinstance(normalized_shape, Iterable) else (normalized_shape,)
        device = te_device.default() if device is None else torch.device(device)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype or torch.get_default_dtype()))
        if device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        if defer_init:
            return
        weight = self.weight.detach()
        if weight.device.type == "meta":
            weight = torch.empty_like(weight, device=te_device.default())
        self.weight = nn.Parameter(weight.fill_(0 if self.zero_centered_gamma else 1))

    def forward(self, inp: Tensor) -> Tensor:
        te_device.check_input(inp)
        shape = tuple(self.weight.shape)
        if inp.dim() < len(shape) or tuple(inp.shape[-len(shape) :]) != shape:
            raise ValueError(
                f"Input tensor (shape={tuple(inp.shape)}) and weight tensor (shape={shape}) are not compatible"
            )
        # A forward gives fresh values to what is on "meta".
        require(self.weight.device.type != "meta", "a weight on meta, initialised anew by the first forward")
        # Not the dtype of the input: it is cast to the weight's.
        dtype = te_device.autocast_dtype(inp.device) or self.weight.dtype
        with torch.autocast(inp.device.type, enabled=False):
            x, gamma = inp.to(dtype).float(), self.weight.to(dtype).float()
            dims = tuple(range(-len(shape), 0))
            normed = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + self.eps)
            # In float32 up to the end, where Transformers casts before it multiplies.
            return (normed * (gamma + 1 if self.zero_centered_gamma else gamma)).to(dtype)
