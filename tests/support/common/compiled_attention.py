"""Compiles the dense rival's attention kernel for a GPU that is not there, and prints the compiler's figures as JSON.

    python compiled_attention.py ARCHITECTURE FOLDER

In a process of its own, because Triton's interpreter, which other tests run, leaves its own functions in
`triton.language`.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import compile_kernels
from benchmarks.decode.attention_triton import attend_kernel as kernel


def main(architecture: int, folder: str) -> None:
    pointers = {"queries": "*bf16", "k_pool": "*bf16", "v_pool": "*bf16", "rows": "*i32", "lengths": "*i32"}
    pointers |= {"partial": "*fp32", "sizes": "*fp32"}
    constants = {"GROUP": 4, "PADDED": 16, "DIM": 128, "HEADS": 8, "PARTS": 4, "BLOCK": 64}
    signature = pointers | dict.fromkeys(constants, "constexpr") | {"scale": "fp32"}
    signature = {name: signature.get(name, "i32") for name in kernel.arg_names}
    # What a launch knows about its arguments: addresses and strides are multiples of 16.
    known = [i for i, name in enumerate(kernel.arg_names) if name in pointers or name.startswith("stride")]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in known})
    log = io.StringIO()
    with triton.knobs.cache.scope(), triton.knobs.nvidia.scope(), redirect_stdout(log):
        triton.knobs.cache.dir = folder
        triton.knobs.nvidia.dump_ptxas_log = True
        options = {"num_warps": 4, "num_stages": 3}
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    print(json.dumps(compile_kernels.figures(log.getvalue(), made.asm["ptx"], made.metadata.shared)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
