"""Models of `families` with statistics and an account, and servers of them that compress."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from decoder_families import INTERLEAVED
from families import FAMILIES, HEAD_DIM, WINDOW, build_family
from gemma3_family import build_gemma3
from gemma4_family import ASSISTED, TEXT_ALONE, VARIANTS, build_assisted, build_gemma4, build_gemma4_text
from harness import (
    BUDGET,
    INTERVAL,
    REFERENCE,
    Client,
    assert_pool_is_whole,
    compression,
    only_models,
    prompt,
    served_logprobs,
)
from latent_family import LATENT_FAMILIES, LatentOracle, build_latent, pool_rope
from layered_drafts import LAYERED, build_layered
from learned_family import LEARNED, LearnedOracle
from looped_family import build_looped
from mtp_family import DRAFTING, build_mtp
from nemotron_nas import WITHOUT_ATTENTION, build_nemotron_nas
from oracle import TOLERANCE, Oracle, means_of
from repeating_model import OTHERS, make_repeating
from sglang_triattn.model.rope import Rope, no_rotation
from state_family import build_whole_qwen
from state_settings import STATE_FAMILIES
from step_drafts import CHAINED, build_chained
from step_family import build_step
from stretched_family import build_stretched
from tiny_model import save_random_stats
from transformers_parts import full_frequencies

RECENT = WINDOW + 1
SETTINGS = ["--triattention-recent", str(RECENT), "--triattention-budget", str(BUDGET + 16)]
# SGLang lets a query of these see one token more than transformers does.
SEE_ONE_MORE = ("cohere2", "cohere2-moe", "exaone-moe", "gemma3n", "mimo-v2", LAYERED, "step-3.5", CHAINED)
# Models that bring their configuration along, and those in a class that takes images.
OWN_CODE = {
    "nemotron-nas": build_nemotron_nas,
    "step-3.5": build_step,
    LAYERED: build_layered,
    CHAINED: build_chained,
}
# The platform chooses its reference backend for these by itself; others it serves by torch_native.
CHOSEN_BY_ITSELF = ("gemma2", "gpt-oss", "deepseek-v3")
LATENTS = (*LATENT_FAMILIES, "deepseek-v3-mtp")
BUILDERS = {
    "qwen3.5-whole": build_whole_qwen,
    "gemma3-with-images": build_gemma3,
    **OWN_CODE,
    **{family: partial(build_latent, family=family) for family in LATENT_FAMILIES},
    **{family: partial(build_mtp, family=family) for family in DRAFTING},
    **{family: partial(build_gemma4, family=family) for family in VARIANTS},
    TEXT_ALONE: build_gemma4_text,
    ASSISTED: build_assisted,
    "nanbeige": build_looped,
    "dynamic-rope": build_stretched,
}
# SGLang's two ways of keeping states for its tree: of the last token alone, or of a place that it passes now and then,
# which goes with its overlap schedule, and with pages.
WITHOUT_BUFFER = ("--disable-overlap-schedule",)
WITH_BUFFER = ("--mamba-track-interval", "64")
WITH_LAZY_BUFFER = (*WITH_BUFFER, "--mamba-radix-cache-strategy", "extra_buffer_lazy")
# Otherwise SGLang takes a share of the machine's memory for states, and keeps the inputs of convolutions in bfloat16.
STATE_FLAGS = ("--max-mamba-cache-size", "192")
STATE_ENV = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
# No layer of these has a rotary embedding.
NEVER_ROTATED = ("granite-4-h", "nemotron-h", "kimi-linear", *LEARNED)
# How much more the layers of some must be turned down before they repeat themselves.
QUIETER = {"nemotron-h": 0.2}
MODULES = {
    "nemotron-nas": ("nemotron_nas", "llama"),
    "step-3.5": ("step3p5",),
    "glm-4.5-mtp": ("glm4_moe", "glm4_moe_nextn"),
    LAYERED: ("mimo_v2", "mimo_v2_nextn"),
    CHAINED: ("step3p5", "step3p5_mtp"),
    "deepseek-v3-mtp": ("deepseek_v2", "deepseek_nextn"),
    **dict.fromkeys(("qwen3-next-mtp", "qwen3-next-twice-mtp"), ("qwen3_next", "qwen3_next_mtp")),
    **dict.fromkeys(
        ("qwen3.5-mtp", "qwen3.5-whole-mtp", "qwen3.5-moe-whole-mtp"),
        ("qwen3_5_text", "qwen3_5", "qwen3_5_mtp", "qwen3_vl", "qwen3"),
    ),
    "qwen3.5-whole": ("qwen3_5", "qwen3_5_text", "qwen3_vl", "qwen3"),
    "gemma3-with-images": ("gemma3_mm", "gemma3_causal", "siglip"),
    **dict.fromkeys(VARIANTS, ("gemma4_mm",)),
    TEXT_ALONE: ("gemma4_causal",),
    ASSISTED: ("gemma4_mm", "gemma4_mtp"),
    "nanbeige": ("nanbeige",),
    "mistral-large": ("mistral_large_3", "deepseek_v2"),
}
WITHOUT_ROPE = {
    **dict.fromkeys(
        ("exaone4", "exaone-moe", "cohere2", "cohere2-moe", "afmoe", "granite-swa", "granite-moe-swa"), (1, 3)
    ),
    "smollm3": (3,),
}


def rope_of(model: torch.nn.Module, family: str) -> Rope:
    """The rotation in the layers without a window; of no dim where the model has none."""
    if family in NEVER_ROTATED:
        return no_rotation(getattr(model.config, "qk_rope_head_dim", HEAD_DIM))
    rotary = getattr(model.model, "rotary_emb", None) or model.model.pos_emb
    frequencies = full_frequencies(model.model)
    scaling = getattr(rotary, "full_attention_attention_scaling", getattr(rotary, "attention_scaling", 1.0))
    style = "interleaved" if family in ("cohere2", "deepseek-v2", *INTERLEAVED) else "half"
    return Rope(frequencies, scaling, 2 * frequencies.numel(), style)


def prepared(folder, family, *, repeating=False):
    """The model with statistics, and the account of it.

    Args:
        repeating: whether the model is to repeat itself, see `repeating_model`.
    """
    tiny = BUILDERS[family](folder) if family in BUILDERS else build_family(folder, family)
    if repeating:
        make_repeating(tiny, QUIETER.get(family, OTHERS))
    model = tiny.load()
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    layers = tuple(number for number, kind in enumerate(kinds) if kind in ("full_attention", "hybrid"))
    own = len(kinds) - (getattr(model.config, "num_kv_shared_layers", None) or 0)
    # Layers that read the KV of the last one before them that has some.
    reads = {number: max(layer for layer in layers if layer < own) for number in layers if number >= own}
    layers = tuple(number for number in layers if number < own)
    if family == "nemotron-nas":
        layers = tuple(number for number in layers if number != WITHOUT_ATTENTION)
    rope = rope_of(model, family)
    still = layers if family in NEVER_ROTATED else WITHOUT_ROPE.get(family, ())
    rotates = tuple(number not in still for number in layers)
    latent = family in LATENTS
    start = tiny.head_dim - rope.rotary_dim if latent else 0
    pairs = latent and not (family in FAMILIES and FAMILIES[family].latent_halves)
    save_random_stats(tiny, pool_rope(rope) if pairs else rope, layers, rotates, start)
    kind = LearnedOracle if family in LEARNED else LatentOracle if latent else Oracle
    account = kind(
        **means_of(tiny.stats),
        model=model,
        inv_freq=rope.inv_freq,
        num_kv_heads=tiny.num_kv_heads,
        budget=BUDGET + 16,
        interval=INTERVAL,
        recent=RECENT,
        interleaved=rope.style == "interleaved",
        scored=layers,
        rotates=rotates,
        window=0 if latent else WINDOW + (family in SEE_ONE_MORE),
        reads=reads,
        scaling=rope.attention_scaling,
        value_share=0.0 if latent else None,
    )
    return tiny, account


def modules_of(family: str) -> tuple[str, ...]:
    """SGLang's modules of the model."""
    return MODULES.get(family) or (FAMILIES[family].module,)


