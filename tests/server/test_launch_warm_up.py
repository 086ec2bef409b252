"""A server that runs the kernels: warmed up before it is ready, refused if they cannot run."""

from __future__ import annotations

import forked_servers
from harness import (
    BUDGET,
    INTERVAL,
    STRICT,
    Client,
    assert_pool_is_whole,
    compressed_args,
    compression,
    install_plugin,
    only_models,
    prompt,
    python_path,
)

# As on a CUDA device. Triton's interpreter runs the kernels on a CPU; without it Triton finds no device for them.
KERNELS = """
def activate():
    from sglang_triattn.patches.rounds import rehearsal

    rehearsal.runs_kernels = lambda device: True
"""


# Triton's interpreter, where Triton has been imported without: kernels are looked at when they are defined, as are the
# functions of Triton's language that are kernels themselves.
INTERPRETED = """
import importlib
import os

os.environ["TRITON_INTERPRET"] = "1"
import triton.language as language
from triton.language import random, standard
from triton.runtime import JITFunction

for module in (standard, random):
    importlib.reload(module)
    for name, function in list(vars(language).items()):
        if isinstance(function, JITFunction) and hasattr(module, name):
            setattr(language, name, getattr(module, name))
"""


def test_kernels_that_cannot_run_end_the_launch(forkserver, tiny, tmp_path):
    """Prevents a server that starts, takes requests, and dies in its first round."""
    install_plugin(tmp_path, "kernels", KERNELS)
    words = ["--model-path", tiny.path, *compressed_args(tiny)]
    env = {**only_models("llama"), "PYTHONPATH": python_path(tmp_path)}
    ended = forked_servers.run_module(forkserver, ["sglang.launch_server", *words], env, tmp_path / "log")
    assert ended.code == 2
    assert "score_kernel.py, score failed" in ended.error
    assert "start without --enable-triattention" in ended.error
    assert "Traceback (most recent call last)" not in ended.output


def answer_of(client: Client) -> dict:
    answer = client.generate(prompt(1, 20), BUDGET + INTERVAL + 8)
    assert_pool_is_whole(client)
    return answer


def test_a_rehearsed_server_serves_as_any_other(serve, forkserver, tiny, tmp_path):
    """Prevents a warm-up that leaves traces in the pool or the rows, and kernels that keep other tokens than the
    references."""
    install_plugin(tmp_path, "kernels", INTERPRETED + KERNELS)
    expected = answer_of(serve())
    # The interpreter is slow on the long rows that a longer context would be warmed up with.
    args = compressed_args(tiny, "--context-length", "128")
    env = {**STRICT, "PYTHONPATH": python_path(tmp_path)}
    with forked_servers.running_server(forkserver, tiny.path, args, env, tmp_path / "log") as server:
        answer = answer_of(Client(server))
    assert compression(answer)["rounds"] > 0
    assert compression(answer) == compression(expected)
    assert answer["output_ids"] == expected["output_ids"]


def test_a_server_for_one_request_at_a_time(serve):
    """Prevents a launch that looks at the model with more rows than the server has."""
    client = serve("--max-running-requests", "1")
    assert compression(answer_of(client))["rounds"] > 0
    serve.stop(client)
