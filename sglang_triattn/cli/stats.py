"""`sglang-triattn stats`: shows what a statistics file holds, in words and as a picture."""

import argparse
import importlib.util
import math
import textwrap
from pathlib import Path

from sglang_triattn.errors import TriAttentionError

# Of one wide character of a title, which has 12 points.
TITLE_INCHES = 0.17
INSTALL = 'pip install "sglang-triattn[plot]"'

PARSER = {
    "help": "show what a statistics file holds",
    "description": "Prints what a statistics file holds and draws how concentrated the queries of each head are.",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="statistics file (.safetensors, or a published .pt)")
    plot = parser.add_mutually_exclusive_group()
    plot.add_argument("--plot", metavar="OUT.png", help="picture to write, with matplotlib (FILE with the suffix .png)")
    plot.add_argument("--no-plot", action="store_true", help="write no picture")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the report and draws the picture. Raises TriAttentionError for a user error."""
    file = Path(arguments.file)
    picture = None if arguments.no_plot else Path(arguments.plot or file.with_suffix(".png"))
    if picture is not None and picture.suffix != ".png":
        raise TriAttentionError(f"--plot is {picture}, but its name must end in .png.")
    if picture is not None and not picture.parent.is_dir():
        raise TriAttentionError(f"--plot is {picture}, but its folder does not exist: create it first.")
    drawable = importlib.util.find_spec("matplotlib") is not None
    if arguments.plot and not drawable:
        raise TriAttentionError(f"--plot draws with matplotlib, which is not installed: run `{INSTALL}`.")

    from sglang_triattn.stats.concentration import concentration, layer_lines, outlook
    from sglang_triattn.stats.file import load_stats

    stats = load_stats(file)
    per_head = concentration(stats)
    shown = [
        f"file            {file} ({file.stat().st_size:,} bytes)",
        *_facts(stats),
        *_summary(stats.layers, per_head),
    ]
    print("\n".join([*shown, *layer_lines(stats), f"  it predicts   {outlook(stats)}"]))
    if picture is None:
        return
    if not drawable:
        print(f"picture         none, because matplotlib is not installed: run `{INSTALL}`")
        return
    _draw(per_head, f"Query concentration of {file.name}", picture)
    print(f"picture         {picture}")


def _facts(stats) -> list[str]:
    layers, heads, frequencies = stats.mean.shape
    unknown = "not in the file"
    others = f"{stats.head_dim - 2 * frequencies} dims" if stats.unrotated_mean is not None else unknown
    still = [str(layer) for layer, turns in zip(stats.layers, stats.rotates, strict=True) if not turns]
    gaps = stats.layers != tuple(range(layers))
    return [
        f"layers          {layers}{': ' + ', '.join(map(str, stats.layers)) if gaps else ''}",
        f"without RoPE    {'layers ' + ', '.join(still) if still else 'none'}",
        f"query heads     {heads}",
        f"KV heads        {stats.num_kv_heads or unknown}",
        f"head_dim        {stats.head_dim}",
        f"RoPE            {_rope_words(stats.rope) if stats.rope else unknown}",
        f"frequencies     {frequencies}",
        f"unrotated       {others}",
        f"fingerprint     {stats.fingerprint or unknown}",
        f"tokens          {f'{stats.token_count:,}' if stats.token_count else unknown}",
    ]


def _rope_words(rope) -> str:
    turning = 2 * int(rope.inv_freq.count_nonzero())
    words = f"{rope.style} pairs, {turning} dims turn, attention scaling {rope.attention_scaling:g}"
    theta = _theta(rope)
    scaled = "scaled frequencies" if theta is None else f"theta {theta:,.0f}"
    return f"{words}, {scaled}"


def _theta(rope) -> float | None:
    """The base whose powers the frequencies are, or None if they are not powers of one base."""
    frequencies = rope.inv_freq.tolist()
    if len(frequencies) < 2 or not 0 < frequencies[1] < 1:
        return None
    theta = frequencies[1] ** -len(frequencies)
    turning = [frequency for frequency in frequencies if frequency]
    expected = [theta ** (-index / len(frequencies)) for index in range(len(turning))]
    fits = all(math.isclose(*pair, rel_tol=1e-3) for pair in zip(turning, expected, strict=True))
    return theta if fits else None


def _summary(layers, per_head) -> list[str]:
    """Summarises the concentration `per_head`, [L, H_q] float64, of the layers with these numbers."""
    flat = per_head.flatten()
    order = flat.argsort()
    low, high = (flat.quantile(part).item() for part in (0.1, 0.9))

    def named(indices) -> str:
        heads = per_head.shape[1]
        return ", ".join(f"layer {layers[i // heads]} head {i % heads} ({flat[i]:.3f})" for i in indices.tolist())

    return [
        f"concentration   mean {flat.mean():.3f}, 10th percentile {low:.3f}, 90th percentile {high:.3f}",
        f"  lowest        {named(order[:3])}",
        f"  highest       {named(order[-3:].flip(0))}",
    ]


def _draw(per_head, title: str, picture: Path) -> None:
    """Writes a heat map of `per_head`, [L, H_q] float64: layers by heads."""
    try:
        _figure(per_head, title).savefig(picture, dpi=120)
    except OSError as error:
        raise TriAttentionError(f"Cannot write {picture} ({error.strerror}): choose another --plot.") from error


def _figure(per_head, title: str):
    """The heat map; a title that is wider than the picture takes several lines."""
    from matplotlib.figure import Figure

    layers, heads = per_head.shape
    # A separate Figure draws without a display and leaves pyplot's state alone.
    width = min(4 + 0.2 * heads, 16)
    figure = Figure(figsize=(width, min(2.5 + 0.2 * layers, 16)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(per_head.numpy(), aspect="auto", vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
    axes.set(xlabel="query head", ylabel="layer")
    figure.suptitle(textwrap.fill(title, int(width / TITLE_INCHES)))
    figure.colorbar(image, label="|mean q| / mean |q|, over frequencies")
    return figure
