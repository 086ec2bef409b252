"""What does freed memory buy in each way of serving? The requests of capacity.py, plain and compressed.

Each way is a set of flags that both servers have, or servers with SGLang's router. Plain and compressed alternate,
and figures are medians over the runs. As in capacity.py, the ratio of running requests is a matter of memory and
carries over to a GPU; that of tokens per second does not.

    python -m benchmarks.serving.modes --json modes.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.common import print_table, write
from benchmarks.serving import capacity
from benchmarks.serving.servers import on_cores, prepared_model, serving
from run_router import SPREAD, running_router
from server import exit_on_signals, free_port


@dataclass(frozen=True)
class Mode:
    """A way of serving.

    Attributes:
        args: flags of both servers; "{model}" stands for the path of the model.
        env: added to the environment of both.
        devices: how many GPUs it takes, where there are any.
        start_servers: starts the servers, where there are several, and yields as `running` does; called with whether
            they compress, the model, its statistics, the sizes and a folder for logs.
    """

    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    devices: int = 1
    start_servers: Callable | None = None


# Requests here wait for room, longer than the router and a decode server let them by default.
PATIENT = ("--request-timeout-secs", "3600")
PATIENTLY = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "3600", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "3600"}
# Between servers of one machine; on GPUs SGLang's default.
TRANSFER = () if torch.accelerator.is_available() else ("--disaggregation-transfer-backend", "process_memory")


def _on_gpu(number: int) -> tuple[str, ...]:
    """The flags of a server with a GPU of its own, where there are any."""
    return ("--base-gpu-id", str(number)) if torch.accelerator.is_available() else ()


@contextmanager
def prefill_and_decode(
    compressed: bool, model: str, stats: str, sizes: capacity.Sizes, logs: Path
) -> Iterator[tuple[str, list[str]]]:
    """A server that prefills and one that decodes, which compresses or not."""
    bootstrap = str(free_port())
    common = [*TRANSFER, "--disaggregation-bootstrap-port", bootstrap, "--disaggregation-mode"]
    with ExitStack() as stack:
        found = []
        for number, role in enumerate(("prefill", "decode")):
            args = [
                *capacity.server_args(compressed and role == "decode", stats, sizes),
                *common,
                role,
                *_on_gpu(number),
            ]
            env = {**on_cores(number), **PATIENTLY}
            found.append(stack.enter_context(serving(model, args, logs / f"{role}.log", env)))
        prefill, decode = found
        routing = ["--pd-disaggregation", "--prefill", prefill.url, bootstrap, "--decode", decode.url, *PATIENT]
        router = stack.enter_context(running_router([prefill.url, decode.url], logs / "router.log", *routing))
        yield router.url, [decode.url]


@contextmanager
def replicas_with_a_router(
    compressed: bool, model: str, stats: str, sizes: capacity.Sizes, logs: Path
) -> Iterator[tuple[str, list[str]]]:
    """Two servers, either of which a request may go to: where its prefix is, or else where there is less to do."""
    with ExitStack() as stack:
        urls = []
        for number in range(2):
            args = [*capacity.server_args(compressed, stats, sizes), *_on_gpu(number)]
            replica = serving(model, args, logs / f"replica-{number}.log", on_cores(number))
            urls.append(stack.enter_context(replica).url)
        router = stack.enter_context(running_router(urls, logs / "router.log", *SPREAD, *PATIENT))
        yield router.url, urls


NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
# Its own draft model. With random weights, it predicts some tokens only: it is not given the first token.
STANDALONE = (
    *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "{model}"),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
# The CPU platform's own backend: SGLang's for CPUs does not know the idle batches of attention data parallelism.
REFERENCE = () if torch.accelerator.is_available() else ("--attention-backend", "torch_reference")
MODES = {
    "usual": Mode(),
    "overlap off": Mode(("--disable-overlap-schedule",)),
    "mixed chunks": Mode(("--enable-mixed-chunk", "--chunked-prefill-size", "64")),
    "two tokenizer workers": Mode(("--tokenizer-worker-num", "2")),
    "hierarchical cache": Mode(("--enable-hierarchical-cache", "--hicache-ratio", "2", "--page-size", "16")),
    "n-gram drafts": Mode(NGRAM),
    "draft model": Mode(STANDALONE),
    "two replicas": Mode(("--dp-size", "2"), on_cores(0, 1), devices=2),
    "tensor parallel": Mode(("--tp-size", "2"), on_cores(0, 1), devices=2),
    "pipeline parallel": Mode(("--pp-size", "2"), on_cores(0, 1), devices=2),
    "attention data parallel": Mode(
        ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", *REFERENCE), on_cores(0, 1), devices=2
    ),
    "prefill and decode disaggregated": Mode(devices=2, start_servers=prefill_and_decode),
    "two replicas with a router": Mode(devices=2, start_servers=replicas_with_a_router),
}


def fits(mode: Mode) -> bool:
    """Whether there are enough GPUs, or none: then ranks share the CPU's cores."""
    return not torch.accelerator.is_available() or torch.accelerator.device_count() >= mode.devices


