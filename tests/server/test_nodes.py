"""Two nodes of one server, here two launches on one machine: both compress, or both end with one sentence."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import forked_servers
import server
from harness import STRICT, Client, altered_stats, compressed_args, compression, plain_args, prompt, two_cores
from launches import Ended

NODES = ("--tp-size", "2", "--nnodes", "2", "--page-size", "1")
LONGEST_S = 120


class Pair:
    """Two nodes; `first` and `second` are lists of words for each."""

    def __init__(self, forkserver, folder: Path, model: Path, *flags: list[str]) -> None:
        self._stack = ExitStack()
        self.ports = [server.free_port() for _ in flags]
        address = f"127.0.0.1:{server.free_port()}"
        self.logs = [folder / f"node-{rank}.log" for rank in range(len(flags))]
        self.processes = []
        cores = two_cores()["SGLANG_CPU_OMP_THREADS_BIND"]
        for rank, words in enumerate(flags):
            command = server.launch_command(model, self.ports[rank], [*words, *NODES])
            command += ["--node-rank", str(rank), "--dist-init-addr", address]
            env = {**STRICT, "SGLANG_CPU_OMP_THREADS_BIND": cores}
            launch = forked_servers.running_process(
                forkserver, command[command.index("-m") + 1 :], env, self.logs[rank]
            )
            self.processes.append(self._stack.enter_context(launch))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stack.close()

    def ended(self) -> list[Ended]:
        deadline = time.monotonic() + LONGEST_S
        for process, log in zip(self.processes, self.logs, strict=True):
            while process.poll() is None:
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.05)
        return [
            Ended(process.returncode, log.read_text()) for process, log in zip(self.processes, self.logs, strict=True)
        ]

    def errors(self) -> list[str]:
        """The sentence of each node, once both have ended with status 2 and without a traceback."""
        ended = self.ended()
        for one in ended:
            assert one.code == 2, one.output[-5000:]
            assert "Traceback" not in one.output, one.output[-5000:]
        return [one.error for one in ended]


@pytest.mark.wide
def test_two_nodes_compress(forkserver, tiny, tmp_path):
    """Prevents nodes that take each other for ones with other settings, where only the path of the statistics
    differs."""
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(tiny.stats.read_bytes())
    words = compressed_args(tiny)
    with Pair(forkserver, tmp_path, tiny.path, words, [*words, "--triattention-stats", str(copy)]) as pair:
        running = server.Server(pair.processes[0], pair.ports[0], pair.logs[0])
        server.wait_until_healthy(running, LONGEST_S)
        assert compression(Client(running).generate(prompt(1, 20), 250))["rounds"] == 5


@pytest.mark.parametrize("refusing", [1, pytest.param(0, marks=pytest.mark.wide)])
def test_a_node_that_refuses_its_command_line(forkserver, tiny, tmp_path, refusing):
    """Prevents a node from waiting half an hour for one that has refused and ended."""
    flags = [compressed_args(tiny), compressed_args(tiny)]
    flags[refusing] += ["--triattention-stats", "missing.safetensors"]
    with Pair(forkserver, tmp_path, tiny.path, *flags) as pair:
        errors = pair.errors()
    assert errors[refusing].startswith("Statistics file missing.safetensors does not exist")
    assert errors[1 - refusing] == f"Node {refusing} of this launch refused to start: {errors[refusing]}"


@pytest.fixture(scope="module")
def other_stats(tiny, tmp_path_factory):
    """Statistics that fit the tiny model as well."""
    path = tmp_path_factory.mktemp("stats") / "other.safetensors"
    return altered_stats(tiny, path, lambda tensors: tensors["abs_mean"].mul_(1.5))


@pytest.mark.wide
@pytest.mark.parametrize("case", ["first is plain", "second is plain", "statistics", "budget"])
def test_nodes_that_were_asked_for_different_things(forkserver, tiny, other_stats, tmp_path, case):
    """Prevents ranks that wait for each other for ever, or that keep different tokens, where only one node compresses,
    or by other statistics or settings."""
    flags = [compressed_args(tiny), compressed_args(tiny)]
    if case == "first is plain":
        flags[0] = plain_args()
    elif case == "second is plain":
        flags[1] = plain_args()
    elif case == "statistics":
        flags[1] += ["--triattention-stats", str(other_stats)]
    else:
        flags[1] += ["--triattention-budget", "65"]
    with Pair(forkserver, tmp_path, tiny.path, *flags) as pair:
        for error in pair.errors():
            assert WORDS[case] in error


WORDS = {
    "first is plain": "Rank 1 compresses and rank 0, on another node, does not: give --enable-triattention",
    "second is plain": "Rank 0 compresses and rank 1, on another node, does not: give --enable-triattention",
    "statistics": "on another node, differ: give every node a copy of the same file with --triattention-stats.",
    "budget": "--triattention-budget is ",
}
