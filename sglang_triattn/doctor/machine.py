"""GPUs, and whether kernels compile for them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from sglang_triattn.doctor.rows import NOTE, OK, WRONG, Row

COMPILE_SECONDS = 180
"""For one kernel; a few seconds of one core, most of them for imports."""
LEAST, WITHOUT_GPU = 80, 90
"""Compute capabilities, without their point: the least that kernels are compiled for, and what to try without a GPU."""
_TRIAL = "sglang_triattn.kernels.trial_compile"
_CONSEQUENCE = "a launch on a GPU ends at the rehearsal of its rounds"


def gpu_rows() -> Iterator[Row]:
    """Each GPU, or none."""
    found = _gpus()
    if not found:
        yield Row("GPU", NOTE, "none: servers run on the CPU, for trying out")
    for index, (name, capability) in enumerate(found):
        what = f"{name}, compute capability {capability // 10}.{capability % 10}"
        if capability < LEAST:
            least = f"{LEAST // 10}.{LEAST % 10}"
            yield Row(f"GPU {index}", NOTE, f"{what}: kernels have only been compiled for {least} and above")
        else:
            yield Row(f"GPU {index}", OK, what)


def kernel_rows() -> Iterator[Row]:
    """Whether a kernel compiles for each kind of GPU, or ahead of time for a GPU that is not here."""
    found = sorted({capability for _, capability in _gpus()})
    for capability in found or [WITHOUT_GPU]:
        yield _compile(capability, "" if found else ", ahead of time")


def _gpus() -> list[tuple[str, int]]:
    """(name, compute capability without its point) of each NVIDIA GPU."""
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return []
    devices = range(torch.cuda.device_count())
    capabilities = [torch.cuda.get_device_capability(index) for index in devices]
    return [(torch.cuda.get_device_name(i), 10 * c[0] + c[1]) for i, c in zip(devices, capabilities, strict=True)]


def _compile(capability: int, how: str) -> Row:
    """Compiles in a process of its own: a compiler that hangs or crashes is a row too."""
    title = f"kernels for sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        # An empty cache, so that the compiler runs.
        environment = {**os.environ, "TRITON_CACHE_DIR": folder, "TRITON_INTERPRET": "0"}
        command = [sys.executable, "-P", "-m", _TRIAL, str(capability)]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=COMPILE_SECONDS
            )
        except subprocess.TimeoutExpired:
            found = f"not compiled within {COMPILE_SECONDS} s"
            return Row(title, WRONG, found, f"{_CONSEQUENCE}, or the machine is busy: try again")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        return Row(title, WRONG, lines[-1][:200], _CONSEQUENCE)
    return Row(title, OK, f"the score kernel compiles{how}: {int(done.stdout.split()[-1]):,} bytes")
