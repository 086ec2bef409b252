"""Shared by the server tests: a tiny model, its statistics, and a client of a real server with every check on."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from server import MEMORY_CHECKS, Server
from tiny_model import VOCABULARY, TinyModel


def own_core() -> int:
    """The core for this test process's servers; test processes that run side by side have different ones."""
    cores = sorted(os.sched_getaffinity(0))
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return cores[-1 - int(worker) % len(cores)]


def two_cores(ranks: int = 2) -> dict[str, str]:
    """The environment in which ranks run on two cores by turns, each on one."""
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[-(rank % 2)]) for rank in range(ranks))}


def cores_for(flags: Sequence[str]) -> dict[str, str]:
    """The environment of a server with these flags: `two_cores` if it has ranks or stages."""
    return two_cores() if {"--tp-size", "--pp-size"}.intersection(flags) else {}


def unused_architectures(*used: str) -> str:
    """All of SGLang's modules of models but these: importing them is a sixth of a start."""
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    modules = {path.stem for path in (Path(package) / "srt" / "models").glob("*.py")}
    return ",".join(sorted(modules - set(used)))


ON_GPU = torch.accelerator.is_available()
# Servers of the tests compute in float32. On GPUs, of SGLang's attention backends Triton's alone does, exactly if asked
# to, and of its other operations those in plain torch.
GPU_ENV = {"TRITON_F32_DEFAULT": "ieee", "SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}
GPU_ARGS = ("--attention-backend", "triton", "--sampling-backend", "pytorch")
# CUDA graphs of so many requests and tokens are enough, and captured in seconds.
GPU_ARGS += ("--cuda-graph-max-bs-decode", "32", "--cuda-graph-max-bs-prefill", "256")

# What computes the attention of models of which SGLang's own backends for CPUs leave something out.
REFERENCE = "triton" if ON_GPU else "torch_reference"


def only_models(*modules: str) -> dict[str, str]:
    """The environment of a server of models in these of SGLang's modules alone."""
    return {"SGLANG_DISABLED_MODEL_ARCHS": unused_architectures(*modules)}


# SGLang's own checks of its books, and the census.
STRICT = {
    **MEMORY_CHECKS,
    "SGLANG_TRIATTN_CHECK": "1",
    "SGLANG_DISABLED_MODEL_ARCHS": unused_architectures("glm4", "llama"),
    # Otherwise a query of /health takes a second. `Client.assert_alive` checks whether the scheduler is alive.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # One thread per server: two threads that spin for one another are many times slower on a busy machine.
    "SGLANG_CPU_OMP_THREADS_BIND": str(own_core()),
    **(GPU_ENV if ON_GPU else {}),
}
BUDGET, INTERVAL, RECENT = 64, 32, 16
POOL = 6144
# More than any test sends at once; by default SGLang fills a table for 2,048 with zeros at each start.
MOST_REQUESTS = 256
# Equal tokens have equal values in the first layer: where it is scored, or where chance decides what is computed
# together, the last bits of sums would decide which of them stay.
KEYS_ALONE = ("--triattention-value-share", "0")
# Groups of one rank with batches of their own.
TWO_GROUPS = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
STAGES = ("--pp-size", "2")
# Tokens that a draft model drafts in a step, one after another.
STEPS = 3
DRAFTS = (
    *("--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", str(STEPS + 1)),
)


def plain_args() -> list[str]:
    """Arguments of a server of the tiny model without compression. Requests are token ids, so it needs no tokenizer."""
    args = ["--skip-tokenizer-init", "--dtype", "float32", "--max-total-tokens", str(POOL), "--sleep-on-idle"]
    args += ["--max-running-requests", str(MOST_REQUESTS), "--random-seed", "1"]
    return [*args, *(GPU_ARGS if ON_GPU else ())]


def compressed_args(tiny: TinyModel, *more: str) -> list[str]:
    args = ["--enable-triattention", "--triattention-stats", str(tiny.stats)]
    for name, value in (("budget", BUDGET), ("interval", INTERVAL), ("recent", RECENT)):
        args += [f"--triattention-{name}", str(value)]
    return [*plain_args(), *args, "--enable-metrics", "--decode-log-interval", "20", *more]


def greedy(tokens: int, **sampling: Any) -> dict[str, Any]:
    """Sampling parameters for `tokens` tokens: greedy and past the end-of-text token, unless overridden."""
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **sampling}


