"""Write the tables of docs/conformance.md, from a run of benchmarks.conformance and tools/conformance_kits.py and
conformance_failures.py.

python tools/conformance_table.py            writes them
python tools/conformance_table.py --check    fails if what stands there is stale
"""

import json
from collections.abc import Iterator
from typing import Any

import conformance_kits as kits
from checkout import ROOT
from conformance_failures import FAILURES
from documents import DOCS, generated, write_generated

FILE = DOCS / "conformance.md"
NAME = "conformance_table"
RESULTS = ROOT / "benchmarks" / "results" / "conformance.json"
SERVERS = ("plain", "not reached", "small")
HEADER = "| plain | never reached | small budget |"
PASSED = "passed"


def results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())


def failures(run: dict[str, Any]) -> dict[tuple[str, str], list[str]]:
    """By case and test: the servers that it does not pass on."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in run["cases"]:
        for server in SERVERS:
            for test, words in case["servers"][server]["tests"].items():
                if words != PASSED:
                    found.setdefault((case["case"], test), []).append(server)
    return found


def lines() -> Iterator[str]:
    """The tables in Markdown."""
    run = results()
    yield from _source(run)
    yield from _cases(run)
    yield from _failures(run)
    yield from _left_out()


def _source(run: dict[str, Any]) -> Iterator[str]:
    machine, versions = run["machine"], run["versions"]
    date = run["date"].partition("T")[0]
    yield f"\nRun of {date}: {machine['cpu']}, {machine['cores']} cores, GPU: {machine['gpu']}; SGLang "
    yield f"{versions['sglang']}, torch {versions['torch']}.\n"


def _cases(run: dict[str, Any]) -> Iterator[str]:
    yield f"\n**Run: passed of all tests**\n\n| tests | model | settings that differ {HEADER} compaction rounds |\n"
    yield "|---|---|---|---|---|---|---|\n"
    total = dict.fromkeys(SERVERS, 0)
    count = 0
    for case in run["cases"]:
        servers = case["servers"]
        cells = []
        for server in SERVERS:
            tests = servers[server]["tests"]
            passed = sum(words == PASSED for words in tests.values())
            total[server] += passed
            cells.append(f"{passed} of {len(tests)}")
        count += len(servers["plain"]["tests"])
        settings = ", ".join(f"`{name}={value}`" for name, value in case["settings"].items())
        model = kits.LAUNCHES[case["launch"]].model
        row = [_named(case["case"]), model, settings, *cells, f"{servers['small']['rounds']:,}"]
        yield f"| {' | '.join(row)} |\n"
    sums = " | ".join(f"{total[server]} of {count}" for server in SERVERS)
    rounds = sum(case["servers"]["small"]["rounds"] for case in run["cases"])
    yield f"| all | | | {sums} | {rounds:,} |\n"


def _failures(run: dict[str, Any]) -> Iterator[str]:
    yield f"\n**Not passed, and why**\n\n| test {HEADER} why |\n|---|---|---|---|---|\n"
    for (case, test), servers in failures(run).items():
        cells = " | ".join("fails" if server in servers else "passes" for server in SERVERS)
        yield f"| {_named(case)}: `{test}` | {cells} | {FAILURES[case][test]} |\n"


def _left_out() -> Iterator[str]:
    yield "\n**Not run, and why**\n\n| tests | reason |\n|---|---|\n"
    for case in kits.CASES:
        for test, reason in case.left_out.items():
            yield f"| {_named(case.name)}: `{test}` | {reason} |\n"
    for kit, reason in kits.NOT_RUN.items():
        yield f"| {_named(kit.removeprefix('kits.'))} | {reason} |\n"
    for reason, modules in kits.OTHER_MODULES.items():
        yield f"| {', '.join(f'`{name}`' for name in modules)} | {reason} |\n"
    yield "\n"


def _named(name: str) -> str:
    code, found, note = name.partition(" (")
    return f"`{code}`" + (f" ({note}" if found else "")


def is_stale() -> bool:
    return generated(FILE, NAME)[1] != "".join(lines())


def main() -> None:
    write_generated(FILE, NAME, "".join(lines()), "SGLang's tests")


if __name__ == "__main__":
    main()
