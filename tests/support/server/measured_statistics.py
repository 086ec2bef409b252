"""What servers of `families` measure at launch, held to what transformers measures and to the models' own queries."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import harness
from families import WINDOW
from family_servers import LATENTS, SEE_ONE_MORE
from gemma4_family import VARIANTS
from oracle import Oracle
from sglang_triattn.calibration.job import CalibrationJob
from sglang_triattn.calibration.texts import read_windows
from sglang_triattn.calibration.transformers_engine import calibrate, run_job
from sglang_triattn.stats.file import load_stats
from sglang_triattn.stats.query_stats import QueryStats
from tiny_model import TinyModel
from word_tokenizer import text, word_tokenizer

TOKENS, TEXT_WINDOW = 900, 300
LOOKUP_JOB = CalibrationJob(
    windows=(tuple(harness.prompt(1, 300)),),
    lookup_texts=(tuple(harness.prompt(2, 140)), tuple(harness.prompt(3, 140))),
    lookup_request=(5, 6, 7),
)
# Windows and traces.
RANKS_JOB = CalibrationJob(
    windows=(tuple(harness.prompt(4, 300)), tuple(harness.prompt(5, 300))),
    prompts=(tuple(harness.prompt(6, 20)), tuple(harness.prompt(7, 30))),
    trace_tokens=24,
    temperature=0.0,
)
MEANS = ("mean", "abs_mean", "unrotated_mean")
CLOSE = 1e-3
"""Largest difference of two means, as a share of the second one's norm."""

WINDOWED, ALL = (1, 3), (0, 1, 2, 3)
# The scored layers, and those of them that have RoPE.
BY_TRANSFORMERS = {
    "gemma2": (WINDOWED, WINDOWED),
    "gemma3": (WINDOWED, WINDOWED),
    "olmo3": (WINDOWED, WINDOWED),
    "gpt-oss": (WINDOWED, WINDOWED),
    "mimo-v2": ((0, 5), (0, 5)),
    "mellum": (WINDOWED, WINDOWED),
    "laguna": (WINDOWED, WINDOWED),
    "exaone4": (WINDOWED, ()),
    "cohere2": (WINDOWED, ()),
    "smollm3": (ALL, (0, 1, 2)),
    "seed-oss": (ALL, ALL),
    "hunyuan": (ALL, ALL),
    "dots1": (ALL, ALL),
    "qwen3-next": ((3,), (3,)),
    "qwen3.5": (WINDOWED, WINDOWED),
    "lfm2": (WINDOWED, WINDOWED),
    "falcon-h1": (ALL, ALL),
    "granite-4-h": (WINDOWED, ()),
    "nemotron-h": ((1, 4), ()),
    "deepseek-v3": (ALL, ALL),
    "glm-4.7-flash": (ALL, ALL),
    **dict.fromkeys(VARIANTS, (WINDOWED, WINDOWED)),
}
# Which layers' queries meet the keys of the second scored layer.
READERS = {"gemma-4": (3,), "gemma-4-shared": (3, 4, 6), "step-3.5": (3,)}
MEASURED = (*BY_TRANSFORMERS, "step-3.5")

# Measures a text of the test's in place of the package's, which is 20 times as long and of words that the tests'
# tokenizer does not know.
_OWN_TEXT = """
import json
import os

from sglang_triattn.calibration.job import CalibrationJob
from sglang_triattn.patches.calibration import stats_source


def own_text(scheduler, weighed):
    with open(os.environ["MEASURED_JOB"]) as file:
        job = json.load(file)
    return CalibrationJob(**job if weighed else {**job, "lookup_texts": ()})


def activate():
    stats_source.launch_job = own_text
"""
# Lets every pass absorb queries, where a prefill would expand keys.
_ABSORBING = """
def absorb(self, forward_batch):
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    return AttnForwardMethod.MLA

def activate():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    attention = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA"
    HookRegistry.register(f"{attention}.dispatch_attn_forward_method", absorb, HookType.REPLACE)
"""


