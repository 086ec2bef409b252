"""Draw the dashboard's panels over a real load: server, Prometheus and requests are this machine's.

    python tools/dashboard_picture.py --out docs/images/dashboard.png

Grafana takes no part: each panel's own expressions are asked of Prometheus and drawn where its `gridPos` says. Serves
the model of `make demo`, with a small pool, for `--seconds`. Runs in the environment that `make setup` prepares.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from transformers import AutoTokenizer

import prepare_model
from prometheus import Prometheus, filled, panels, running_prometheus
from server import exit_on_signals, running_server, triattention_args

COLUMNS, INTERVAL, WINDOW, STEP_S = 24, "5s", "20s", 2
CLIENTS = 6
THINKING_S = 3
"""Before a conversation's second turn, whose row waits meanwhile."""


def shown(value: float, unit: str) -> str:
    """A value as Grafana shows it in this unit."""
    if unit == "percentunit":
        return f"{100 * value:.0f}%"
    if unit == "s":
        return next(f"{value * scale:.3g} {name}" for least, scale, name in SECONDS if value >= least)
    if unit == "Bps":
        power = min(int(math.log10(value) // 3), 4) if value >= 1 else 0
        return f"{value / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}/s"
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


SECONDS = ((1, 1, "s"), (1e-3, 1e3, "ms"), (0, 1e6, "µs"))


def draw(prometheus: Prometheus, start: float, end: float, title: str) -> Figure:
    """The dashboard from `start` to `end`, seconds of the epoch."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels())
    figure = pyplot.figure(figsize=(15, 0.42 * rows + 0.6), dpi=80)
    figure.suptitle(title, fontsize=11, y=0.995)
    for panel in panels():
        place = panel["gridPos"]
        left, bottom = place["x"] / COLUMNS, 1 - (place["y"] + place["h"]) / rows
        width, height = place["w"] / COLUMNS, place["h"] / rows
        inside = (left + 0.035, 0.97 * bottom + 0.02, width - 0.05, 0.97 * height - 0.035)
        axes = figure.add_axes(inside)
        axes.set_title(panel["title"], fontsize=9, loc="left", fontweight="bold")
        (draw_stat if panel["type"] == "stat" else draw_lines)(axes, panel, prometheus, start, end)
    return figure


def draw_stat(axes: Any, panel: dict, prometheus: Prometheus, start: float, end: float) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    (series,) = prometheus.query_range(filled(panel["targets"][0]["expr"], WINDOW), start, end, STEP_S)
    value = float(series["values"][-1][1])
    named = {key: display for mapping in defaults["mappings"] for key, display in mapping["options"].items()}
    display = named.get(f"{value:g}", {"text": shown(value, defaults["unit"]), "color": "green"})
    axes.axis("off")
    axes.text(0.5, 0.45, display["text"], ha="center", va="center", fontsize=20, color=display["color"])


def named(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), legend)


def draw_lines(axes: Any, panel: dict, prometheus: Prometheus, start: float, end: float) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    for target in panel["targets"]:
        for series in prometheus.query_range(filled(target["expr"], WINDOW), start, end, STEP_S):
            points = [(float(at) - start, float(value)) for at, value in series["values"]]
            axes.plot(*zip(*points, strict=True), linewidth=1.3, label=named(target["legendFormat"], series["metric"]))
    axes.set_xlim(0, end - start)
    axes.set_ylim(defaults["min"], defaults.get("max"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, defaults["unit"])))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="best", framealpha=0.6)


def post(url: str, ids: list[int], tokens: int, asked: dict) -> list[int]:
    """The answer to a prompt, both as token ids; empty if the request was refused."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.7}
    body = {"input_ids": ids, "sampling_params": {**sampling, "custom_params": {"triattention": asked}}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)["output_ids"]
    except HTTPError:
        return []


def work(url: str, number: int, end: float, ids_of: Callable[[str], list[int]]) -> None:
    """What one client does until `end`: a wrong field, then a conversation of two turns, and again.

    It sends ids, because an answer's text may have other ids than those that were generated.
    """
    for turn in itertools.count():
        if time.time() > end:
            return
        name = f"client {number} turn {turn}"
        ids = ids_of(f"{name}. Explain in detail how a bicycle stays upright.")
        post(url, ids, 1, {"budget": 0} if number % 2 else {"colour": "red"})
        # Clients differ, so that their rounds do not fall into the same steps.
        answer = post(url, ids, 150 + 40 * number, {"conversation": name})
        time.sleep(THINKING_S)
        post(url, ids + answer + ids_of(" And a motorcycle?"), 40 + 20 * number, {"conversation": name})


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the dashboard's panels over a real load.", allow_abbrev=False)
    parser.add_argument("--out", required=True, metavar="FILE.png")
    parser.add_argument("--seconds", type=int, default=180, help="how long clients send requests (%(default)s)")
    options = parser.parse_args()
    exit_on_signals()
    model, stats = prepare_model.prepare()
    tokenizer = AutoTokenizer.from_pretrained(model)
    # Small enough that a CPU outgrows budget and pool within the time.
    flags = [*triattention_args(stats), "--max-total-tokens", "1100", "--triattention-pressure-budget", "64"]
    flags += ["--triattention-budget", "96", "--triattention-interval", "32", "--triattention-recent", "24"]
    flags += ["--enable-metrics", "--decode-log-interval", "10", "--schedule-conservativeness", "0.1"]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(model, flags, log_path=Path(folder) / "server.log") as server,
        running_prometheus(
            [server.url.removeprefix("http://")], INTERVAL, Path(folder) / "prometheus.log"
        ) as prometheus,
    ):
        start = time.time()
        end = start + options.seconds
        clients = [
            threading.Thread(target=work, args=(server.url, number, end, tokenizer.encode), daemon=True)
            for number in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        time.sleep(max(0, end - time.time()))
        title = f"{model.name.rpartition('-')[0]}, {CLIENTS} clients, on a CPU; drawn from the dashboard's queries"
        draw(prometheus, start, end, title).savefig(options.out, metadata={"Software": None})
    print(options.out, file=sys.stderr)


if __name__ == "__main__":
    main()
