"""Compile every Triton kernel for sm_80, sm_90 and sm_100 without a GPU; print registers, spills and shared memory.

    python tools/compile_kernels.py                         everything
    python tools/compile_kernels.py --architectures 90      of one kind of GPUs
    python tools/compile_kernels.py --part 0                every sixth combination, of any kind

Compiles every combination of compile-time arguments that a launch can ask for; kernels are specialised on nothing else.
Figures are kept under $XDG_CACHE_HOME/sglang-triattn/aot, so that only what has changed is compiled again. Exits with 1
if a combination does not compile, spills a register, or copies in pieces of less than 16 bytes. The last is checked
for K and V that move, values that are measured, and keys if a head's halves are held in one tile and are that wide.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import io
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

# Before Triton is imported: the interpreter has no compiled kernels.
os.environ["TRITON_INTERPRET"] = "0"

from env import cache_root
from sglang_triattn.kernels.trial_compile import FLOATS, POINTERS

ARCHITECTURES = (80, 90, 100)
# As many as of the wide tests.
PARTS = 6


def combinations(architecture: int) -> Iterator[tuple[str, dict]]:
    """(kernel name, its compile-time arguments) for everything that the launching code can ask for, each once."""
    found = {(name, tuple(sorted(settings.items()))) for name, settings in _launches(architecture // 10)}
    yield from sorted(((name, dict(settings)) for name, settings in found), key=repr)


def _launches(capability: int) -> Iterator[tuple[str, dict]]:
    from sglang_triattn.kernels.compact.list_moves_kernel import moves_settings
    from sglang_triattn.kernels.compact.move_kernel import ALIGNMENT, MAX_WORDS, WORD, move_settings
    from sglang_triattn.kernels.pools import KINDS
    from sglang_triattn.kernels.score.latent_tuning import HEADS as LATENT_HEADS
    from sglang_triattn.kernels.score.latent_tuning import LEAST_HEADS
    from sglang_triattn.kernels.score.latent_tuning import launch_settings as latent_settings
    from sglang_triattn.kernels.score.reference import CHUNK
    from sglang_triattn.kernels.score.tables import STYLES
    from sglang_triattn.kernels.score.tuning import ALIGN, HEADS, MAX_TILE, WARPGROUPS, launch_settings
    from sglang_triattn.kernels.score.value_size import LEAST_DIMS, MOST_DIMS
    from sglang_triattn.kernels.score.value_size_kernel import value_settings
    from sglang_triattn.kernels.select import SELECTIONS
    from sglang_triattn.kernels.select.importance_kernel import SCALE_ROWS, importance_settings
    from sglang_triattn.kernels.select.keep_kernel import BLOCK, keep_settings

    # Anything beyond a program's heads or a tile's frequencies is launched like the first value beyond them.
    groups, frequencies = range(1, HEADS + 2), range(1, MAX_TILE + ALIGN + 1)
    # Dims that RoPE does not turn: none, as many as either of two tiles holds, and more.
    others = (0, MAX_TILE // 2, MAX_TILE, MAX_TILE + ALIGN)
    for shape in itertools.product(KINDS, frequencies, groups, STYLES, ("mean", "max")):
        for aligned, unrotated in itertools.product((False, True)[: 1 + (shape[1] % ALIGN == 0)], others):
            yield "score_kernel", launch_settings(*shape, aligned, capability >= WARPGROUPS, unrotated)
    # Powers of two, to which all numbers of heads are rounded.
    heads = [LEAST_HEADS << power for power in range((LATENT_HEADS // LEAST_HEADS).bit_length())]
    for shape in itertools.product(KINDS, heads, STYLES, ("mean", "max")):
        yield "latent_kernel", latent_settings(*shape, capability >= WARPGROUPS)
    yield "scale_kernel", {"CHUNK": CHUNK, "BLOCK": SCALE_ROWS}
    for selection, group in itertools.product(SELECTIONS, groups):
        yield "importance_kernel", importance_settings(selection, group)
    for num_tokens, mark in itertools.product((BLOCK, BLOCK + 1), (False, True)):
        yield "keep_kernel", keep_settings(num_tokens, mark)
    for ordered in (False, True):
        yield "moves_kernel", moves_settings(ordered)
    for words, ordered in itertools.product(range(4, MAX_WORDS + 1, ALIGNMENT // WORD), (False, True)):
        yield "move_kernel", move_settings(words, ordered)
    for dtype in KINDS:
        for width in range(ALIGNMENT, MAX_WORDS * WORD + 1, ALIGNMENT):
            dims = width // dtype.itemsize
            yield "value_size_kernel", value_settings(dtype, dims)
            # With weights, and keys whose strides are multiples of 16 bytes or not.
            for step, style in itertools.product((1, ALIGNMENT), STYLES if LEAST_DIMS <= dims <= MOST_DIMS else ()):
                yield "value_size_kernel", value_settings(dtype, dims, (step, step, step), style)


def kernel_named(name: str):
    return next(functions[name] for functions in jit_functions().values() if name in functions)


def jit_functions() -> dict[str, dict]:
    """By kernel module: what is compiled in it, by name; kernels and the functions that they are built from."""
    from triton import JITFunction

    from sglang_triattn.kernels.compact import list_moves_kernel, move_kernel
    from sglang_triattn.kernels.score import latent_kernel, parts, score_kernel, value_size_kernel
    from sglang_triattn.kernels.select import importance_kernel, keep_kernel

    modules = (
        score_kernel, latent_kernel, importance_kernel, keep_kernel, list_moves_kernel, move_kernel, value_size_kernel,
        parts,
    )  # fmt: skip
    return {
        module.__name__: {name: f for name, f in vars(module).items() if isinstance(f, JITFunction)}
        for module in modules
    }


@cache
def source_of(name: str) -> list[str]:
    """The source of a kernel and of everything it may call; unlike Triton's own key, without line numbers."""
    functions = jit_functions()
    module = next(key for key, found in functions.items() if name in found)
    parts = [*functions[module].values(), *functions["sglang_triattn.kernels.score.parts"].values()]
    return sorted({f"{part.do_not_specialize} {part.src}" for part in parts})


