"""Draw the committed figures: each JSON in results/ becomes a PNG.

python -m benchmarks.plot
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

RESULTS = Path(__file__).parent / "results"
COLORS = {"plain": "#cc6677", "compressed": "#4477aa"}


def bars(axes, labels: list[str], values: list[float], line: float | None = None) -> None:
    """Horizontal bars with their values, the first on top, and a dashed line for comparison."""
    axes.barh(labels, values, color="#4477aa")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    for index, value in enumerate(values):
        axes.text(value, index, f" {value:.3g}", va="center", fontsize=8)
    if line is not None:
        axes.axvline(line, color="black", linestyle="--", linewidth=1)


def draw_traffic(content: dict, path: Path) -> None:
    rows = [row for row in content["rows"] if row["selection"] == "union"]
    figure, axes = pyplot.subplots(figsize=(8, 0.35 * len(rows) + 1.5), layout="constrained")
    bars(axes, [row["shape"] for row in rows], [row["ratio_to_minimum"] for row in rows], 1.0)
    axes.set_xlim(0.9)
    axes.set_xlabel("bytes moved / fewest possible, selection union (counted, not measured)")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_speed(content: dict, path: Path) -> None:
    rows, machine = content["rows"], content["machine"]
    labels = [row["shape"] for row in rows]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 0.35 * len(rows) + 1.8), sharey=True, layout="constrained"
    )
    bars(left, labels, [row["speedup_over_rival"] for row in rows])
    left.set_xlabel("times as fast as the plain version")
    bars(right, labels, [row["share_of_copy_bandwidth"] for row in rows])
    right.invert_yaxis()
    right.set_xlabel("share of a copy's bandwidth")
    gpu = f"GPU {machine['gpu']}" if machine["gpu"] != "none" else "no GPU"
    figure.suptitle(f"{machine['cpu']}, {machine['torch_threads']} threads, {gpu}", fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_compact(content: dict, path: Path) -> None:
    moves = [row for row in content["rows"] if "bytes_moved" in row]
    freed = [row for row in content["rows"] if "freed_share" in row]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 0.3 * len(moves) + 1.5), layout="constrained")
    labels = [f"{row['shape'].split()[0]} {row['selection']} {row['strategy']}" for row in moves]
    bars(left, labels, [row["bytes_moved"] / 1e6 for row in moves])
    left.set_xlabel("MB read and written in a round of 8 requests (counted)")
    bars(right, [f"page {row['page_size']} {row['strategy']}" for row in freed], [row["freed_share"] for row in freed])
    right.set_xlabel("freed slots / evicted tokens, 90 % evicted")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_capacity(content: dict, path: Path) -> None:
    figure, axes = pyplot.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
    for name, color in COLORS.items():
        seconds, running, used = zip(*content[name]["timeline"], strict=True)
        axes[0].plot(seconds, running, color=color, label=name)
        axes[1].plot(seconds, used, color=color, label=name)
    axes[0].set_ylabel("running requests")
    axes[0].legend()
    axes[1].set_ylabel("KV slots in use")
    axes[1].axhline(content["setting"]["pool"], color="black", linestyle="--", linewidth=1)
    axes[1].set_xlabel("seconds")
    machine, setting = content["machine"], content["setting"]
    figure.suptitle(
        f"{setting['model']}, {setting['requests']} requests of {setting['tokens']} tokens, {machine['cpu']}"
    )
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_decode(content: dict, path: Path) -> None:
    """Tokens per second by context, one panel per batch; ceilings dashed, cells that did not fit left out."""
    default = content["setting"]["selection"]
    rows = [row for row in content["rows"] if (row["page_size"], row["selection"]) == (1, default)]
    batches = sorted({row["batch"] for row in rows})
    figure, panels = pyplot.subplots(1, len(batches), figsize=(3.5 * len(batches) + 1, 4), layout="constrained")
    for batch, axes in zip(batches, [panels] if len(batches) == 1 else panels, strict=True):
        own = [row for row in rows if row["batch"] == batch]
        budgets = sorted({row["budget"] for row in own})
        lines = {"dense": (own, "dense")}
        lines |= {f"budget {n}": ([row for row in own if row["budget"] == n], "compressed") for n in budgets}
        for index, (label, (points, mode)) in enumerate(lines.items()):
            points = [row for row in points if row[f"{mode}_tokens_s"] is not None]
            contexts = [row["context"] for row in points]
            color = f"C{index}"
            axes.plot(contexts, [row[f"{mode}_tokens_s"] for row in points], "o-", color=color, label=label)
            axes.plot(contexts, [row[f"{mode}_ceiling"] for row in points], "--", color=color, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0)
        axes.set_title(f"batch {batch}", fontsize=9)
        axes.set_xlabel("context, tokens")
        axes.legend(fontsize=7)
    figure.supylabel("tokens per second (dashed: by bytes)", fontsize=9)
    machine, setting = content["machine"], content["setting"]
    gpu = machine["gpu"] if machine["gpu"] != "none" else machine["cpu"]
    figure.suptitle(f"{setting['model']}, {setting['layers']} layers, {setting['attention']}, {gpu}", fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_quality(content: dict, path: Path) -> None:
    """The share of right answers: one panel per task, one bar per policy, one shade per share."""
    rows = content["rows"]
    tasks, policies, shares = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "policy", "share"))
    right = {(row["task"], row["policy"], row["share"]): row["right"] for row in rows}
    figure, panels = pyplot.subplots(
        1, len(tasks), figsize=(1.7 * len(tasks) + 2.5, 0.3 * len(policies) + 1.8), sharey=True, layout="constrained"
    )
    thickness = 0.8 / len(shares)
    for task, axes in zip(tasks, panels if len(tasks) > 1 else [panels], strict=True):
        for number, share in enumerate(shares):
            places = [place + (number - (len(shares) - 1) / 2) * thickness for place in range(len(policies))]
            values = [right.get((task, policy, share), float("nan")) for policy in policies]
            shade = pyplot.get_cmap("Blues_r")(0.15 + 0.6 * number / len(shares))
            axes.barh(places, values, height=thickness, color=shade, label=f"{share:.4g}")
        axes.axvline(right[task, "dense", shares[0]], color="black", linestyle="--", linewidth=1)
        axes.set_title(task, fontsize=9)
        axes.set_xlim(0, 1)
    axes.set_yticks(range(len(policies)), policies, fontsize=8)
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower right", ncols=len(shares), fontsize=8)
    setting = content["setting"]
    figure.suptitle(f"{setting['model']}: right answers by part of the cache kept; dashed: dense", fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_serve(content: dict, path: Path) -> None:
    """Decode steps and rates by context, and the steps at rounds."""
    figure, (steps, rates, rounds) = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for name, color in COLORS.items():
        rows = [row for row in content["context"] if row["server"] == name]
        lengths = [row["context"] for row in rows]
        steps.plot(lengths, [row["itl_p50_ms"] for row in rows], "o-", color=color, label=name)
        steps.plot(lengths, [row["itl_p99_ms"] for row in rows], "--", color=color, linewidth=1)
        rates.plot(lengths, [row["tokens_per_second"] for row in rows], "o-", color=color, label=name)
    for axes, label in ((steps, "ms between tokens (dashed: p99)"), (rates, "tokens per second")):
        axes.set_ylim(0)
        axes.set_xlabel(f"context, tokens; {content['context'][0]['requests']} request(s) at once")
        axes.set_ylabel(label)
        axes.legend(fontsize=8)
    kinds = {"itl_p50_ms": "median", "itl_p99_ms": "p99", "worst_at_round_ms": "longest at a round"}
    rows = {row["server"]: row for row in content["rounds"]}
    labels = [f"{name}: {label}" for label in kinds.values() for name in COLORS]
    bars(rounds, labels, [rows[name][key] for key in kinds for name in COLORS])
    rounds.set_xlabel(f"ms between tokens, {rows['plain']['requests']} requests at once")
    machine, setting = content["machine"], content["setting"]
    where = machine["gpu"] if machine["gpu"] != "none" else machine["cpu"]
    figure.suptitle(f"{setting['model']}, budget {setting['budget']}, {where}", fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_soak(content: dict, path: Path) -> None:
    """Memory, the pool's books and latencies over time."""
    samples, latencies, setting = content["samples"], content["latencies"], content["setting"]
    figure, (memory, books, times) = pyplot.subplots(3, 1, figsize=(9, 8), sharex=True, layout="constrained")
    seconds = [sample["seconds"] for sample in samples]
    for row in content["memory"]:
        values = [sample[f"{row['process']} MB"] for sample in samples]
        memory.plot(seconds, [value - values[0] for value in values], label=f"{row['process']}, {values[0]:,.0f} MB")
    memory.set_ylabel("resident memory, MB more\nthan at the start")
    for key, label in (("used", "in use"), ("kv_evictable", "cached, evictable")):
        books.plot(seconds, [sample[key] for sample in samples], linewidth=1, label=label)
    books.axhline(setting["pool"], color="black", linestyle="--", linewidth=1)
    books.set_ylabel("KV slots")
    for key in ("ttft_p50_ms", "itl_p50_ms", "itl_p99_ms"):
        times.plot([row["from_s"] for row in latencies], [row[key] for row in latencies], "o-", label=key)
    times.set_yscale("log")
    times.set_ylabel("ms")
    times.set_xlabel("seconds")
    for axes in (memory, books, times):
        axes.legend(fontsize=8)
    figure.suptitle(f"{setting['model']}, {setting['clients']} clients, {content['machine']['cpu']}", fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Software": None})


DRAWN = {
    "score_traffic": draw_traffic,
    "score_speed": draw_speed,
    "compact": draw_compact,
    "capacity": draw_capacity,
    "decode": draw_decode,
    "quality": draw_quality,
    "serve": draw_serve,
    "soak": draw_soak,
}


def main() -> None:
    for name, draw in DRAWN.items():
        # Includes the files of a GPU, which have its name in theirs.
        for path in sorted(RESULTS.glob(f"{name}*.json")):
            draw(json.loads(path.read_text()), path.with_suffix(".png"))
            print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
