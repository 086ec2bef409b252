"""What do the kernels and decode cost on this GPU? Runs score_speed, compact and decode, and keeps the figures.

Each of them exits without a figure if its answers are wrong. The JSON files are named after the benchmark and the GPU.
Needs torch and Triton, but neither SGLang nor an installed package.

    python -m benchmarks.gpu
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import machine
from benchmarks.decode import cli as decode
from benchmarks.rounds import compact, score_speed

BENCHMARKS = {"score_speed": score_speed, "compact": compact, "decode": decode}
RESULTS = Path(__file__).parent / "results"


def result(folder: Path, name: str, gpu: str, quick: bool) -> Path:
    """Path such as results/compact-nvidia-h200.json; a quick run never replaces a whole one."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return folder / f"{name}-{slug}{'-quick' if quick else ''}.json"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="All benchmarks that need a GPU, on that of this machine.")
    parser.add_argument("--json", metavar="FOLDER", type=Path, default=RESULTS, help="write the figures here")
    parser.add_argument("--only", choices=BENCHMARKS, nargs="+", default=list(BENCHMARKS), help="which (all)")
    parser.add_argument("--layers", type=int, help="layers to time (default: all of each model)")
    parser.add_argument("--repeats", type=int, help="timed runs (each benchmark's own number)")
    parser.add_argument("--quick", action="store_true", help="as the benchmarks' own --quick")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here, and these figures are of one: use a machine with a GPU.")
    if not arguments.json.is_dir():
        raise SystemExit(f"{arguments.json} is not a folder, and figures need one: name it with --json.")
    options = ["--device", "cuda"]
    options += ["--repeats", str(arguments.repeats)] if arguments.repeats else []
    options += ["--layers", str(arguments.layers)] if arguments.layers else []
    options += ["--quick"] if arguments.quick else []
    for name in arguments.only:
        path = result(arguments.json, name, str(machine()["gpu"]), arguments.quick)
        print(f"{path.name}\n")
        BENCHMARKS[name].main([*options, "--json", str(path)])


if __name__ == "__main__":
    main()
