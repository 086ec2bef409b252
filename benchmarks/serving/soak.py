"""Does a server stay as it is under mixed load? Memory, pool, files and latencies over time, and all books at the end.

    python -m benchmarks.serving.soak --json soak.json

A few clients, each of which waits for its answer before it asks again, send one compressed server streams, batches,
forks, conversations that are resumed, released and abandoned, prompts that are compacted, requests with settings of
their own, wrong ones, hang-ups, aborts and flushes. All of SGLang's memory checks are on: they end the server at the
first slot or row that is lost or owned twice. `--census` adds the check of this package before and after every round.

At the end the server drains. The exit status is 1 unless

- every request was answered as it should have been, and no request is left in the server's main process;
- the pool is whole again once the cache has been flushed, and before that holds nothing but idle conversations;
- no process has more open files than at the start, but for a few, and no new series of metrics appear in the second
  half;
- the memory of each process is flat: over the last two thirds of the run it grows by less than FLAT_MB per hour, or
  the 95 % interval of its slope contains zero. The first third fills pools, tables and caches of bounded size. Later,
  an allocator still grows now and then by a step of some MB; one such step near an end of ten minutes looks like 10 to
  20 MB per hour, so FLAT_MB lies above that. `kB_per_request` sets the slope in relation to the load.

Runs of less than JUDGED_MINUTES say what memory did, but do not judge it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import requests

from benchmarks.common import print_table, write
from benchmarks.serving import soak_load, soak_watch
from benchmarks.serving.servers import VOCABULARY, prepared_model, serving
from benchmarks.serving.soak_load import Diary, Visitor
from benchmarks.serving.soak_watch import Watch
from server import MEMORY_CHECKS, Server, exit_on_signals

CLIENTS = 4
POOL, ROWS = 1536, 12
FLAT_MB, JUDGED_MINUTES = 30.0, 5.0
FEW_FILES = 16
DRAIN_S, EXIT_S = 120, 30
DRAWN = 120
KEPT = ("used", "kv_available", "kv_evictable", "series")


def server_args(stats: str) -> list[str]:
    sizes = {"budget": soak_load.BUDGET, "interval": soak_load.INTERVAL, "recent": soak_load.RECENT}
    args = ["--enable-triattention", "--triattention-stats", stats, "--enable-metrics", "--sleep-on-idle"]
    for name, value in {**sizes, "conversation-ttl": soak_load.LIVES_S}.items():
        args += [f"--triattention-{name}", str(value)]
    for name, value in {"max-total-tokens": POOL, "max-running-requests": ROWS, "chunked-prefill-size": 128}.items():
        args += [f"--{name}", str(value)]
    return args


@dataclass
class Soak:
    """One run.

    Attributes:
        start, drained, flushed: books before, after everything has ended, and with an empty cache.
        left: requests that the main process still knew when it was asked to exit; None if it did not say.
    """

    diary: Diary
    watch: Watch
    start: dict
    drained: dict
    flushed: dict
    left: int | None = None


def run(server: Server, seconds: float, every_s: float) -> Soak:
    """Lets clients at the server, then drains it."""
    # The first requests of a server import and allocate what stays.
    Visitor(server.url, VOCABULARY, Diary(), -1).stream()
    _flush(server.url)
    diary = Diary()
    watch = Watch(server.url, server.pid, diary.begun, every_s)
    start = watch.sample()
    watch.start()
    clients = [threading.Thread(target=_visit, args=(server.url, diary, n, seconds, watch)) for n in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    watch.end()
    if watch.failure:
        raise SystemExit(f"{watch.failure}\n{server.log_tail()}")
    _drain(server.url)
    drained = watch.sample()
    _flush(server.url)
    return Soak(diary, watch, start, drained, watch.sample())


def _visit(url: str, diary: Diary, seed: int, seconds: float, watch: Watch) -> None:
    visitor = Visitor(url, VOCABULARY, diary, seed)
    while time.monotonic() - diary.begun < seconds and watch.failure is None:
        visitor.act()


def _drain(url: str) -> None:
    """Waits until nothing runs: requests whose client hung up end a little later."""
    deadline = time.monotonic() + DRAIN_S
    while (now := soak_watch.books(url))["running"] or now["waiting"]:
        if time.monotonic() > deadline:
            raise SystemExit(f"Requests still run {DRAIN_S} s after the last client left: {now}")
        time.sleep(0.2)


def _flush(url: str) -> None:
    requests.post(f"{url}/flush_cache?timeout=60", timeout=120).raise_for_status()


def requests_left(server: Server) -> int | None:
    """Asks the server to exit. Returns how many requests it still waits for, or None if it does not say."""
    os.kill(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + EXIT_S
    while time.monotonic() < deadline:
        found = re.search(r"Remaining number of requests (\d+)", server.log_tail(200))
        if found:
            return int(found[1])
        time.sleep(0.2)
    return None


def memory_rows(watch: Watch, requests_per_hour: float) -> list[dict]:
    """One row for each process: memory at the start of what is judged and at the end, in MB, and the slope."""
    samples = watch.samples[len(watch.samples) // 3 :]
    seconds = [sample["seconds"] for sample in samples]
    rows = []
    for name in watch.processes:
        values = [sample[f"{name} MB"] for sample in samples]
        fit = soak_watch.slope(seconds, values)
        flat = fit["per_hour"] < FLAT_MB or fit["low"] <= 0
        rows.append({
            "process": name, "from_MB": values[0], "to_MB": values[-1],
            **{f"MB_{key}": value for key, value in fit.items()},
            "kB_per_request": 1e3 * fit["per_hour"] / requests_per_hour, "flat": flat,
        })  # fmt: skip
    return rows


def faults(soak: Soak, memory: list[dict], judged: bool) -> list[str]:
    """What is wrong, as sentences."""
    found = list(soak.diary.faults)
    if soak.left != 0:
        found.append(f"the main process still knows {soak.left} requests after all have ended")
    if soak.flushed["used"] != soak.start["used"]:
        found.append(f"{soak.flushed['used']} slots are in use with an empty cache, {soak.start['used']} at the start")
    for name in soak.watch.processes:
        before, after = (sample[f"{name} files"] for sample in (soak.start, soak.flushed))
        if after > before + FEW_FILES:
            found.append(f"{name} has {after} open files, {before} at the start")
    if judged:
        samples = soak.watch.samples
        series = [sample["series"] for sample in (samples[len(samples) // 2], samples[-1])]
        if series[1] > series[0]:
            found.append(f"/metrics grows: {series[1]} series, {series[0]} halfway")
        found += [
            f"{row['process']} grows by {row['MB_per_hour']:.1f} MB per hour" for row in memory if not row["flat"]
        ]
    return found


def latency_rows(diary: Diary, parts: int) -> list[dict]:
    """Milliseconds of streams in equal parts of the run."""
    end = max(at for at, _, _ in diary.latencies) + 1e-9
    rows = []
    for part in range(parts):
        own = [entry for entry in diary.latencies if int(parts * entry[0] / end) == part]
        gaps = sorted(1e3 * gap for _, _, times in own for gap in times)
        if gaps:
            rows.append({
                "from_s": round(end * part / parts),
                "streams": len(own),
                "ttft_p50_ms": statistics.median(1e3 * first for _, first, _ in own),
                "itl_p50_ms": statistics.median(gaps),
                "itl_p99_ms": gaps[int(0.99 * (len(gaps) - 1))],
            })  # fmt: skip
    return rows


def thinned(samples: list[dict]) -> list[dict]:
    """At most DRAWN samples, evenly: for the picture, not for the judgement."""
    step = -(-len(samples) // DRAWN)
    return samples[::step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="about 40 seconds with the server's start")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--census", action="store_true", help="check the books before and after every round, too")
    parser.add_argument("--model", help="served with random token ids; by default a tiny random model")
    parser.add_argument("--stats", help="its statistics")
    options = parser.parse_args()
    minutes = 0.3 if options.quick else options.minutes
    env = MEMORY_CHECKS | ({"SGLANG_TRIATTN_CHECK": "1"} if options.census else {})
    with (
        prepared_model(options.model, options.stats) as (model, stats),
        TemporaryDirectory() as logs,
        serving(model, server_args(stats), Path(logs) / "server.log", env) as server,
    ):
        soak = run(server, 60 * minutes, 0.5 if options.quick else 1.0)
        soak.left = requests_left(server)
    memory = memory_rows(soak.watch, 60 * soak.diary.done.total() / minutes)
    judged = minutes >= JUDGED_MINUTES
    found = faults(soak, memory, judged)
    diary, last = soak.diary, soak.watch.samples[-1]
    latencies = latency_rows(diary, 3 if options.quick else 20)
    counts = {**diary.done, "tokens": diary.tokens, **{f"turns {key}": n for key, n in diary.starts.items()}}
    counts |= {key: last[key] for key in ("rounds", "evicted_tokens", "freed_slots", "pressure_rounds")}
    for rows in (memory, latencies, [{"what": key, "number": value} for key, value in sorted(counts.items())]):
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    at = {"start": soak.start, "drained": soak.drained, "flushed": soak.flushed}
    held = {name: {key: sample[key] for key in KEPT} for name, sample in at.items()}
    setting = {
        "model": options.model or "tiny random Llama", "minutes": minutes, "clients": CLIENTS, "pool": POOL,
        "budget": soak_load.BUDGET, "interval": soak_load.INTERVAL, "census": options.census, "judged": judged,
        "flat_MB_per_hour": FLAT_MB,
    }  # fmt: skip
    results = {"setting": setting, "faults": found, "memory": memory, "latencies": latencies, "counts": counts}
    write({**results, "books": held, "samples": thinned(soak.watch.samples)}, options.json, options.quick)
    if found:
        raise SystemExit("\n".join(["Not as it should be:", *found[:20]]))
    print("Everything was answered, and all books are back" + ("; memory is flat." if judged else "."))


if __name__ == "__main__":
    exit_on_signals()
    main()
