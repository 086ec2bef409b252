"""Scores one case from a file, to compare this scorer with another implementation.

A case is an .npz with these arrays; any others are ignored:

    layers         [L]                       layer numbers in the statistics file
    keys_cached    [L, H_kv, N, head_dim]    keys as a KV cache holds them, after RoPE
    next_position  scalar                    logical position of the next token
    inv_freq       [F]                       RoPE frequencies in radians per token
    num_q_heads, num_kv_heads, keep          scalars

Optional: `positions` [N], of which only the shape is checked, because cached keys carry their position in their phase.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_triattn.errors import TriAttentionError, first_line
from sglang_triattn.kernels.score.tables import ScoreTables, build_tables
from sglang_triattn.kernels.scorer import Scorer
from sglang_triattn.stats.file import INV_FREQ_RTOL, QueryStats, load_stats

NEEDED = ("layers", "num_q_heads", "num_kv_heads", "keys_cached", "next_position", "inv_freq", "keep")
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
SCORES = {"score_mean": "mean", "score_max": "max", "score_norm_only": "norm"}
KEPT = {"kept_union": "union", "kept_per_head": "per-head", "kept_per_layer_head": "per-layer-head"}


def score_case(
    case: str | os.PathLike, stats: str | os.PathLike, *, device: str | None = None, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """Scores the keys of `case` with the server's scorer and selects by mean scores, with no recent tokens.

    Args:
        case: .npz file, see the module's docstring.
        stats: statistics file.
        device: torch device; by default cuda if there is one, else cpu. CUDA runs the Triton kernels, other devices the
            torch references.
        dtype: one of DTYPES, in which the keys are stored before they are scored.

    Returns:
        score_mean, score_max, score_norm_only: [L, H_q, N] float32; kept_union [keep], kept_per_head [H_kv, keep],
        kept_per_layer_head [L, H_kv, keep]: int64, ascending.

    Raises:
        TriAttentionError: a file is unusable or the two do not fit together.
    """
    fields = _read(Path(case))
    loaded = load_stats(stats)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tables = _tables(fields, loaded, Path(case), device)
        keys = torch.as_tensor(fields["keys_cached"]).to(device, DTYPES[dtype])
    except RuntimeError as error:
        reason = first_line(error)
        raise TriAttentionError(f"The case cannot be scored on --device {device}: {reason}.") from error
    # The kernels expect the heads of a token side by side, as in SGLang's pool.
    pools = [layer.transpose(0, 1).contiguous() for layer in keys]
    count = pools[0].shape[0]
    slots = torch.arange(count, dtype=torch.int32, device=device)[None]
    lengths = torch.tensor([count], device=device)
    next_position = torch.tensor([int(fields["next_position"])], device=device)
    row = slots, lengths, next_position

    def scorer(**options: Any) -> Scorer:
        return Scorer(pools, tables, num_tokens=count, longest=count, **options)

    answers = {
        name: scorer(aggregation=aggregation).scores(*row)[0].cpu().numpy() for name, aggregation in SCORES.items()
    }
    for name, selection in KEPT.items():
        kept = scorer(selection=selection).keep(*row, int(fields["keep"]), 0)
        answers[name] = kept[0].cpu().numpy()
    return answers


def save_answers(answers: dict[str, np.ndarray], out: str | os.PathLike) -> None:
    """Atomically writes the answers to `out` (.npz).

    Raises:
        TriAttentionError: it cannot be written.
    """
    out = Path(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            # pyright assumes that a name may be that of an option; none is.
            np.savez_compressed(file, **answers)  # pyright: ignore[reportArgumentType]
        os.replace(temporary, out)
    except OSError as error:
        raise TriAttentionError(f"Cannot write {out}: {error.strerror}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise TriAttentionError(f"Case {path} does not exist: give an .npz file.")
    try:
        with np.load(path, allow_pickle=False) as file:
            fields = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise TriAttentionError(f"Case {path} cannot be read: give an .npz file of plain arrays.") from error
    missing = [name for name in NEEDED if name not in fields]
    if missing:
        raise TriAttentionError(f"Case {path} lacks {', '.join(missing)}: it needs {', '.join(NEEDED)}.")
    for name in ("num_q_heads", "num_kv_heads", "next_position", "keep"):
        if fields[name].size != 1 or fields[name].dtype.kind not in "iu" or int(fields[name].item()) < 1:
            raise TriAttentionError(f"Case {path} is impossible: {name} must be one whole number, at least 1.")
        fields[name] = fields[name].reshape(())
    return fields


def _tables(fields: dict[str, np.ndarray], stats: QueryStats, path: Path, device: str) -> ScoreTables:
    """The scorer's constants for the case's layers, after checking that case and statistics fit together."""

    def require(fits: bool, what: str) -> None:
        if not fits:
            raise TriAttentionError(f"Case {path} and statistics {stats.source} cannot be used together: {what}.")

    layers, keys, inv_freq = fields["layers"], fields["keys_cached"], fields["inv_freq"]
    stored_layers, stored_heads, frequencies = stats.mean.shape
    q_heads, kv_heads, keep = (int(fields[name]) for name in ("num_q_heads", "num_kv_heads", "keep"))
    require(layers.ndim == 1 and layers.size > 0 and layers.dtype.kind in "iu", "layers must be whole numbers [L]")
    known = set(layers.tolist()) <= set(stats.layers)
    require(known, f"layers must lie within the {stored_layers} of the statistics")
    require(keys.ndim == 4 and keys.dtype.kind == "f", "keys_cached must be numbers [L, H_kv, N, head_dim]")
    require(keys.shape[0] == layers.size, f"keys_cached has {keys.shape[0]} layers and layers {layers.size}")
    require(keys.shape[1] == kv_heads, f"keys_cached has {keys.shape[1]} KV heads and num_kv_heads is {kv_heads}")
    require(keys.shape[3] == stats.head_dim, f"head_dim is {keys.shape[3]} and {stats.head_dim}")
    require(q_heads == stored_heads, f"query heads are {q_heads} and {stored_heads}")
    require(q_heads % kv_heads == 0, f"{q_heads} query heads cannot share {kv_heads} KV heads evenly")
    require(stats.num_kv_heads in (None, kv_heads), f"KV heads are {kv_heads} and {stats.num_kv_heads}")
    require(keep <= keys.shape[2], f"keep is {keep}, but there are {keys.shape[2]} keys")
    require(inv_freq.shape == (frequencies,), f"inv_freq is {list(inv_freq.shape)} and should be [{frequencies}]")
    positions = fields.get("positions")
    require(positions is None or positions.shape == keys.shape[2:3], "positions must be one for each key")
    rope = stats.rope
    inv_freq = torch.as_tensor(inv_freq).double()
    same = rope is None or torch.allclose(inv_freq, rope.inv_freq.double(), rtol=INV_FREQ_RTOL, atol=0)
    require(same, "inv_freq differs from the statistics'")
    places = [stats.layers.index(layer) for layer in layers.tolist()]
    index = torch.tensor(places)
    return build_tables(
        stats.mean[index],
        stats.abs_mean[index],
        inv_freq,
        rope.attention_scaling if rope else 1.0,
        rope.style if rope else "half",
        kv_heads,
        device,
        unrotated=None if stats.unrotated_mean is None else stats.unrotated_mean[index],
        rotates=[stats.rotates[place] for place in places],
        rotary_start=stats.rotary_start,
    )
