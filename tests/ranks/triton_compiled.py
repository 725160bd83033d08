"""Compile every kernel to a GPU's machine code, which needs no GPU: run by `test_kernels.py`; prints the names."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from expertmesh.compute.triton import kernels

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "grad_row_weights": "*fp32",
    "row_weights": "*fp32",
    "token_index": "*i64",
    "offsets": "*i32",
    "slots": "*i32",
}
COUNTS = ("width", "num_rows", "num_experts", "num_slots")
CONSTANTS = {"BLOCK": 1024, "EXPERTS": 16, "HAS_WEIGHTS": True}


def kind(argument: str) -> str:
    """The type of an argument, by its name."""
    if argument in CONSTANTS:
        return "constexpr"
    return "i32" if argument.endswith("_stride") or argument in COUNTS else POINTERS.get(argument, "*bf16")


def main() -> None:
    for name in ("gated", "gated_backward", "slots_of_rows", "sum_of_rows"):
        kernel = getattr(kernels, name)
        signature = {argument: kind(argument) for argument in kernel.arg_names}
        constants = {argument: CONSTANTS[argument] for argument in signature if argument in CONSTANTS}
        compiled = triton.compile(ASTSource(kernel, signature, constants), target=HOPPER)
        print(name, "cubin" in compiled.asm)


if __name__ == "__main__":
    main()