class Client:
    """Requests to one server, by token ids."""

    def __init__(self, server: Server) -> None:
        self.url = server.url
        self.server = server

    def post(self, path: str, **body: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=600)

    def generate(
        self, ids: list[int], tokens: int, *, logprobs: bool = False, lora: str | None = None, **sampling: Any
    ) -> dict[str, Any]:
        """One greedy request that ignores the end-of-text token, unless `sampling` says otherwise."""
        return self._generate(ids, greedy(tokens, **sampling), logprobs, lora)

    def generate_all(
        self, prompts: list[list[int]], tokens: int, *, logprobs: bool = False, **sampling: Any
    ) -> list[dict[str, Any]]:
        """Sends all prompts at once, so that the server batches them."""
        return self.generate_each([(ids, greedy(tokens, **sampling)) for ids in prompts], logprobs=logprobs)

    def generate_each(
        self, asked: list[tuple[list[int], dict[str, Any]]], *, logprobs: bool = False
    ) -> list[dict[str, Any]]:
        """Sends prompts, each with its sampling parameters, in one HTTP request, so that they arrive together."""
        return self._generate([ids for ids, _ in asked], [sampling for _, sampling in asked], logprobs, None)

    def _generate(self, ids: list, sampling: Any, logprobs: bool, lora: str | None) -> Any:
        response = self.post(
            "/generate",
            input_ids=ids,
            sampling_params=sampling,
            return_logprob=logprobs,
            top_logprobs_num=5 if logprobs else 0,
            lora_path=lora,
        )
        assert response.status_code == 200, response.text
        return response.json()

    def totals(self) -> dict[str, Any]:
        """`triattention` of the scheduler's internal state."""
        return self._internal_state()["triattention"]

    def setting(self, name: str) -> Any:
        """One of SGLang's settings, as the launch resolved it."""
        return self._info()[name]

    def rounds_by_rank(self) -> list[int]:
        """Rounds so far in each replica or group of ranks, in any order."""
        return [state["triattention"]["rounds"] for state in self._info()["internal_states"]]

    def _internal_state(self) -> dict[str, Any]:
        return self._info()["internal_states"][0]

    def _info(self) -> dict[str, Any]:
        return requests.get(self.url + "/server_info", timeout=60).json()

    def slots_in_use(self) -> int:
        """KV slots that are neither free nor evictable from the tree."""
        loads = requests.get(self.url + "/v1/loads?include=core", timeout=60).json()["loads"]
        return sum(load["num_used_tokens"] for load in loads)

    def wait_for_slots(self, most: int = 0, wait_s: int = 10) -> None:
        """Waits until no more than `most` slots are in use: SGLang sends an answer's last token before it frees any."""
        deadline = time.monotonic() + wait_s
        while (used := self.slots_in_use()) > most:
            assert time.monotonic() < deadline, f"{used} slots are still in use"
            time.sleep(0.1)

    def flush(self, wait_s: int = 30) -> None:
        """Waits until the server is idle, then flushes: SGLang sends an answer's last token one step before that."""
        response = requests.post(f"{self.url}/flush_cache?timeout={wait_s}", timeout=60)
        assert response.status_code == 200, response.text

    def assert_alive(self) -> None:
        """The strict checks end the scheduler, and with it the server, if the books do not balance."""
        try:
            # An idle scheduler checks its books between two queries.
            self._internal_state()
            self._internal_state()
        except requests.RequestException as error:
            raise AssertionError(self.server.log_tail()) from error
        assert self.server.process.poll() is None, self.server.log_tail()


def assert_pool_is_whole(client: Client) -> None:
    """An idle server with an empty tree must have every slot of its pool free; its strict idle check agrees."""
    client.flush()
    client.assert_alive()
    assert client.slots_in_use() == 0


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def compression(response: dict[str, Any]) -> dict[str, int]:
    return response["meta_info"]["triattention"]


def served_logprobs(response: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, 5]: the served top log-probabilities, and [tokens, 5]: their token ids."""
    top = response["meta_info"]["output_top_logprobs"]
    values = torch.tensor([[entry[0] for entry in step] for step in top])
    tokens = torch.tensor([[entry[1] for entry in step] for step in top])
    return values, tokens


def altered_stats(tiny: TinyModel, path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Writes the tiny model's statistics to `path`, after `change` has altered the tensors by their names."""
    with safe_open(tiny.stats, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(tiny.stats)
    change(tensors)
    save_file(tensors, path, metadata)
    return path


def install_plugin(folder: Path, name: str, source: str) -> None:
    """Makes `folder`, once on PYTHONPATH, an installed SGLang plugin: a module `name` with an `activate` function."""
    info = folder / f"triattn_{name}-0.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: triattn-{name}\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\ntriattn_{name} = {name}:activate\n")
    (folder / f"{name}.py").write_text(source)


# A plugin for `install_plugin`.
SABOTAGE = """
import multiprocessing, sys

def activate():
    # In spawned children alone the plugin's scheduler part cannot be imported.
    if multiprocessing.parent_process() is not None:
        sys.modules["sglang_triattn.patches.compression"] = None
"""


def python_path(*folders: Path) -> str:
    """PYTHONPATH with `folders` at the front."""
    old = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([old] if old else [])])


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
