"""Ways of serving in which several servers stand behind SGLang's router, for modes.py.

Each yields the URL that takes requests, and those of the servers that decode them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from capacity import server_args
from run_router import SPREAD, running_router
from server import free_port
from serving import on_cores, serving

# Requests here wait for room, longer than the router and a decode server let them by default.
PATIENT = ("--request-timeout-secs", "3600")
PATIENTLY = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "3600", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "3600"}
# Between servers of one machine; on GPUs SGLang's default.
TRANSFER = () if torch.accelerator.is_available() else ("--disaggregation-transfer-backend", "process_memory")


def _on_gpu(number: int) -> tuple[str, ...]:
    """The flags of a server with a GPU of its own, where there are any."""
    return ("--base-gpu-id", str(number)) if torch.accelerator.is_available() else ()


@contextmanager
def prefill_and_decode(compressed: bool, model: str, stats: str, logs: Path) -> Iterator[tuple[str, list[str]]]:
    """A server that prefills and one that decodes, which compresses or not."""
    bootstrap = str(free_port())
    common = [*TRANSFER, "--disaggregation-bootstrap-port", bootstrap, "--disaggregation-mode"]
    with ExitStack() as stack:
        found = []
        for number, role in enumerate(("prefill", "decode")):
            args = [*server_args(compressed and role == "decode", stats), *common, role, *_on_gpu(number)]
            env = {**on_cores(number), **PATIENTLY}
            found.append(stack.enter_context(serving(model, args, logs / f"{role}.log", env)))
        prefill, decode = found
        routing = ["--pd-disaggregation", "--prefill", prefill.url, bootstrap, "--decode", decode.url, *PATIENT]
        router = stack.enter_context(running_router([prefill.url, decode.url], logs / "router.log", *routing))
        yield router.url, [decode.url]


@contextmanager
def replicas_behind_a_router(compressed: bool, model: str, stats: str, logs: Path) -> Iterator[tuple[str, list[str]]]:
    """Two servers, either of which a request may go to: where its prefix is, or else where there is less to do."""
    with ExitStack() as stack:
        urls = []
        for number in range(2):
            args = [*server_args(compressed, stats), *_on_gpu(number)]
            replica = serving(model, args, logs / f"replica-{number}.log", on_cores(number))
            urls.append(stack.enter_context(replica).url)
        router = stack.enter_context(running_router(urls, logs / "router.log", *SPREAD, *PATIENT))
        yield router.url, urls