@contextmanager
def running(
    mode: Mode, compressed: bool, model: str, stats: str, sizes: capacity.Sizes, logs: Path
) -> Iterator[tuple[str, list[str]]]:
    """The URL that takes requests, and those of the servers that decode them."""
    if mode.start_servers:
        with mode.start_servers(compressed, model, stats, sizes, logs) as urls:
            yield urls
        return
    args = [*capacity.server_args(compressed, stats, sizes), *(flag.replace("{model}", model) for flag in mode.args)]
    with serving(model, args, logs / "server.log", dict(mode.env)) as server:
        yield server.url, [server.url]


def measure(mode: Mode, model: str, stats: str, sizes: capacity.Sizes, runs: int, logs: Path) -> dict:
    """Medians of both servers, and compressed over plain."""
    found: dict[str, list[dict]] = {"plain": [], "compressed": []}
    for _ in range(runs):
        for name, measured in found.items():
            with running(mode, name == "compressed", model, stats, sizes, logs) as (url, decoders):
                measured.append(capacity.measure(url, sizes, decoders))
    row: dict = {}
    for name, measured in found.items():
        median = capacity.median_of(measured)
        row[name] = {key: value for key, value in median.items() if key != "timeline"}
    row["ratios"] = {key: row["compressed"][key] / row["plain"][key] for key in ("mean_running", "tokens_per_second")}
    return row


def table(rows: list[dict]) -> None:
    header = ["mode", "running plain", "compressed", "ratio", "tokens/s plain", "compressed", "ratio", "retractions"]
    lines = []
    for row in rows:
        line = [row["mode"]]
        for key in ("mean_running", "tokens_per_second"):
            line += [row["plain"][key], row["compressed"][key], row["ratios"][key]]
        lines.append([*line, row["plain"]["retractions"] + row["compressed"]["retractions"]])
    print_table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a third of all lengths, one run, the first two ways only")
    parser.add_argument("--only", nargs="+", choices=MODES, help="leave out the others")
    parser.add_argument("--tokens", type=int, help="generated tokens of a request, by default 1000, or 360")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", help="served with random token ids; by default a tiny random model")
    parser.add_argument("--stats", help="its statistics")
    options = parser.parse_args()
    sizes, runs = (capacity.QUICK, 1) if options.quick else (capacity.Sizes(), options.runs)
    if options.tokens is not None:
        sizes = replace(sizes, tokens=options.tokens)
    rows = []
    with prepared_model(options.model, options.stats, "Qwen3") as (model, stats), TemporaryDirectory() as logs:
        for name in options.only or list(MODES)[: 2 if options.quick else None]:
            mode = MODES[name]
            if not fits(mode):
                print(f"{name}: left out, it takes {mode.devices} GPUs", flush=True)
                continue
            row = {"mode": name, "flags": " ".join(mode.args), "tokens": sizes.tokens}
            rows.append({**row, **measure(mode, model, stats, sizes, runs, Path(logs))})
            table(rows[-1:])
    table(rows)
    setting = {
        "model": options.model or "tiny random Qwen3",
        "prompt": capacity.SHARED + capacity.OWN,
        **asdict(sizes),
        "runs": runs,
    }
    write({"setting": setting, "rows": rows}, options.json, options.quick)


if __name__ == "__main__":
    exit_on_signals()
    main()
