"""A part of SGLang's own tests against a small budget; `make conformance` runs all of them against three servers."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest

import conformance_kits as kits
from benchmarks.conformance import runner as conformance
from forked_servers import running_server
from harness import STRICT
from sets import wide

SHORT = {"basic_api_contract_kit.BasicAPIContractMixin", "cache_hit_kit"}
"""Cases without an answer that reaches the budget."""


@pytest.fixture(scope="module")
def launched(forkserver, tmp_path_factory):
    """`launched(launch)` returns the conformance.Target of a server, started at the first call."""
    folder = tmp_path_factory.mktemp("kits")
    served = conformance.models(folder)
    running: dict[str, conformance.Target] = {}
    with ExitStack() as stack:

        def start(launch: str) -> conformance.Target:
            if launch not in running:
                model, args = served[kits.LAUNCHES[launch].model], kits.LAUNCHES[launch]
                server = running_server(
                    forkserver,
                    model.path,
                    conformance.arguments("small", launch, model),
                    {**STRICT, **args.env},
                    folder / f"{launch}.log",
                )
                found = stack.enter_context(server)
                no_reference = conformance.Reference().of(found.url, plain=False)
                running[launch] = conformance.Target(found.url, str(model.path), found.process, no_reference)
            return running[launch]

        yield start


QUICK = [case for case in kits.CASES if case.quick]
# Other files of tests/server use every entrance, pause, abort and share prefixes, too. The trained model takes minutes.
LATER = (
    "basic_api_contract_kit.BasicAPIContractMixin",
    "abort_timeout_kit.AbortAllMixin",
    "pause_generation_kit.PauseResumeInPlaceMixin",
    "radix_cache_server_kit (100 nodes)",
    "radix_cache_server_kit (100 nodes, retracting)",
)
CASES = [wide(case) if case.launch == "text" or case.name in LATER else case for case in QUICK]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_every_server_must_do(launched, case):
    """Prevents a compressing server from failing what SGLang's own tests ask of every server, or losing slots then."""
    if "abort_all_sleep" in case.settings:
        # A slow machine may not come to a round in the seconds after which the kit aborts.
        case = replace(case, settings={**case.settings, "abort_all_sleep": 20})
    found = conformance.run_on(case, launched(case.launch))
    assert set(found["tests"].values()) == {conformance.PASSED}, found["tests"]
    assert found["books"] == "balanced"
    assert (found["rounds"] > 0) == (case.name not in SHORT)
