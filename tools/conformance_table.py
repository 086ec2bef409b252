"""Write the tables of docs/conformance.md, from a run of benchmarks.conformance and tools/conformance_kits.py and
conformance_failures.py.

python tools/conformance_table.py            writes them
python tools/conformance_table.py --check    fails if what stands there is stale
"""

import json
from collections.abc import Iterator, Mapping, Sequence
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
    """The tables in Markdown; the longer one is folded."""
    run = results()
    yield from _source(run)
    yield from _failures(run)
    yield "<details><summary>Run: passed of all tests</summary>\n\n"
    yield from _cases(run)
    yield "\n</details>\n\n"


def _source(run: dict[str, Any]) -> Iterator[str]:
    machine, versions = run["machine"], run["versions"]
    date = run["date"].partition("T")[0]
    yield f"\nRun of {date}: {machine['cpu']}, {machine['cores']} cores, GPU: {machine['gpu']}; SGLang "
    yield f"{versions['sglang']}, torch {versions['torch']}.\n"


def _cases(run: dict[str, Any]) -> Iterator[str]:
    yield f"| tests | model | settings that differ {HEADER} compaction rounds |\n|---|---|---|---|---|---|---|\n"
    for case in run["cases"]:
        counts = [_passed([case], server) for server in SERVERS]
        settings = ", ".join(f"`{name}={value}`" for name, value in case["settings"].items())
        model = kits.LAUNCHES[case["launch"]].model
        row = [_named(case["case"]), model, settings, *counts, f"{case['servers']['small']['rounds']:,}"]
        yield f"| {' | '.join(row)} |\n"
    sums = " | ".join(_passed(run["cases"], server) for server in SERVERS)
    rounds = sum(case["servers"]["small"]["rounds"] for case in run["cases"])
    yield f"| all | | | {sums} | {rounds:,} |\n"


def _passed(cases: list[dict[str, Any]], server: str) -> str:
    words = [words for case in cases for words in case["servers"][server]["tests"].values()]
    return f"{words.count(PASSED)}/{len(words)}"


def _failures(run: dict[str, Any]) -> Iterator[str]:
    yield f"\n**Not passed, and why**\n\n| test {HEADER} why |\n|---|---|---|---|---|\n"
    named: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for (case, test), servers in failures(run).items():
        found = ["fails" if server in servers else "passes" for server in SERVERS]
        named.setdefault((*found, FAILURES[case][test]), {}).setdefault(case, []).append(test)
    for cells, cases in named.items():
        yield f"| {_tests(cases)} | {' | '.join(cells)} |\n"
    sums = " | ".join(f"{_passed(run['cases'], server)} passed" for server in SERVERS)
    yield f"| all | {sums} | |\n\n"


def _tests(named: Mapping[str, Sequence[str]]) -> str:
    """Cases, each with these of its tests; without any, whole."""
    cells = [_named(case) + (": " if tests else "") + ", ".join(map(_named, tests)) for case, tests in named.items()]
    return ("; " if any(named.values()) else ", ").join(cells)


def _named(name: str) -> str:
    code, found, note = name.partition(" (")
    return f"`{code}`" + (f" ({note}" if found else "")


def is_stale() -> bool:
    return generated(FILE, NAME)[1] != "".join(lines())


def main() -> None:
    write_generated(FILE, NAME, "".join(lines()), "SGLang's tests")


if __name__ == "__main__":
    main()
