"""Models of `families` with statistics and an account, and servers of them that compress."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from families import FAMILIES, WINDOW, build_family
from harness import BUDGET, INTERVAL, unused_architectures
from nemotron_nas import WITHOUT_ATTENTION, build_nemotron_nas
from oracle import Oracle
from sglang_triattn.model.rope import Rope
from tiny_model import save_random_stats

RECENT = WINDOW + 1
SETTINGS = ["--triattention-recent", str(RECENT), "--triattention-budget", str(BUDGET + 16)]
WITHOUT_ROPE = {"exaone4": (1, 3), "cohere2": (1, 3), "smollm3": (3,)}


def rope_of(model: torch.nn.Module, family: str) -> Rope:
    """The rotation in the layers without a window."""
    rotary = model.model.rotary_emb
    frequencies = getattr(rotary, "full_attention_inv_freq", None)
    frequencies = (rotary.inv_freq if frequencies is None else frequencies).double()
    scaling, style = getattr(rotary, "attention_scaling", 1.0), "interleaved" if family == "cohere2" else "half"
    return Rope(frequencies, scaling, 2 * frequencies.numel(), style)


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
