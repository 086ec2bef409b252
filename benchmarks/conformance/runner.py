"""Does a compressing server pass the tests that SGLang ships, wherever plain SGLang does?

python -m benchmarks.conformance --json benchmarks/results/conformance.json
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

import conformance_kits as kits
import prepare_model
from benchmarks import common
from benchmarks.serving.client import compression_of
from env import cache_root, fail
from server import MEMORY_CHECKS, ServerError, running_server
from tiny_model import build_tiny_model

CASE_S = 600
"""Limit of one case; past it, the server is ended, and with it every request that a test waits for."""
SERVERS = {
    "plain": (),
    "not reached": ("--triattention-budget", "8192"),
    "small": ("--triattention-budget", "32", "--triattention-interval", "16", "--triattention-recent", "8"),
}
COMMON = ("--dtype", "float32", "--max-total-tokens", "32768", "--random-seed", "1", "--enable-cache-report")
PASSED, BALANCED, NOT_STARTED = "passed", "balanced", "the server did not start"
NOTHING = {"rounds": 0, "evicted_tokens": 0, "seconds": 0}


@dataclass(frozen=True)
class Target:
    """What tests need to know of a running server."""

    url: str
    model: str
    process: Any
    reference: Callable[[list[str]], dict[str, str]]
    """Greedy texts of plain SGLang by prompt."""


class Reference:
    """Greedy texts of plain SGLang, as the first server gave them."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def of(self, url: str, plain: bool) -> Callable[[list[str]], dict[str, str]]:
        from sglang.test.kits.spec_server_kits import _greedy

        def texts(prompts: list[str]) -> dict[str, str]:
            if plain:
                self._texts |= {prompt: _greedy(url, prompt) for prompt in prompts}
            if not self._texts:
                raise unittest.SkipTest("no plain server ran before")
            return self._texts

        return texts


def case_class(case: kits.Case, target: Target) -> type[unittest.TestCase]:
    """The kit with what it expects, as a class of tests."""
    bases: list[type] = []
    if case.adapter:
        bases.append(getattr(importlib.import_module("benchmarks.conformance.cases"), case.adapter))
    if case.kit.count(".") == 2:
        module, _, name = f"sglang.test.{case.kit}".rpartition(".")
        source = importlib.import_module(module)
        if hasattr(source, "_REQUEST_TIMEOUT"):
            source._REQUEST_TIMEOUT = CASE_S
        bases.append(getattr(source, name))
    given = {"base_url": target.url, "model": target.model, "process": target.process, "api_key": "none"}
    given["reference"] = staticmethod(target.reference)
    return type(case.name, (*bases, unittest.TestCase), {**given, **case.settings})


def run_case(case: kits.Case, target: Target) -> dict[str, str]:
    """By test: "passed", "skipped: ..." or the first line of what failed."""
    tests = case_class(case, target)
    names = unittest.TestLoader().getTestCaseNames(tests)
    assert set(case.left_out) <= set(names), f"{case.name} leaves out a test that it does not have"
    chosen = [name for name in names if name not in case.left_out]
    results = unittest.TestResult()
    unittest.TestSuite(map(tests, chosen)).run(results)
    outcome = dict.fromkeys(chosen, PASSED)
    wrong = [(test, f"skipped: {reason}") for test, reason in results.skipped]
    wrong += [(test, _first_line(trace, target)) for test, trace in [*results.failures, *results.errors]]
    for test, words in wrong:
        # What fails before the first test is every test's.
        outcome |= dict.fromkeys([_name(test)] if _name(test) in outcome else chosen, words)
    return outcome


def _name(test: Any) -> str:
    while isinstance(test, unittest.case._SubTest):
        test = test.test_case
    return getattr(test, "_testMethodName", str(test))


def _first_line(trace: str, target: Target) -> str:
    """The exception in one line, the first after the last frame, without this machine's paths and ports."""
    lines = trace.replace(target.model, "MODEL").replace(target.url, "URL").splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    words = next((line for line in lines[frames[-1] + 1 if frames else 0 :] if line), trace)
    return " ".join(words[:200].split())


@contextlib.contextmanager
def limited(target: Target) -> Iterator[None]:
    """Ends the server, and raises TimeoutError, when `CASE_S` seconds have passed."""

    def stop(*_: object) -> None:
        target.process.kill()
        raise TimeoutError(f"more than {CASE_S} s")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(CASE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def counters(url: str) -> dict[str, int]:
    """Rounds and evicted tokens since the start; zeros on plain SGLang."""
    found = compression_of(url)
    return {name: found.get(name, 0) for name in ("rounds", "evicted_tokens")}


def books(url: str) -> str:
    """ "" if the idle server has every slot of its pool free, else what is wrong. SGLang's own checks run meanwhile."""
    try:
        flushed = requests.post(f"{url}/flush_cache?timeout=60", timeout=120)
        if flushed.status_code != 200:
            return f"the cache could not be flushed: {flushed.text.strip()[:80]}"
        counters(url)
        loads = requests.get(f"{url}/v1/loads?include=core", timeout=60).json()["loads"]
    except requests.RequestException:
        return "the server has ended"
    used = sum(load["num_used_tokens"] for load in loads)
    return f"{used} slots are lost" if used else ""


def run_on(case: kits.Case, target: Target) -> dict[str, Any]:
    """Results of the tests, what compression did meanwhile, and whether the books balance afterwards."""
    before, start = counters(target.url), time.monotonic()
    tests = run_case(case, target)
    wrong = books(target.url)
    if wrong:
        return {"tests": tests, "books": wrong, **NOTHING}
    after = counters(target.url)
    did = {name: after[name] - before[name] for name in after}
    return {"tests": tests, "books": BALANCED, **did, "seconds": round(time.monotonic() - start)}


def print_results(server: str, case: kits.Case, found: dict[str, Any]) -> None:
    """One line for each case, and one for each test that it does not pass."""
    passed = sum(words == PASSED for words in found["tests"].values())
    counts = f"{passed} of {len(found['tests'])} passed, {found['rounds']} rounds, {found['seconds']} s"
    wrong = "" if found["books"] == BALANCED else f", {found['books']}"
    print(f"{server:12} {case.name}: {counts}{wrong}", flush=True)
    for test, words in found["tests"].items():
        if words != PASSED:
            print(f"{'':14}{test}: {words}", flush=True)


@dataclass(frozen=True)
class Model:
    path: Path
    stats: Path


def models(folder: Path) -> dict[str, Model]:
    """The models of `kits.LAUNCHES`; both have SmolLM2's tokenizer, its chat template, and as many tokens."""
    smollm = Model(*prepare_model.prepare())
    vocabulary = json.loads((smollm.path / "config.json").read_text())["vocab_size"]
    tiny = build_tiny_model(folder, vocabulary=vocabulary)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm.path / name, tiny.path)
    return {"smollm2": smollm, "random": Model(tiny.path, tiny.stats)}


