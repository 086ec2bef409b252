"""A prefill server, decode servers and SGLang's routers before them, on CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import server
from harness import KEYS_ALONE, STRICT, Client, compressed_args, plain_args
from run_router import running_router
from tiny_model import TinyModel
from warm import Forkserver, running_launch

TRANSFER = ("--disaggregation-transfer-backend", "process_memory")


class Separated(Client):
    """A client of a decode server whose requests to generate go through a router, by way of the prefill server.

    Attributes:
        prefill: a client of the prefill server.
    """

    def __init__(self, router: server.Server, prefill: Client, decode: Client) -> None:
        super().__init__(decode.server)
        self._router = Client(router)
        self.prefill = prefill

    def post(self, path: str, **body: Any) -> Any:
        return self._router.post(path, **body) if path == "/generate" else super().post(path, **body)


@contextmanager
def running_separated(
    forkserver: Forkserver,
    tiny: TinyModel,
    folder: Path,
    *args: str,
    compressed: Sequence[bool] = (True,),
    env: dict[str, str] | None = None,
) -> Iterator[list[Separated]]:
    """One prefill server, and a decode server for each of `compressed`, with a router of its own.

    What is compressed is chosen by keys alone.

    Args:
        args: for all servers.
        compressed: whether the decode servers compress; the prefill server does not.
        env: added to the environment of the decode servers.
    """
    bootstrap = str(server.free_port())
    common = [*args, *TRANSFER, "--disaggregation-bootstrap-port", bootstrap, "--disaggregation-mode"]
    with ExitStack() as stack:

        def start(name: str, given: list[str], more: dict[str, str]) -> Client:
            port = server.free_port()
            command = server.launch_command(tiny.path, port, given)
            log = folder / f"{name}.log"
            launch = running_launch(forkserver, command[command.index("-m") + 1 :], port, {**STRICT, **more}, log)
            return Client(stack.enter_context(launch))

        prefill = start("prefill", [*plain_args(), *common, "prefill"], {})
        found = []
        for number, compresses in enumerate(compressed):
            given = compressed_args(tiny, *KEYS_ALONE) if compresses else plain_args()
            decode = start(f"decode-{number}", [*given, *common, "decode"], env or {})
            routing = ["--pd-disaggregation", "--prefill", prefill.url, bootstrap, "--decode", decode.url]
            router = running_router([prefill.url, decode.url], folder / f"router-{number}.log", *routing)
            found.append(Separated(stack.enter_context(router), prefill, decode))
        yield found
