"""Models whose attention differs from a Llama's, against an account that masks each of their layers on its own."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from families import FAMILIES, WINDOW, build_family
from harness import BUDGET, INTERVAL, assert_pool_is_whole, compression, prompt, served_logprobs, unused_architectures
from nemotron_nas import WITHOUT_ATTENTION, build_nemotron_nas
from oracle import TOLERANCE, Oracle
from sglang_triattn.model.rope import Rope
from storm import FLAGS, RETRACTING, retractions, storm
from tiny_model import save_random_stats

RECENT = WINDOW + 1
SETTINGS = ["--triattention-recent", str(RECENT), "--triattention-budget", str(BUDGET + 16)]
WITHOUT_ROPE = {"exaone4": (1, 3), "cohere2": (1, 3), "smollm3": (3,)}
CASES = [
    ("gemma3", 1, "per-layer-head"),
    ("gemma3", 16, "shared-mean"),
    ("gemma2", 16, "per-layer-head"),
    ("gemma2", 1, "shared-mean"),
    ("olmo3", 1, "union"),
    ("olmo3", 64, "per-head"),
    ("exaone4", 16, "per-layer-head"),
    ("cohere2", 1, "shared-mean"),
    ("smollm3", 16, "per-layer-head"),
    ("seed-oss", 16, "per-layer-head"),
    ("dots1", 1, "shared-mean"),
    ("nemotron-nas", 16, "per-layer-head"),
]


def rope_of(model: torch.nn.Module, family: str) -> Rope:
    """The rotation in the layers without a window."""
    rotary = model.model.rotary_emb
    frequencies = getattr(rotary, "full_attention_inv_freq", None)
    frequencies = (rotary.inv_freq if frequencies is None else frequencies).double()
    return Rope(frequencies, 1.0, 2 * frequencies.numel(), "interleaved" if family == "cohere2" else "half")


def prepared(folder, family):
    """The model with statistics, and the account of it."""
    tiny = build_nemotron_nas(folder) if family == "nemotron-nas" else build_family(folder, family)
    model = tiny.load()
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    layers = tuple(number for number, kind in enumerate(kinds) if kind == "full_attention")
    if family == "nemotron-nas":
        layers = tuple(number for number in layers if number != WITHOUT_ATTENTION)
    rope = rope_of(model, family)
    rotates = tuple(number not in WITHOUT_ROPE.get(family, ()) for number in layers)
    save_random_stats(tiny, rope, layers, rotates)
    stats = load_file(tiny.stats)
    account = Oracle(
        model=model,
        mean=torch.complex(stats["mean_re"], stats["mean_im"]),
        abs_mean=stats["abs_mean"],
        inv_freq=rope.inv_freq,
        num_kv_heads=tiny.num_kv_heads,
        budget=BUDGET + 16,
        interval=INTERVAL,
        recent=RECENT,
        unrotated=stats["unrotated_mean"],
        interleaved=rope.style == "interleaved",
        scored=layers,
        rotates=rotates,
        # SGLang lets Command-A see one token more than transformers does.
        window=WINDOW + (family == "cohere2"),
    )
    return tiny, account


def started(serve, tiny, family, *flags, env=None):
    more = [] if family == "gemma2" else ["--attention-backend", "torch_reference"]
    if family == "nemotron-nas":
        used = ["nemotron_nas", "llama"]
        more += ["--trust-remote-code"]
    else:
        used = [FAMILIES[family].module]
    env = {
        "SGLANG_DISABLED_MODEL_ARCHS": unused_architectures(*used),
        "TORCHDYNAMO_DISABLE": "1",
        "HF_MODULES_CACHE": str(tiny.path / "modules"),
        **(env or {}),
    }
    return serve(*SETTINGS, *more, *flags, env=env, model=tiny)


@pytest.mark.parametrize(("family", "page_size", "selection"), CASES)
def test_logits_equal_a_forward_pass_masked_by_layer(serve, tmp_path, family, page_size, selection):
    """Prevents window layers from seeing tokens across a gap that a round has made, or others than the newest; their
    keys from being scored; and K/V that they still read from being moved."""
    tiny, account = prepared(tmp_path, family)
    account.selection = selection
    tokens = 280
    if page_size > 16:
        # Kept besides the newest tokens is at least the rest of the page in which they begin; a round frees a page.
        account.budget, account.interval = RECENT + page_size - 1, page_size
        tokens = 450
    client = started(serve, tiny, family, "--page-size", str(page_size), "--triattention-selection", selection)
    stem = prompt(8, 40)
    prompts = [stem + prompt(20 + i, length) for i, length in enumerate((3, 24))]
    client.generate(stem, 1)
    for ids, response in zip(prompts, client.generate_all(prompts, tokens, logprobs=True), strict=True):
        report = compression(response)
        frozen = len(ids) - len(ids) % page_size
        assert report["frozen_length"] == max(frozen, 4)
        everything = ids + response["output_ids"][:-1]
        expected, rounds = account.logprobs(everything, len(ids), report["frozen_length"])
        assert report["rounds"] == rounds >= 5
        values, top = served_logprobs(response)
        assert (expected.gather(1, top) - values).abs().max() < TOLERANCE
        dense, _ = Oracle(**{**vars(account), "budget": 10_000}).logprobs(everything, len(ids), frozen)
        assert (dense.gather(1, top) - values).abs().max() > 50 * TOLERANCE
    assert_pool_is_whole(client)
    serve.stop(client)


def test_storm_on_a_model_with_windows(serve, tmp_path):
    """Prevents leaks and hangs where rounds must evict whole pages, and a conversation's next turn out of order."""
    tiny, account = prepared(tmp_path, "gemma3")
    client = started(serve, tiny, "gemma3", "--page-size", "16", "--max-total-tokens", "1024", *FLAGS, env=RETRACTING)
    _, finished = storm(client, 1, 80, (WINDOW, account.budget), 1500, conversations=6)
    assert len(finished) > 40
    assert retractions(finished) > 3
    assert client.totals()["rounds"] > 30
    assert_pool_is_whole(client)
    serve.stop(client)
