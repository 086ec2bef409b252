"""A random MiMo-V2 that repeats itself, with the layers that draft for it, one token each, and the account of them.

Each layer sees a window of the row. At a token's place it reads the target's hidden state of that token, and one of the
tokens after it: the first layer the next one, the second layer the one after that, and so on. What is not known yet
is what the layers before have drafted. Nothing here uses the project's code, see `draft_account`.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
import transformers
from safetensors.torch import load_file, save_file

from families import FAMILIES, WINDOW, build_family, config_of
from harness import STEPS
from repeating_model import make_repeating
from tiny_model import TinyModel

FAMILY = "mimo-v2"
LAYERED = "mimo-v2-mtp"
LAYERS = FAMILIES[FAMILY].settings["num_hidden_layers"]
NOISE = 1.8
"""Factor of what the layers add to the token that they pass on, so that some of their drafts fail."""


def build_layered(folder: Path) -> TinyModel:
    """Writes the model with its draft layers. Nothing has written its statistics yet."""
    tiny = build_family(folder, FAMILY)
    make_repeating(tiny)
    torch.manual_seed(5)
    config = _deeper()
    size = config.hidden_size
    added = {}
    with TemporaryDirectory() as deeper:
        # transformers writes the names of the published checkpoints.
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, value in model.named_parameters():
            if name.endswith("sinks"):
                # SGLang holds them in bfloat16.
                value.data = torch.randn_like(value).bfloat16().float()
        model.save_pretrained(deeper)
        for name, weight in load_file(Path(deeper) / "model.safetensors").items():
            number, _, part = name.removeprefix("model.layers.").partition(".")
            if number.isdigit() and int(number) >= LAYERS:
                loud = weight * NOISE if "o_proj" in name or "down_proj" in name else weight
                part = part.replace("post_attention_layernorm", "pre_mlp_layernorm")
                added[f"{_published(int(number) - LAYERS)}{part}"] = loud
    for number in range(STEPS):
        mix = torch.cat((torch.eye(size), 0.12 * NOISE * torch.randn(size, size)), -1)
        norms = {f"{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "final_layernorm")}
        added |= {f"{_published(number)}{name}": each for name, each in {"eh_proj.weight": mix, **norms}.items()}
    file = tiny.path / "model.safetensors"
    save_file({**load_file(file), **added}, file, metadata={"format": "pt"})
    return tiny


def _published(number: int) -> str:
    return f"model.mtp.layers.{number}."


def _deeper() -> transformers.PreTrainedConfig:
    config = copy.deepcopy(config_of(FAMILY))
    config.num_hidden_layers = LAYERS + STEPS
    config.layer_types = [*config.layer_types, *["sliding_attention"] * STEPS]
    config.mlp_layer_types = [*config.mlp_layer_types, *["dense"] * STEPS]
    return config


class DraftLayers(Protocol):
    """
    Attributes:
        chained: whether a layer reads what the one before has made of a token, in place of the target's hidden state.
    """

    chained: bool

    def run(self, number: int, embeds: torch.Tensor, hidden: torch.Tensor, first: int) -> torch.Tensor:
        """[n, size]: what layer `number` makes of these tokens, [n, size], from place `first` on."""
        ...

    def logits(self, number: int, made: torch.Tensor) -> torch.Tensor:
        """[vocabulary]: by what it has made of one token."""
        ...


class Layers:
    """The draft layers, with SGLang's order of their parts (sglang/srt/models/mimo_v2_nextn.py)."""

    chained = False

    def __init__(self, path: Path, head: torch.nn.Module) -> None:
        self.head = head
        weights, config = load_file(path / "model.safetensors"), _deeper()
        with TemporaryDirectory() as folder:
            renamed = {}
            for name, weight in weights.items():
                for number in range(STEPS):
                    name = name.replace(_published(number), f"model.layers.{LAYERS + number}.")
                renamed[name.replace("pre_mlp_layernorm", "post_attention_layernorm")] = weight
            save_file(renamed, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(folder)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        self.decoders, self.rotary = model.model.layers[LAYERS:], model.model.rotary_emb
        self.mixes = [weights[f"{_published(number)}eh_proj.weight"] for number in range(STEPS)]
        # Those of a new model change nothing, as the added ones.
        self.norm = type(model.model.norm)(config.hidden_size, config.rms_norm_eps)

    def run(self, number: int, embeds: torch.Tensor, hidden: torch.Tensor, first: int) -> torch.Tensor:
        stream = (torch.cat((self.norm(embeds), self.norm(hidden)), -1) @ self.mixes[number].T)[None]
        return through(self.decoders[number], self.rotary, stream, first)

    def logits(self, number: int, made: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(made))


def through(decoder: torch.nn.Module, rotary: torch.nn.Module, stream: torch.Tensor, first: int) -> torch.Tensor:
    """[n, size]: what a layer of transformers with a window makes of `stream`, [1, n, size], from place `first` on."""
    places = torch.arange(first, first + stream.shape[1])
    distance = places[:, None] - places
    # SGLang lets a query see one token more than transformers does.
    seen = (distance >= 0) & (distance <= WINDOW)
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    turned = rotary(stream, places[None], "sliding_attention")
    return decoder(stream, attention_mask=mask, position_embeddings=turned)[0]


@torch.no_grad()
def holding_of_layers(
    layers: DraftLayers, target: Any, ids: list[int], hidden: torch.Tensor, starts: list[int], margin: float
) -> list[int | None]:
    """As `draft_account.holding_of_head`, for a layer to each drafted token.

    A place that a layer has computed stays as it is, also where it read a drafted token that did not hold.
    """
    embed = target.model.embed_tokens
    inputs = [[0] * len(ids) for _ in range(STEPS)]
    # What the first layer reads, and what each layer has made.
    states = [hidden, *(torch.zeros(len(ids), hidden.shape[-1]) for _ in range(STEPS))]
    found: list[int | None] = []
    for before, start in pairwise([0, *starts]):
        drafted: list[int] = []
        held: int | None = 0
        for number in range(STEPS):
            for place in range(before, start):
                known = place + 1 + number
                inputs[number][place] = ids[known] if known <= start else drafted[known - start - 1]
            first = max(before - WINDOW, 0)
            read = states[number if layers.chained else 0]
            embeds = embed(torch.tensor(inputs[number][first:start]))
            made = layers.run(number, embeds, read[first:start], first)
            states[number + 1][before:start] = made[before - first :]
            best = layers.logits(number, made[-1]).log_softmax(-1).topk(2)
            drafted.append(int(best.indices[0]))
            if held is not None and held == number and start + held + 1 < len(ids):
                if best.values[0] - best.values[1] < margin:
                    held = None
                elif drafted[-1] == ids[start + held + 1]:
                    held += 1
        found.append(held)
    return found
