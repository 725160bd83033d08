"""What can be said of Transformer Engine without a GPU: of its own Python and of the emulation, in the same words.

Run as a program it prints what it finds of the real one, in a folder that is given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from emulation.signatures import parameters
from torch import nn
from torch.func import functional_call

# With `__init__`, and the forward where it has a signature of its own.
_MODULES = {
    "Linear": ("__init__", "forward"),
    "GroupedLinear": ("__init__", "forward"),
    "RMSNorm": ("__init__", "reset_parameters"),
    "DotProductAttention": ("__init__", "forward"),
    "Fp8Padding": ("__init__", "forward"),
    "Fp8Unpadding": ("__init__", "forward"),
    "autocast": ("__init__",),
}
_FUNCTIONS = (
    "fp8_autocast",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_fp8_available",
    "is_mxfp8_available",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_unpermute",
)
_RECIPES = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling")


def signatures(te: ModuleType, recipes: ModuleType) -> dict[str, list[list[str]]]:
    """The parameters of all that is called."""
    found = {
        f"{name}.{method}": parameters(getattr(getattr(te, name), method))
        for name, methods in _MODULES.items()
        for method in methods
    }
    found |= {name: parameters(getattr(te, name)) for name in _FUNCTIONS}
    return found | {name: parameters(getattr(recipes, name).__init__) for name in _RECIPES}


def facts(te: ModuleType, recipes: ModuleType, quantization: ModuleType, check_dims: Callable) -> dict[str, object]:
    """What it does, as far as no kernel is needed."""
    return {
        **_parameters(te),
        **_states(te),
        **_devices(te),
        **_splits(te),
        **_recipes(te, recipes, quantization),
        **_permutation(te),
        "dims of 8 bits": [
            _outcome(lambda shape=shape: check_dims(torch.zeros(shape)))
            for shape in ((8, 16), (4, 2, 16), (7, 16), (8, 24))
        ],
    }


def _modules(te: ModuleType, device: str | torch.device = "meta") -> dict[str, nn.Module]:
    return {
        "Linear": te.Linear(32, 16, device=device),
        "Linear without bias": te.Linear(32, 16, bias=False, device=device, params_dtype=torch.bfloat16),
        "GroupedLinear": te.GroupedLinear(3, 32, 16, device=device),
        "GroupedLinear without bias": te.GroupedLinear(2, 32, 16, bias=False, device=device),
        "RMSNorm": te.RMSNorm(32, eps=1e-6, device=device, dtype=torch.bfloat16),
        "RMSNorm, 1+w": te.RMSNorm((4, 8), device=device, zero_centered_gamma=True, sm_margin=0),
        "DotProductAttention": te.DotProductAttention(4, 16, num_gqa_groups=2),
    }


def _parameters(te: ModuleType) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, module in _modules(te).items():
        found[f"parameters of {name}"] = [
            [each, list(parameter.shape), str(parameter.dtype), parameter.device.type]
            for each, parameter in module.named_parameters()
        ]
        found[f"state of {name}"] = [[key, list(value.shape)] for key, value in module.state_dict().items()]
        found[f"{name} is an nn.Linear"] = isinstance(module, nn.Linear)
    linear = te.Linear(32, 16, bias=False, device="meta")
    found["no bias"] = [type(linear.bias).__name__, list(linear.bias.shape), "bias" in dict(linear.named_parameters())]
    attention = te.DotProductAttention(4, (16, 8), attn_mask_type="causal,padding", qkv_format="thd")
    found["names of masks"] = [attention.attn_mask_type, list(attention.window_size), attention.softmax_scale]
    found["groups"] = _outcome(lambda: te.DotProductAttention(4, 16, num_gqa_groups=3))
    found["norms are called"] = [te.RMSNorm(8, device="meta").eps, te.RMSNorm(8, device="meta").zero_centered_gamma]
    found["no shape"] = _outcome(lambda: te.RMSNorm(device="meta"))
    return found


def _states(te: ModuleType) -> dict[str, object]:
    plain = nn.Linear(32, 16)
    linear = te.Linear(32, 16, device="cpu")
    grouped = te.GroupedLinear(3, 8, 16, device="cpu")
    parent = nn.ModuleDict({"experts": te.GroupedLinear(3, 8, 16, device="cpu")})
    weight, bias = torch.randn(3, 16, 8), torch.randn(3, 16)
    extra = {"_extra_state": torch.empty(0, dtype=torch.uint8)}
    parent.load_state_dict(
        {"experts.weight": weight, "experts.bias": bias, "experts._extra_state": extra["_extra_state"]}
    )
    grouped.load_state_dict({"weight": weight, "bias": bias, **extra})
    before = linear.weight
    linear.reset_parameters()
    adopted = te.Linear(32, 16, device="meta")
    adopted.weight = plain.weight
    return {
        "strict, from nn.Linear": _outcome(lambda: linear.load_state_dict(plain.state_dict())),
        "strict, to nn.Linear": _outcome(lambda: plain.load_state_dict(linear.state_dict())),
        "stacked weights are taken": [torch.equal(grouped.weight1, weight[1]), torch.equal(grouped.bias2, bias[2])],
        "stacked weights are taken by a parent": torch.equal(parent["experts"].weight2, weight[2]),
        "extra state": [str(linear.get_extra_state().dtype), linear.get_extra_state().numel()],
        "set extra state": [_outcome(lambda state=state: linear.set_extra_state(state)) for state in (None, object())],
        "reset_parameters replaces": linear.weight is not before,
        "a Parameter is adopted": adopted.weight is plain.weight,
    }


def _devices(te: ModuleType) -> dict[str, object]:
    def deferred(make: Callable[[], nn.Module]) -> bool:
        """Whether a module is on "meta"; on the machine of the test others cannot be made."""
        try:
            return next(make().parameters()).device.type == "meta"
        except (AssertionError, RuntimeError):
            return False

    given = ("meta", torch.device("meta"))
    return {
        "Linear defers": [deferred(lambda device=device: te.Linear(8, 8, device=device)) for device in given],
        "GroupedLinear defers": [
            deferred(lambda device=device: te.GroupedLinear(2, 8, 8, device=device)) for device in given
        ],
        "RMSNorm defers": [deferred(lambda device=device: te.RMSNorm(8, device=device)) for device in given],
        "by default": [deferred(make) for make in (lambda: te.Linear(8, 8), lambda: te.RMSNorm(8))],
        "learnable sinks": deferred(lambda: te.DotProductAttention(4, 16, softmax_type="learnable")),
    }


def _splits(te: ModuleType) -> dict[str, object]:
    class Probe(te.GroupedLinear):
        def forward(self) -> list[torch.Tensor]:
            found = getattr(self, "_get_weight_tensors", None)
            return found() if found is not None else [getattr(self, f"weight{i}") for i in range(self.num_gemms)]

    stacked = torch.randn(2, 16, 8, requires_grad=True)
    borrowed = {f"weight{i}": matrix for i, matrix in enumerate(stacked.unbind(0))}
    probe = Probe(2, 8, 16, bias=False, device="meta")
    used = functional_call(probe, borrowed, ())
    grouped = te.GroupedLinear(3, 8, 16, device="cpu")
    padding, rows = te.Fp8Padding(2, 16), torch.randn(48, 8)
    return {
        "borrowed weights are used": [tensor is borrowed[f"weight{i}"] for i, tensor in enumerate(used)],
        "borrowed weights are given back": next(probe.parameters()).device.type,
        "splits of another number": _outcome(lambda: grouped(torch.zeros(4, 8), torch.tensor([2, 2]))),
        "rows that need no padding": [
            padding(rows, [16, 32])[0] is rows,
            padding(rows, [16, 32])[1],
            te.Fp8Unpadding(2, 16)(rows, [16, 32]) is rows,
        ],
    }


def _recipes(te: ModuleType, recipes: ModuleType, quantization: ModuleType) -> dict[str, object]:
    manager = quantization.FP8GlobalStateManager
    made = {name: getattr(recipes, name)() for name in _RECIPES}
    questions = ("delayed", "float8_current_scaling", "mxfp8", "nvfp4", "float8_block_scaling", "custom")
    current = made["Float8CurrentScaling"]

    def inside() -> list[object]:
        context = te.autocast(recipe=current)
        with context:
            said = [manager.is_fp8_enabled(), manager.get_fp8_recipe() is current, _outcome(context.__enter__)]
            with te.autocast(enabled=False, recipe=current):
                said.append(manager.is_fp8_enabled())
            said.append(manager.is_fp8_enabled())
        return [*said, manager.is_fp8_enabled()]

    return {
        "kinds of recipes": {name: [getattr(recipe, each)() for each in questions] for name, recipe in made.items()},
        "formats": {name: [*recipe.fp8_format.value, recipe.fp8_format.name] for name, recipe in made.items()},
        "alignment": {name: quantization.get_align_size_for_quantization(recipe) for name, recipe in made.items()},
        "E5M2 alone": [
            _outcome(lambda each=each: getattr(recipes, each)(fp8_format=recipes.Format.E5M2)) for each in _RECIPES[1:]
        ],
        "on Hopper": [
            list(te.is_fp8_available(True)),
            list(te.is_mxfp8_available(True)),
            type(te.get_default_recipe()).__name__,
        ],
        "MXFP8 on Hopper": _outcome(te.autocast(recipe=made["MXFP8BlockScaling"]).__enter__),
        "autocast": inside(),
    }


def _permutation(te: ModuleType) -> dict[str, object]:
    rows, row_id_map = te.moe_permute(torch.zeros(0, 8), torch.zeros(0, 4, dtype=torch.int32), 0)
    tokens, routed = torch.zeros(2, 8), torch.ones(2, 4, dtype=torch.int32)
    return {
        "no tokens": [list(rows.shape), list(row_id_map.shape), str(row_id_map.dtype)],
        "unknown map": _outcome(lambda: te.moe_permute(tokens, routed, 8, map_type="list")),
        "no counts": _outcome(lambda: te.moe_permute_and_pad_with_probs(tokens, routed.float(), routed, None, 16)),
        "alignment of 0": _outcome(
            lambda: te.moe_permute_and_pad_with_probs(tokens, routed.float(), routed, routed[0], 0)
        ),
    }


def _outcome(function: Callable[[], object]) -> str:
    """What is raised, or that nothing is."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def main(folder: str) -> None:
    from te_fidelity.real import install

    install(Path(folder))
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe
    from transformer_engine.pytorch import quantization, utils

    found = {
        "signatures": signatures(te, recipe),
        "facts": facts(te, recipe, quantization, utils.assert_dim_for_fp8_exec),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