def remote_code(family: str) -> list[str]:
    """The flag of models that bring their configuration along."""
    own = family in OWN_CODE or (family in FAMILIES and FAMILIES[family].code)
    return ["--trust-remote-code"] if own else []


def started(serve, tiny, family, *flags, env=None, compressed=True, **options):
    """What `serve(..., **options)` returns for the model, compressed by default; `flags` and `env` come on top."""
    settings = SETTINGS if compressed else []
    more = [] if family in CHOSEN_BY_ITSELF else ["--attention-backend", REFERENCE]
    more += remote_code(family)
    if family.removesuffix("-mtp") in (*STATE_FAMILIES, "lfm2-moe", "qwen3.5-whole", "kimi-linear"):
        more += STATE_FLAGS
    env = {**only_models(*modules_of(family)), **STATE_ENV, **(env or {})}
    return serve(*settings, *more, *flags, env=env, model=tiny, compressed=compressed, **options)


def compare_with_account(
    serve,
    folder,
    family: str,
    page_size: int,
    selection: str,
    *flags: str,
    env: dict[str, str] | None = None,
    ranks: int = 1,
) -> list[dict[str, int]]:
    """Starts a server with random statistics and holds it to the model's account, see `hold_to_account`.

    Args:
        flags, env: of the server, in addition.
        ranks: with latent KV, how many tensor-parallel ranks choose for themselves.

    Returns:
        What compression reports of each request.
    """
    tiny, account = prepared(folder, family)
    account = under_flags(account, page_size, selection, flags)
    if family in LATENTS:
        account.num_kv_heads = ranks
    client = started(serve, tiny, family, *selecting(page_size, selection), *flags, env=env)
    reports = hold_to_account(client, account, page_size)
    serve.stop(client)
    return reports