def label(settings: dict) -> str:
    """Compile-time arguments in words, without those that are always the same."""
    return " ".join(f"{k}={v}" for k, v in settings.items() if k.isupper() and k not in ("CHUNK", "WIDEN"))


def compile_one(architecture: int, name: str, settings: dict) -> dict:
    """Figures for one compiled kernel, or {"error": ...}."""
    import triton
    import triton.knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = kernel_named(name)
    constants = {key: value for key, value in settings.items() if key.isupper()}
    signature = {}
    for argument in kernel.arg_names:
        default = "fp32" if argument in FLOATS else "i32"
        signature[argument] = "constexpr" if argument in constants else POINTERS.get(argument, default)
    options = {key: value for key, value in settings.items() if not key.isupper()}
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope(), triton.knobs.nvidia.scope():
        # An empty cache: ptxas reports only when it runs.
        triton.knobs.cache.dir = folder
        triton.knobs.nvidia.dump_ptxas_log = True
        try:
            source = ASTSource(kernel, signature, constants)
            with redirect_stdout(log):
                compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        except Exception as error:
            return {"error": (str(error).splitlines() or [type(error).__name__])[0]}
    return figures(log.getvalue(), compiled.asm["ptx"], compiled.metadata.shared)


def figures(log: str, ptx: str, shared: int) -> dict:
    """Registers and spilled bytes that ptxas reports, bytes of shared memory, and the widest copy and load in bytes."""
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    used = re.search(r"Used (\d+) registers", log)
    if not spills or not used:
        return {"error": "ptxas reported no registers and spills"}
    widths = {int(width, 16) for width in re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, 0x(\w+)", ptx)}
    loads = re.findall(r"ld\.global\S*\.v(\d)\.b(\d+)", ptx)
    return {
        "registers": int(used[1]),
        "spilled": sum(map(int, spills)),
        "shared": shared,
        "widest_copy": max(widths, default=0),
        "widest_load": max((int(n) * int(bits) // 8 for n, bits in loads), default=0),
    }


def defect_of(name: str, settings: dict, row: dict) -> str | None:
    """Why a kernel is not fit to ship, or None."""
    if "error" in row:
        return row["error"]
    if row["spilled"]:
        return f"{row['spilled']} bytes spilled"
    if name == "move_kernel" and row["widest_load"] < 16:
        return f"K and V are copied {row['widest_load']} bytes at a time"
    if name == "value_size_kernel" and max(row["widest_load"], row["widest_copy"]) < 16:
        return f"values are read {row['widest_load']} bytes at a time"
    score = name == "score_kernel" and settings["KIND"] == "bf16" and not settings["MAX"]
    if score and not settings["TILED"] and not settings["INTERLEAVED"] and row["widest_copy"] < 16:
        return f"keys are copied {row['widest_copy']} bytes at a time"
    return None


def cache_file(architecture: int, name: str, settings: dict) -> Path:
    """Where the figures of one combination are kept; the name changes whenever anything they depend on changes."""
    import triton

    parts = [
        source_of(name),
        _own_source(),
        [POINTERS, FLOATS],
        settings,
        architecture,
        triton.__version__,
    ]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_root() / "aot" / f"{key}.json"


@cache
def _own_source() -> list[str]:
    return [inspect.getsource(part) for part in (compile_one, figures)]


def measured(architecture: int, name: str, settings: dict, path: Path) -> dict:
    """Compiles one combination and keeps its figures; a failure may be the machine's fault and is not kept."""
    row = compile_one(architecture, name, settings)
    if "error" not in row:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(row))
        temporary.replace(path)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for every supported GPU, without one.")
    parser.add_argument(
        "--architectures", type=int, nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES, help="default: all"
    )
    parser.add_argument("--part", type=int, choices=range(PARTS), help="only a sixth of the combinations")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="processes (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="compile everything again, even what is kept")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="write the last line to this file, too")
    arguments = parser.parse_args()
    jobs = [(a, *c, cache_file(a, *c)) for a in arguments.architectures for c in combinations(a)]
    jobs = jobs if arguments.part is None else jobs[arguments.part :: PARTS]
    missing = [job for job in jobs if arguments.fresh or not job[-1].exists()]
    made = {}
    if missing:
        with ProcessPoolExecutor(arguments.jobs) as pool:
            rows = pool.map(measured, *zip(*missing, strict=True), chunksize=4)
            made = {job[-1]: row for job, row in zip(missing, rows, strict=True)}
    failed = 0
    print(f"{'arch':>6} {'regs':>4} {'spill':>5} {'shared':>6}  kernel")
    for architecture, name, settings, path in jobs:
        row = made[path] if path in made else json.loads(path.read_text())
        wrong = defect_of(name, settings, row)
        failed += wrong is not None
        numbers = f"{row.get('registers', '-'):>4} {row.get('spilled', '-'):>5} {row.get('shared', '-'):>6}"
        print(f"sm_{architecture:<3} {numbers}  {name} {label(settings)}" + (f"  NOT FIT: {wrong}" if wrong else ""))
    summary = f"{len(jobs)} combinations, {len(missing)} of them compiled now, {failed} not fit to ship"
    print(summary)
    if arguments.summary:
        arguments.summary.write_text(summary)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
