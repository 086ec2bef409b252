"""Ten thousand damaged statistics files, and hostile ones: data, or one sentence, and nothing else."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sample_stats import FREQUENCIES, HEAD_DIM, HEADS, LAYERS, partial_stats, stats
from sglang_triattn.stats.content import LARGEST_BYTES
from sglang_triattn.stats.file import StatsError, load_stats, save_stats
from stats_files import damage, published

CASES = 10_000
LONGEST_MESSAGE = 700
MOST_GROWTH_KIB = 300 << 10


def outcome(path: Path) -> str | None:
    """What the loader says; None if it gave data. Raises what no file may cause."""
    try:
        found = load_stats(path)
    except StatsError as error:
        text = str(error)
        assert len(text) <= LONGEST_MESSAGE + len(str(path)), text
        assert "\n" not in text
        assert text.endswith(".")
        return text
    parts = [torch.view_as_real(found.mean), found.abs_mean]
    assert all(bool(torch.isfinite(part).all()) for part in parts)
    assert len(found.layers) == len(found.mean) == len(found.rotates)
    return None


def header_of(content: bytes) -> tuple[dict, bytes]:
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


VALUES = [
    "",
    "-1",
    "0",
    "1e999",
    "nan",
    "[1e999]",
    "[" * 3000,
    "[" + "0," * 999 + "0]",
    "9" * 5000,
    "{}",
    "null",
    "é\n",
]
SHAPES = [[], [0], [10**12], [2**63 - 1, 2], [1, 1, 1], [-1], [LAYERS, HEADS, FREQUENCIES]]
DTYPES = ["F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "C64", "X1", ""]


def mutated(rng: random.Random, content: bytes) -> bytes:
    """A copy with flipped bits, another length, or a header that lies."""
    kind = rng.randrange(5)
    if kind == 0:
        return content[: rng.randrange(len(content))]
    if kind == 1:
        changed = bytearray(content)
        # Half of them in the header.
        end = len(content) if rng.random() < 0.5 else min(1200, len(content))
        for _ in range(rng.choice([1, 1, 2, 8, 64])):
            changed[rng.randrange(end)] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == 2:
        at = rng.randrange(len(content))
        return content[:at] + rng.randbytes(rng.randrange(1, 40)) + content[at:]
    header, data = header_of(content)
    if kind == 3:
        fields = header["__metadata__"]
        name = rng.choice([*fields, "attention_scaling", "extra"])
        fields[name] = rng.choice([*VALUES, str(rng.randrange(-3, 40))])
        if rng.random() < 0.2:
            del fields[rng.choice(list(fields))]
        return with_header(header, data)
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    field = rng.choice(["shape", "dtype", "data_offsets"])
    offsets = [rng.choice([0, 8, 10**12, 2**64 - 1, len(data)]) for _ in range(2)]
    entry[field] = {"shape": rng.choice(SHAPES), "dtype": rng.choice(DTYPES), "data_offsets": offsets}[field]
    return with_header(header, data)


def grown_kib(before: int) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_ten_thousand_damaged_files(tmp_path):
    """Prevents a damaged file from showing a traceback, filling the memory, or passing with impossible numbers."""
    rng, path, accepted = random.Random(1), tmp_path / "s.safetensors", 0
    originals = []
    for saved in (stats(), partial_stats()):
        save_stats(saved, path)
        originals.append(path.read_bytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(CASES):
        path.write_bytes(mutated(rng, originals[number % 2]))
        accepted += outcome(path) is None
    # A flipped bit of a mean is a mean.
    assert CASES / 50 < accepted < CASES / 2
    assert grown_kib(before) < MOST_GROWTH_KIB


def test_damaged_published_files(tmp_path):
    """Prevents the same for files of the other kind, which are archives of a pickle."""
    rng, path = random.Random(2), tmp_path / "s.pt"
    content = published(path).read_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(300):
        if rng.random() < 0.5:
            changed = content[: rng.randrange(len(content))]
        else:
            changed = bytearray(content)
            for _ in range(rng.choice([1, 4, 64])):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        outcome(path)
    assert grown_kib(before) < MOST_GROWTH_KIB


class Exploit:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize("where", ["content", "head_dim", "legacy", "bare", "renamed"])
def test_code_in_a_file_is_not_run(tmp_path, where):
    """Prevents a statistics file from a stranger from running commands on the server."""
    mark, path = tmp_path / "ran", tmp_path / ("s.safetensors" if where == "renamed" else "s.pt")
    exploit = Exploit(mark)
    if where == "bare":
        path.write_bytes(pickle.dumps(exploit))
    elif where == "head_dim":
        published(path, head_dim=exploit)
    else:
        torch.save(exploit, path, _use_new_zipfile_serialization=where != "legacy")
    assert outcome(path) is not None
    assert not mark.exists()
    # The pickle does what it says where it is trusted.
    pickle.loads(pickle.dumps(exploit))
    assert mark.exists()


def packed(path: Path, size: int) -> Path:
    """A published file in whose archive the pickle is `size` zeros."""
    other = io.BytesIO(published(path).read_bytes())
    with zipfile.ZipFile(other) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, bytes(size) if name.endswith("data.pkl") else old.read(name))
    return path


def test_what_claims_to_be_huge(tmp_path):
    """Prevents a small file from filling the memory: archives that unpack, views that repeat, lists, sparse files."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "are above" in outcome(packed(tmp_path / "bomb.pt", LARGEST_BYTES + 1))
    repeated = torch.zeros(1).expand(1 << 40)
    views = dict.fromkeys(("q_mean_real", "q_mean_imag", "q_abs_mean"), repeated)
    assert outcome(published(tmp_path / "views.pt", entry=views)) is not None
    with (tmp_path / "sparse.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    assert "are above" in outcome(tmp_path / "sparse.safetensors")
    save_stats(stats(), tmp_path / "head.safetensors")
    assert outcome(damage(tmp_path / "head.safetensors", metadata={"head_dim": str(1 << 60)})) is not None
    whole = {"mean_re": torch.zeros(1, 1, 1), "mean_im": torch.zeros(1, 1, 1), "abs_mean": torch.zeros(1, 1, 1)}
    deep = {"format": "sglang-triattn-stats", "format_version": "2", "head_dim": "2", "layers": "[" * 1_000_000}
    save_file(whole, tmp_path / "deep.safetensors", deep)
    assert outcome(tmp_path / "deep.safetensors") is not None
    # The bomb itself was made in this process.
    assert grown_kib(before) < MOST_GROWTH_KIB + 2 * (LARGEST_BYTES >> 10)


USE_AFTER = """
import os, sys
from sglang_triattn.stats.file import load_stats
found = load_stats(sys.argv[1])
before = float(found.abs_mean.sum()), float(found.unrotated_mean.sum()), float(found.rope.inv_freq.sum())
os.truncate(sys.argv[1], 16)
after = float(found.abs_mean.sum()), float(found.unrotated_mean.sum()), float(found.rope.inv_freq.sum())
assert before == after, (before, after)
"""


def test_a_file_that_is_truncated_later(tmp_path):
    """Prevents a server from dying of SIGBUS, or from scoring with other numbers, when its file is overwritten."""
    path = tmp_path / "s.safetensors"
    big = {"mean": stats().mean.repeat(1, 400, 1), "abs_mean": stats().abs_mean.repeat(1, 400, 1)}
    save_stats(
        partial_stats(
            **{name: part[..., :4] for name, part in big.items()},
            unrotated_mean=torch.ones(LAYERS, HEADS * 400, HEAD_DIM - 8),
        ),
        path,
    )
    done = subprocess.run([sys.executable, "-P", "-c", USE_AFTER, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode} {done.stderr[-2000:]}"