def selecting(page_size: int, selection: str) -> tuple[str, ...]:
    return ("--page-size", str(page_size), "--triattention-selection", selection)


def under_flags(account: Oracle, page_size: int, selection: str, flags: tuple[str, ...]) -> Oracle:
    """The account of a server with these flags."""
    account = replace(account, selection=selection, overlap="--disable-overlap-schedule" not in flags)
    if "--triattention-value-share" in flags:
        account.value_share = float(flags[flags.index("--triattention-value-share") + 1])
    if "--triattention-recency" in flags:
        account.recency = float(flags[flags.index("--triattention-recency") + 1])
    if page_size > 16 and account.window:
        # A row also keeps at least the rest of the page in which its newest tokens begin; a round frees a page.
        account.budget, account.interval = RECENT + page_size - 1, page_size
    return account


def hold_to_account(client: Client, account: Oracle, page_size: int) -> list[dict[str, int]]:
    """Serves two requests with a shared prefix over at least five rounds, and holds them to the model's account.

    Returns:
        What compression reports of each.
    """
    tokens = 450 if account.interval > INTERVAL else 280
    stem = prompt(8, 40)
    prompts = [stem + prompt(20 + i, length) for i, length in enumerate((3, 24))]
    client.generate(stem, 1)
    reports = []
    for ids, response in zip(prompts, client.generate_all(prompts, tokens, logprobs=True), strict=True):
        report = compression(response)
        reports.append(report)
        frozen = len(ids) - len(ids) % page_size
        assert report["frozen_length"] == max(frozen, 4)
        everything = ids + response["output_ids"][:-1]
        expected, rounds = account.logprobs(everything, len(ids), report["frozen_length"])
        assert report["rounds"] == rounds >= 5
        values, top = served_logprobs(response)
        assert (expected.gather(1, top) - values).abs().max() < TOLERANCE
        dense, _ = replace(account, budget=10_000).logprobs(everything, len(ids), frozen)
        assert (dense.gather(1, top) - values).abs().max() > 50 * TOLERANCE
    assert_pool_is_whole(client)
    return reports