def arguments(name: str, launch: str, model: Model) -> list[str]:
    """Of the server `name` of SERVERS, as `kits.LAUNCHES` starts it."""
    args = [*COMMON, *kits.LAUNCHES[launch].args, *SERVERS[name]]
    return [*args, "--enable-triattention", "--triattention-stats", str(model.stats)] if SERVERS[name] else args


def run_launch(
    name: str, launch: str, cases: list[kits.Case], model: Model, reference: Reference, log: Path
) -> Iterator[tuple[kits.Case, dict[str, Any]]]:
    """Runs the cases on one server, or on several, where one has ended."""
    # One thread, as in the tests: two that spin for one another are many times slower on a busy machine.
    env = {"SGLANG_TRIATTN_CHECK": "1", "SGLANG_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0)))}
    env |= {**MEMORY_CHECKS, **kits.LAUNCHES[launch].env}
    waiting, starts, tests = list(cases), 0, log / "conformance-tests.log"
    while waiting:
        starts += 1
        path = log / f"conformance-{name.replace(' ', '-')}-{launch}-{starts}.log"
        try:
            with running_server(model.path, arguments(name, launch, model), env, path) as server:
                while waiting:
                    case = waiting.pop(0)
                    texts = reference.of(server.url, name == "plain")
                    target = Target(server.url, str(model.path), server.process, texts)
                    with tests.open("a") as output, contextlib.redirect_stdout(output), limited(target):
                        found = run_on(case, target)
                    yield case, found
                    if found["books"] != BALANCED:
                        break
        except ServerError as error:
            print(error, flush=True)
            for case in waiting:
                yield case, {"tests": {"launch": NOT_STARTED}, "books": NOT_STARTED, **NOTHING}
            return


def run(names: list[str], chosen: list[kits.Case], folder: Path) -> Iterator[list[dict[str, Any]]]:
    """After each server, the results so far of all cases, in their order; `folder` is for a model."""
    served = models(folder)
    log = cache_root() / "logs"
    reference = Reference()
    results: dict[str, dict[str, Any]] = {case.name: {} for case in chosen}
    for name in names:
        for launch in kits.LAUNCHES:
            cases, model = [case for case in chosen if case.launch == launch], served[kits.LAUNCHES[launch].model]
            for case, found in run_launch(name, launch, cases, model, reference, log):
                print_results(name, case, found)
                results[case.name][name] = found
        yield [
            {"case": case.name, "launch": case.launch, "settings": dict(case.settings), "servers": results[case.name]}
            for case in chosen
        ]


def repeated(earlier: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The earlier cases with what was found now in place of what was found then."""
    now = {case["case"]: case for case in found}
    pairs = [(case, now.pop(case["case"], case)) for case in earlier]
    return [*({**new, "servers": old["servers"] | new["servers"]} for old, new in pairs), *now.values()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", help="also write the results to this file, in which a part replaces its own")
    parser.add_argument("--quick", action="store_true", help="a few cases, on the server with the small budget")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--server", choices=SERVERS, help="only this server")
    options = parser.parse_args()
    names = [options.server] if options.server else ["small"] if options.quick else list(SERVERS)
    chosen = [case for case in kits.CASES if options.only in case.name and (case.quick or not options.quick)]
    if not chosen:
        fail(f"no case is named {options.only!r}: see CASES in tools/conformance_kits.py.")
    for number in (signal.SIGTERM, signal.SIGHUP):
        # KeyboardInterrupt, because unittest takes anything else for a failed test.
        signal.signal(number, signal.default_int_handler)
    started = time.monotonic()
    servers = {name: " ".join([*COMMON, *SERVERS[name]]) for name in names}
    earlier: list[dict[str, Any]] = []
    if (options.only or options.server) and options.json and Path(options.json).exists():
        content = json.loads(Path(options.json).read_text())
        servers, earlier = content["servers"] | servers, content["cases"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            for found in run(names, chosen, Path(folder)):
                common.write({"servers": servers, "cases": repeated(earlier, found)}, options.json, options.quick)
    except KeyboardInterrupt:
        fail("interrupted; nothing is left running.")
    print(f"{len(chosen)} cases on {len(names)} servers in {time.monotonic() - started:.0f} s")
