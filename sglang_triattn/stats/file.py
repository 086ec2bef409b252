"""Statistics files: one per model, checked against the served model.

A file is a `.safetensors` with everything needed to notice that it belongs to another model. The `.pt` files published
with the paper (docs/method.md) can be read too; they store neither frequencies nor KV heads, so less of them can be
checked.
"""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from sglang_triattn.errors import first_line, quoted
from sglang_triattn.files import write_safetensors
from sglang_triattn.model.rope import Rope
from sglang_triattn.stats.content import read_content
from sglang_triattn.stats.published import LARGEST_HEAD, read_pt
from sglang_triattn.stats.query_stats import RECALIBRATE, ModelShape, QueryStats, StatsError

FORMAT = "sglang-triattn-stats"
FORMAT_VERSION = 2
READABLE = ("1", "2")
"""Version 1 knows neither scored layers, nor layers without RoPE, nor means of unrotated dims."""
INV_FREQ_RTOL = 1e-5


def save_stats(stats: QueryStats, path: str | os.PathLike) -> None:
    """Atomically writes `stats` to `path`.

    Raises:
        StatsError: the name does not end in .safetensors or the file cannot be written.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise StatsError(f"Cannot write statistics to {path}: the name must end in .safetensors.")
    tensors = {
        "mean_re": stats.mean.real.float().contiguous().cpu(),
        "mean_im": stats.mean.imag.float().contiguous().cpu(),
        "abs_mean": stats.abs_mean.float().contiguous().cpu(),
    }
    if stats.unrotated_mean is not None:
        tensors["unrotated_mean"] = stats.unrotated_mean.float().contiguous().cpu()
    if stats.lookups is not None:
        tensors["lookups"] = stats.lookups.float().contiguous().cpu()
    fields = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "head_dim": stats.head_dim,
        "num_kv_heads": stats.num_kv_heads,
        "fingerprint": stats.fingerprint,
        "token_count": stats.token_count,
        "model": stats.model,
        "layers": json.dumps(stats.layers),
        "rotates": json.dumps(stats.rotates),
    }
    if stats.rotary_start:
        fields["rotary_start"] = stats.rotary_start
    if stats.rope is not None:
        tensors["inv_freq"] = stats.rope.inv_freq.to("cpu", torch.float64).contiguous()
        fields |= {
            "attention_scaling": repr(stats.rope.attention_scaling),
            "rotary_dim": stats.rope.rotary_dim,
            "style": stats.rope.style,
        }
    metadata = {name: str(value) for name, value in fields.items() if value is not None}
    try:
        write_safetensors(path, tensors, metadata)
    except (OSError, SafetensorError) as error:
        raise StatsError(f"Cannot write statistics to {path}: {first_line(error)}.") from error


def load_stats(path: str | os.PathLike) -> QueryStats:
    """Reads a statistics file: this package's .safetensors or a published .pt (docs/method.md).

    A .pt is unpickled with `weights_only=True` and leaves num_kv_heads, rope, fingerprint and token_count None.

    Raises:
        StatsError: the file is missing, unreadable, of another kind, or holds impossible numbers.
    """
    path = Path(path)
    if not path.is_file():
        raise StatsError(f"Statistics file {path} does not exist: {RECALIBRATE}")
    try:
        if path.suffix == ".safetensors":
            stats = _read_safetensors(path)
        elif path.suffix in (".pt", ".pth"):
            stats = read_pt(path)
        else:
            raise StatsError(f"Statistics file {path} is of an unknown kind: the name must end in .safetensors or .pt.")
        _check_numbers(stats)
    except StatsError:
        raise
    except Exception as error:
        # A damaged file can make any part of what reads it fail.
        raise StatsError(f"Statistics file {path} cannot be read ({first_line(error)}): {RECALIBRATE}") from error
    return stats


def check_stats(stats: QueryStats, shape: ModelShape) -> QueryStats:
    """Compares every stored field with the served model, and fills in KV heads and RoPE where the file has none.

    Raises:
        StatsError: naming the first field that differs and both values.
    """
    layers, q_heads, frequencies = stats.mean.shape
    require_same(stats, "layers", layers, shape.num_layers)
    require_same(stats, "the list of scored layers", stats.layers, shape.layers)
    plain = _without_rope(shape)
    if plain and stats.unrotated_mean is None:
        raise StatsError(
            f"Statistics {stats.source} do not say which layers have RoPE, but layers {plain} of the served model have "
            "none: measure the served model with `sglang-triattn calibrate`."
        )
    require_same(stats, "the list of layers without RoPE", _without_rope(stats), plain)
    require_same(stats, "query heads", q_heads, shape.num_q_heads)
    require_same(stats, "KV heads", stats.num_kv_heads, shape.num_kv_heads)
    require_same(stats, "head_dim", stats.head_dim, shape.head_dim)
    # A file without RoPE is a published one: all dims are rotated, in half style.
    rope, served = stats.rope, shape.rope
    require_same(stats, "rotary_dim", rope.rotary_dim if rope else 2 * frequencies, served.rotary_dim)
    require_same(stats, "the first dim that RoPE turns", stats.rotary_start, shape.rotary_start)
    require_same(stats, "RoPE style", rope.style if rope else "half", served.style)
    if rope is not None:
        scaling = (rope.attention_scaling, served.attention_scaling)
        if not math.isclose(*scaling, rel_tol=INV_FREQ_RTOL):
            require_same(stats, "RoPE attention scaling", *scaling)
        stored, expected = rope.inv_freq, served.inv_freq.to("cpu", torch.float64)
        far = ((stored - expected).abs() > INV_FREQ_RTOL * expected.abs()).nonzero().flatten().tolist()
        if far:
            name = f"RoPE frequency {far[0]} of {frequencies} (rope_theta or rope scaling)"
            require_same(stats, name, stored[far[0]].item(), expected[far[0]].item())
    if shape.fingerprint is not None:
        require_same(stats, "model fingerprint", stats.fingerprint, shape.fingerprint)
    return replace(stats, num_kv_heads=shape.num_kv_heads, rope=rope or served)


def _without_rope(model: ModelShape | QueryStats) -> list[int]:
    """Numbers of the scored layers that RoPE leaves alone."""
    return [layer for layer, turns in zip(model.layers, model.rotates, strict=True) if not turns]


def require_same(stats: QueryStats, name: str, stored, served) -> None:
    """Raises StatsError if the file stores a value and the served model has another one."""
    if stored is not None and stored != served:
        there, here = (
            value if isinstance(value, int | float) else quoted(value).strip("'") for value in (stored, served)
        )
        raise StatsError(
            f"Statistics {stats.source} do not fit the served model: {name} is {there} there and {here} "
            "in the model; measure the served model with `sglang-triattn calibrate`."
        )


def _read_safetensors(path: Path) -> QueryStats:
    tensors, fields = read_content(path)
    if fields.get("format") != FORMAT:
        raise StatsError(f"{path} is not a TriAttention statistics file: {RECALIBRATE}")
    version = fields.get("format_version")
    if version not in READABLE:
        raise StatsError(
            f"Statistics file {path} has format version {quoted(version)[1:-1]}, but this sglang-triattn reads "
            f"versions {' and '.join(READABLE)}: {RECALIBRATE}"
        )
    for name, tensor in tensors.items():
        if tensor.dtype != (torch.float64 if name == "inv_freq" else torch.float32):
            raise StatsError(f"Statistics file {path} is damaged, {quoted(name)} has another dtype: {RECALIBRATE}")
    try:
        rope = None
        if "inv_freq" in tensors:
            rope = Rope(
                inv_freq=tensors["inv_freq"].double(),
                attention_scaling=float(fields["attention_scaling"]),
                rotary_dim=int(fields["rotary_dim"]),
                style=fields["style"],
            )
        return QueryStats(
            mean=torch.complex(tensors["mean_re"], tensors["mean_im"]),
            abs_mean=tensors["abs_mean"],
            num_kv_heads=_optional_int(fields.get("num_kv_heads")),
            head_dim=int(fields["head_dim"]),
            rope=rope,
            fingerprint=fields.get("fingerprint"),
            token_count=_optional_int(fields.get("token_count")),
            source=str(path),
            layers=_numbers(fields, "layers"),
            rotates=tuple(map(bool, _numbers(fields, "rotates"))),
            unrotated_mean=tensors.get("unrotated_mean"),
            rotary_start=int(fields.get("rotary_start", 0)),
            model=fields.get("model"),
            lookups=tensors.get("lookups"),
        )
    except (KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise StatsError(f"Statistics file {path} is incomplete ({first_line(error)}): {RECALIBRATE}") from error


def _check_numbers(stats: QueryStats) -> None:
    """Raises StatsError unless the numbers can be statistics of some model."""
    mean, abs_mean, rope, unrotated = stats.mean, stats.abs_mean, stats.rope, stats.unrotated_mean

    def require(fits: bool, what: str) -> None:
        if not fits:
            raise StatsError(f"Statistics file {stats.source} is damaged, {what}: {RECALIBRATE}")

    require(stats.head_dim <= LARGEST_HEAD, "no model has heads as large")
    require(mean.ndim == 3 and mean.numel() > 0 and mean.shape == abs_mean.shape, "shapes disagree")
    require(0 < 2 * mean.shape[-1] <= stats.head_dim, "it has more frequencies than a head has pairs of dims")
    layers = stats.layers
    require(len(layers) == len(stats.rotates) == len(mean), "its lists of layers do not fit its means")
    require(layers[0] >= 0 and list(layers) == sorted(set(layers)), "its layers are out of order")
    parts = [torch.view_as_real(mean), abs_mean]
    if unrotated is not None:
        others = (*mean.shape[:2], stats.head_dim - 2 * mean.shape[-1])
        require(unrotated.shape == others, "shapes of its unrotated dims disagree")
        parts.append(unrotated)
    if stats.lookups is not None:
        *heads, width = stats.lookups.shape
        fits = heads == [len(mean), stats.num_kv_heads] and 0 < width - mean.shape[-1] <= LARGEST_HEAD
        require(fits and not stats.rotary_start, "its look-up weights do not fit its means")
        parts.append(stats.lookups)
    still = 0 if unrotated is None else unrotated.shape[-1]
    require(stats.rotary_start in (0, still), "the dims that RoPE turns are elsewhere")
    require(all(bool(torch.isfinite(part).all()) for part in parts), "it holds NaN or infinite values")
    # The mean of absolute values bounds the absolute value of the mean, up to float32 rounding.
    bounded = bool((mean.abs() <= abs_mean * (1 + 1e-4) + 1e-6).all())
    require(bounded, "a mean absolute value is below the absolute mean")
    if rope is not None:
        require(rope.rotary_dim == 2 * mean.shape[-1] == 2 * rope.inv_freq.numel(), "rotary_dim disagrees")
        require(rope.style in ("half", "interleaved"), f"unknown RoPE style {quoted(rope.style)}")
        # Pairs of dims that RoPE leaves alone have frequency 0: all of them in models without RoPE.
        turns = bool((torch.isfinite(rope.inv_freq) & (rope.inv_freq >= 0)).all())
        turns = turns and (bool(rope.inv_freq.any()) or not any(stats.rotates))
        require(turns and 0 < rope.attention_scaling < math.inf, "a RoPE value is not positive and finite")


def _optional_int(text: str | None) -> int | None:
    return None if text is None else int(text)


def _numbers(fields: dict[str, str], name: str) -> tuple[int, ...]:
    """A list of numbers; empty, which stands for the usual ones, in files of version 1."""
    return tuple(map(int, json.loads(fields.get(name, "[]"))))
