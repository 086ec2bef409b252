"""Compile every Triton kernel for sm_80, sm_90 and sm_100 without a GPU; print registers, spills and shared memory.

    python tools/compile_kernels.py           all kernels, the ordinary settings in full and the rare ones at their ends
    python tools/compile_kernels.py --all     every combination, which takes several times as long

Exits with 1 if a combination does not compile, spills a register, or copies keys in pieces of less than 16 bytes where
a head's halves are that wide.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ARCHITECTURES = (80, 90, 100)
# Half of head_dim 64, 80, 96, 128 and 256.
FREQUENCIES = (32, 40, 48, 64, 128)
GROUPS = (4, 8, 16)
POINTERS = {
    "addresses": "*i64", "scales": "*fp32", "slots": "*i32", "lengths": "*i64", "units": "*fp32",
    "coefficients": "*fp32", "spread": "*fp32", "scores": "*fp32", "moments": "*fp32", "importance": "*fp32",
    "kept": "*i64",
}  # fmt: skip
FLOATS = ("min_std",)
# Strides of pools whose heads are multiples of 16 elements; Triton notices that of its own accord at a launch.
ALIGNED = ("stride_slot", "stride_head")


def combinations(everything: bool) -> Iterator[tuple[str, dict]]:
    """(name of a kernel, its compile-time arguments), each once."""
    from sglang_triattn.kernels.importance_triton import SCALE_ROWS, importance_settings
    from sglang_triattn.kernels.keep_triton import BLOCK, keep_settings
    from sglang_triattn.kernels.key_pools import KINDS
    from sglang_triattn.kernels.score import CHUNK
    from sglang_triattn.kernels.score_triton import launch_settings

    for dtype, frequencies, group, style, aggregation in itertools.product(
        KINDS, FREQUENCIES, GROUPS, ("half", "interleaved"), ("mean", "max")
    ):
        ordinary = (style, aggregation) == ("half", "mean")
        if everything or ordinary or (frequencies in (64, 128) and group in (4, 16)):
            yield "score_kernel", launch_settings(dtype, frequencies, group, style, aggregation)
    yield "scale_kernel", {"CHUNK": CHUNK, "BLOCK": SCALE_ROWS}
    for selection in ("union", "shared-mean"):
        yield "importance_kernel", importance_settings(selection, 1)
    for group in (1, 2, 4, 8, 16):
        yield "importance_kernel", importance_settings("per-head", group)
    for columns in (BLOCK, BLOCK + 1):
        yield "keep_kernel", keep_settings(columns)


def compile_one(architecture: int, name: str, settings: dict) -> dict:
    """Figures of one compiled kernel, or {"error": ...}."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang_triattn.kernels import importance_triton, keep_triton, score_triton

    modules = (score_triton, importance_triton, keep_triton)
    kernel = next(getattr(module, name) for module in modules if hasattr(module, name))
    constants = {key: value for key, value in settings.items() if key.isupper()}
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        default = "fp32" if argument in FLOATS else "i32"
        signature[argument] = "constexpr" if argument in constants else POINTERS.get(argument, default)
        if argument in POINTERS or argument in ALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {key: value for key, value in settings.items() if not key.isupper()}
    label = " ".join(f"{key}={value}" for key, value in constants.items() if key not in ("CHUNK", "WIDEN"))
    figures = {"arch": architecture, "kernel": name, "settings": label}
    try:
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    except Exception as error:
        return figures | {"error": (str(error).splitlines() or [type(error).__name__])[0]}
    return figures | {"shared": compiled.metadata.shared} | assemble(compiled.asm["ptx"])


def assemble(ptx: str) -> dict:
    """Registers and spilled bytes that ptxas reports, and the widths of the key copies."""
    import triton

    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        ptxas = (triton.knobs.nvidia.ptxas_blackwell if target.startswith("sm_1") else triton.knobs.nvidia.ptxas).path
        command = [ptxas, "-v", f"--gpu-name={target}", str(source), "-o", str(source.with_suffix(".cubin"))]
        report = subprocess.run(command, capture_output=True, text=True)
    if report.returncode:
        return {"error": report.stderr.strip().splitlines()[0]}
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report.stderr)
    widths = {int(width, 16) for width in re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, 0x(\w+)", ptx)}
    return {
        "registers": int(re.search(r"Used (\d+) registers", report.stderr)[1]),
        "spilled": sum(map(int, spills)),
        "widest_copy": max(widths, default=0),
    }


def complaint(row: dict) -> str | None:
    if "error" in row:
        return row["error"]
    if row["spilled"]:
        return f"{row['spilled']} bytes spilled"
    if "KIND=bf16 F=64 FT=64" in row["settings"] and "MAX=False" in row["settings"] and row["widest_copy"] < 16:
        return f"keys are copied {row['widest_copy']} bytes at a time"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for every supported GPU, without one.")
    parser.add_argument("--all", action="store_true", help="every combination")
    parser.add_argument("--jobs", type=int, default=2, help="processes (%(default)s)")
    arguments = parser.parse_args()
    jobs = [(a, *c) for c in combinations(arguments.all) for a in ARCHITECTURES]
    failed = 0
    print(f"{'arch':>6} {'regs':>4} {'spill':>5} {'shared':>6}  kernel")
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(compile_one, *zip(*jobs, strict=True), chunksize=8):
            wrong = complaint(row)
            failed += wrong is not None
            figures = f"{row.get('registers', '-'):>4} {row.get('spilled', '-'):>5} {row.get('shared', '-'):>6}"
            print(f"sm_{row['arch']:<3} {figures}  {row['kernel']} {row['settings']}" + (f"  {wrong}" if wrong else ""))
    print(f"{len(jobs)} compiled, {failed} not fit to ship")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
