"""Servers for the tests: started once per set of arguments, a few of them kept running for the whole session."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import pytest

import forked_servers
import harness
import step_probe
from disaggregated_servers import Pairs
from server import PortTaken, Server
from tiny_model import TinyModel, build_tiny_model
from word_tokenizer import with_tokenizer

# A failed assertion in these says what it compared.
pytest.register_assert_rewrite("draft_pairs", "family_servers", "measured_statistics", "ngram_account", "plain_answers")
pytest.register_assert_rewrite("vision_servers")
# Each takes 1.3 GB of memory of its own, and there are two test processes.
KEPT_RUNNING = 4
# What SGLang does anyway with the tiny model: a server with these arguments is one without any.
NO_ARGUMENTS = ("--page-size", "1")


class Servers:
    """Running servers of the tiny model by their arguments; the least recently used one makes room for a new one.

    Most files use the one without arguments, which hence goes on until the end.
    """

    def __init__(self, forkserver: forked_servers.Forkserver, tiny: TinyModel, folder: Path) -> None:
        self._forkserver = forkserver
        self._tiny = tiny
        self._folder = folder
        self._running: OrderedDict[tuple, tuple[harness.Client, ExitStack]] = OrderedDict()
        self._started = 0
        # By server: the file of tests that asked for it last.
        self._files: dict[tuple, str] = {}

    def __call__(
        self,
        *args: str,
        env: dict[str, str] | None = None,
        compressed: bool = True,
        model: TinyModel | None = None,
        tokenizer: bool = False,
    ) -> harness.Client:
        """The Client of a server with every memory check on, whose tree holds nothing of another file's tests: a prompt
        that it knew would be computed in another batch, and its last bits would differ.

        Args:
            args: added to the usual arguments.
            env: added to the environment.
            compressed: whether to compress.
            model: the model to serve instead of the tiny model.
            tokenizer: whether the model has a tokenizer, so that requests may be texts.
        """
        model = model or self._tiny
        args = () if args == NO_ARGUMENTS and model is self._tiny else args
        key = (args, tuple(sorted((env or {}).items())), compressed, model, tokenizer)
        if key not in self._running:
            plain = ((), (), True, self._tiny, False)
            while len(self._running) >= KEPT_RUNNING:
                self._stop(next(other for other in self._running if other != plain))
            self._running[key] = self._start(args, env or {}, compressed, model, tokenizer)
        self._running.move_to_end(key)
        client, _ = self._running[key]
        client.assert_alive()
        file = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
        if self._files.setdefault(key, file) != file:
            client.flush()
            self._files[key] = file
        return client

    def _start(self, args, env, compressed, model, tokenizer) -> tuple[harness.Client, ExitStack]:
        full = harness.compressed_args(model, *args) if compressed else [*harness.plain_args(), *args]
        if tokenizer:
            full.remove("--skip-tokenizer-init")
        self._started += 1
        log = self._folder / f"server-{self._started}.log"
        stack = ExitStack()

        def start() -> Server:
            running = forked_servers.running_server(self._forkserver, model.path, full, {**harness.STRICT, **env}, log)
            return stack.enter_context(running)

        try:
            return harness.Client(start()), stack
        except PortTaken:
            # SGLang's processes draw ports, too.
            return harness.Client(start()), stack

    def _stop(self, key: tuple) -> None:
        client, stack = self._running.pop(key)
        del self._files[key]
        try:
            client.assert_alive()
        finally:
            stack.close()

    def stop(self, client: harness.Client) -> None:
        """Ends this server now; for one that would keep a core busy while it waits."""
        self._stop(next(key for key, (running, _) in self._running.items() if running is client))

    def stop_all(self) -> None:
        for key in list(self._running):
            self._stop(key)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def forkserver(tmp_path_factory):
    env = {
        # Some models compile a few lines, which takes longer than everything else in a test.
        "TORCHDYNAMO_DISABLE": "1",
        # Where code that comes with a model is copied to.
        "HF_MODULES_CACHE": str(tmp_path_factory.mktemp("modules")),
    }
    found = forked_servers.Forkserver(env)
    yield found
    found.stop()


@pytest.fixture(scope="session")
def serve(forkserver, tiny, tmp_path_factory):
    """`serve(*args, **options)` returns the Client of a server with these arguments, see `Servers.__call__`."""
    servers = Servers(forkserver, tiny, tmp_path_factory.mktemp("logs"))
    yield servers
    servers.stop_all()


@pytest.fixture(scope="session")
def chat_model(tiny, tmp_path_factory):
    """The tiny model with a tokenizer and a chat template, see `word_tokenizer`."""
    return with_tokenizer(tiny, tmp_path_factory.mktemp("chat_model") / "model")


@pytest.fixture
def chat_client(serve, chat_model):
    """The Client of a compressing server that takes and returns text, and parses tool calls and reasoning."""
    parsers = ("--tool-call-parser", "qwen", "--reasoning-parser", "qwen3")
    return serve("--enable-cache-report", *parsers, model=chat_model, tokenizer=True)


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory):
    """`vision_model(family)` builds a model that takes images once, see `build_vision_model`."""
    from vision_families import build_vision_model

    return cache(partial(build_vision_model, tmp_path_factory.mktemp("vision")))


@pytest.fixture
def serve_pairs(forkserver, tmp_path):
    """`serve_pairs(*args, model=..., **options)` starts a prefill and a decode server, see `Pairs.__call__`."""
    found = Pairs(forkserver, tmp_path)
    yield found
    found.stop_all()


@pytest.fixture(scope="session")
def probed(serve, tmp_path_factory):
    """`probed(*args, **options)`, as `serve`, returns a Client and a function that returns what the probe wrote since
    the last one."""
    return probing(serve, tmp_path_factory.mktemp("probe"))


@pytest.fixture
def probed_pairs(serve_pairs, tmp_path):
    """`probed_pairs(*args, model=..., **options)`, as `serve_pairs`, returns what `probed` does."""
    return probing(serve_pairs, tmp_path / "probe")


def probing(started: Callable, folder: Path) -> Callable:
    """Starts servers as `started` does, with the probe of steps, whose plugin and lines `folder` gets; `contents=True`
    lets it read the pool, too."""
    harness.install_plugin(folder, "probe", Path(step_probe.__file__).read_text())
    file = folder / "steps.jsonl"

    def start(*args: str, env: dict[str, str] | None = None, contents: bool = False, **options):
        probe = {"PYTHONPATH": harness.python_path(folder), "PROBE_FILE": str(file)}
        if contents:
            probe["PROBE_CONTENTS"] = "1"
        client = started(*args, env={**(env or {}), **probe}, **options)

        def steps():
            found = harness.read_lines(file)
            file.write_text("")
            return found

        return client, steps

    return start
