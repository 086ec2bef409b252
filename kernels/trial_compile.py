"""Compile one kernel ahead of time, to see whether Triton and its assembler work on this machine.

    python -m sglang_triattn.kernels.trial_compile 90

The argument is a compute capability without its point. Needs no GPU; prints the size of the machine code in bytes.
"""

from __future__ import annotations

import sys

import torch

# Types of the arguments of every kernel that are not 32-bit integers.
POINTERS = {
    "addresses": "*i64", "scales": "*fp32", "slots": "*i32", "lengths": "*i64", "phases": "*fp32",
    "coefficients": "*fp32", "spread": "*fp32", "unrotated": "*fp32", "rotates": "*fp32", "scores": "*fp32",
    "moments": "*fp32", "importance": "*fp32", "kept": "*i32", "sources": "*i32", "targets": "*i32", "sizes": "*fp32",
    "columns": "*bf16", "holes": "*i32", "marks": "*fp32", "key_addresses": "*i64", "weights": "*fp32",
}  # fmt: skip
FLOATS = ("min_std", "factor", "beyond", "power")


def compile_score_kernel(architecture: int) -> int:
    """Compiles `score_kernel` as for Llama 3: bfloat16, heads of 128 dims, four query heads for each KV head.

    Returns:
        Bytes of machine code.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang_triattn.kernels.score.score_kernel import score_kernel
    from sglang_triattn.kernels.score.tuning import WARPGROUPS, launch_settings

    settings = launch_settings(torch.bfloat16, 64, 4, "half", "mean", True, architecture // 10 >= WARPGROUPS)
    constants = {key: value for key, value in settings.items() if key.isupper()}
    signature = {
        name: "constexpr" if name in constants else POINTERS.get(name, "fp32" if name in FLOATS else "i32")
        for name in score_kernel.arg_names
    }
    options = {key: value for key, value in settings.items() if not key.isupper()}
    target = GPUTarget("cuda", architecture, 32)
    return len(triton.compile(ASTSource(score_kernel, signature, constants), target=target, options=options).kernel)


if __name__ == "__main__":
    print(compile_score_kernel(int(sys.argv[1])))