def measuring(folder: Path, *, absorbs: bool = False, job: CalibrationJob | None = None) -> dict[str, str]:
    """The environment in which a server that measures at launch measures the text of `write_text`.

    Args:
        absorbs: whether latents meet absorbed queries in a prefill too.
        job: what it measures instead.
    """
    plugins = [("own_text", _OWN_TEXT)] + ([("absorbing", _ABSORBING)] if absorbs else [])
    for name, source in plugins:
        harness.install_plugin(folder / name, name, source)
    file = folder / "job.json"
    if job is None:
        read = read_windows([str(write_text(folder))], word_tokenizer(), max_tokens=TOKENS, window=TEXT_WINDOW)
        job = CalibrationJob(windows=read)
    file.write_text(json.dumps(asdict(job)))
    return {
        "PYTHONPATH": harness.python_path(*(folder / name for name, _ in plugins)),
        "MEASURED_JOB": str(file),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def write_text(folder: Path) -> Path:
    file = folder / "text.txt"
    file.write_text(text(0, TOKENS))
    return file


def assert_ranks_measure_as_one(
    start: Callable[..., harness.Client],
    stop: Callable[[harness.Client], None],
    flags: Sequence[str],
    budget: int,
    folder: Path,
) -> None:
    """Holds what ranks, stages or a server of a language model alone measure at launch, and keep, to what one rank of
    the whole model does.

    Args:
        start: starts a server with the flags and the `env` that it is given.
        flags: those of several ranks, or of the language model alone.
        budget: tokens that a round keeps.
    """
    found = []
    for more in (flags, ()):
        # Enough for ranks in groups and stages.
        env = {**harness.two_cores(ranks=4), **measuring(folder / str(len(more)), job=RANKS_JOB)}
        client = start(*more, "--triattention-stats", "auto", env=env)
        (file,) = Path(env["XDG_CACHE_HOME"], "sglang-triattn", "statistics").glob("*.safetensors")
        assert client.totals()["stats"] == str(file)
        answer = client.generate(harness.prompt(5, 9), budget + harness.INTERVAL + 2)
        assert harness.compression(answer)["rounds"] == 1
        found.append(load_stats(file))
        stop(client)
    parts, whole = found
    assert (parts.layers, parts.token_count) == (whole.layers, whole.token_count)
    assert (parts.mean - whole.mean).abs().max() < 0.02 * whole.abs_mean.max()


def assert_measured_right(client: harness.Client, model: TinyModel, account: Oracle, family: str, folder: Path) -> Path:
    """Holds what a server of `measuring(folder)` has measured to the other accounts of it; returns its file."""
    file = Path(client.totals()["stats"])
    assert file.parent == folder / "cache" / "sglang-triattn" / "statistics"
    measured = load_stats(file)
    assert measured.token_count == TOKENS
    found = [measured]
    if family in BY_TRANSFORMERS:
        expected = by_transformers(model, family, folder)
        found.append(expected)
        assert_equal_statistics(measured, expected, family)
    if family in READERS:
        for stats in found:
            assert_of_own_queries(stats, account, family)
    return file


def by_transformers(model: TinyModel, family: str, folder: Path) -> QueryStats:
    """What calibration with transformers measures on the same text."""
    if not (model.path / "tokenizer.json").exists():
        word_tokenizer().save_pretrained(model.path)
    if family in SEE_ONE_MORE:
        widen(model.path)
    return calibrate(str(model.path), str(folder / "text.txt"), window=TEXT_WINDOW, device="cpu", progress=False)


def looked_up(
    client: harness.Client, model: TinyModel, family: str, job: CalibrationJob
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The look-up weights that a server of `measuring(job=...)` fits, and those that transformers does."""
    if family in SEE_ONE_MORE:
        widen(model.path)
    expected = run_job(str(model.path), job, device="cpu", dtype="float32", progress=False)
    return load_stats(Path(client.totals()["stats"])).lookups, expected.lookups


def widen(folder: Path) -> None:
    """Lets a model see the one token more in transformers that it sees in SGLang."""
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "sliding_window": WINDOW + 1}))


def assert_equal_statistics(measured: QueryStats, expected: QueryStats, family: str) -> None:
    layers, turning = BY_TRANSFORMERS[family]
    for stats in (measured, expected):
        assert (stats.layers, stats.token_count) == (layers, TOKENS)
        assert tuple(layer for layer, rotates in zip(layers, stats.rotates, strict=True) if rotates) == turning
        if family in LATENTS:
            assert (stats.num_kv_heads, stats.head_dim, stats.rotary_start) == (1, 56, 40)
            assert (stats.rope.style, stats.rope.rotary_dim) == ("interleaved", 16)
    if family in LATENTS:
        torch.testing.assert_close(measured.rope.inv_freq, expected.rope.inv_freq, rtol=1e-5, atol=0)
        # The heads differ: those of the next one differ by more than all of them.
        other = expected.unrotated_mean.roll(1, dims=1)
        assert (measured.unrotated_mean - other).norm() > expected.unrotated_mean.norm()
    for name in MEANS:
        assert_close(getattr(measured, name), getattr(expected, name), name)


def assert_close(one: torch.Tensor, other: torch.Tensor, name: str) -> None:
    assert (one - other).norm() <= CLOSE * other.norm(), name


def assert_of_own_queries(stats: QueryStats, account: Oracle, family: str) -> None:
    """Holds statistics to the queries that leave the model's own norms, before their rotation."""
    queries = normed_queries(account, (1, *READERS[family]))
    assert (stats.layers, stats.rotates) == ((1, 3), (True, True))
    if family in VARIANTS:
        assert (stats.num_kv_heads, stats.head_dim, stats.rope.rotary_dim) == (2, 64, 64)
        assert stats.rope.inv_freq.count_nonzero() == 8
    pairs = stats.rope.inv_freq.numel()
    turning = torch.complex(queries[..., :pairs], queries[..., pairs : 2 * pairs])
    expected = (turning.mean(1), turning.abs().mean(1), queries[..., 2 * pairs :].mean(1))
    for name, each in zip(MEANS, expected, strict=True):
        # Layers that read the same keys count as one.
        assert_close(getattr(stats, name), torch.stack([each[0], each[1:].mean(0)]), name)


@torch.no_grad()
def normed_queries(account: Oracle, layers: Sequence[int]) -> torch.Tensor:
    """[layers, tokens, H_q, D] float64: the queries before their rotation, on the text that was measured."""
    ids = word_tokenizer()(text(0, TOKENS))["input_ids"]
    seen: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    hooks = []
    for layer in layers:
        norm = account.model.model.layers[layer].self_attn.q_norm
        keep = lambda module, given, query, layer=layer: seen[layer].append(query[0].double())  # noqa: E731
        hooks.append(norm.register_forward_hook(keep))
    # As SGLang, which lets a query of some models see one token more.
    account.model.config.sliding_window = account.window
    for start in range(0, TOKENS, TEXT_WINDOW):
        account.model(input_ids=torch.tensor([ids[start : start + TEXT_WINDOW]]))
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.cat(parts) for parts in seen.values()])
