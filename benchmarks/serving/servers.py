"""Servers for the serving benchmarks: of the tiny random model in tools/, of a real model's shape, or of any other."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

import prepare_model
from benchmarks.decode.model import SHAPES, Shape
from server import running_server
from tiny_model import END, TinyModel, build_tiny_model, save_random_stats

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")
# As large as in real models, whose logits take a noticeable part of a decode step.
VOCABULARY = 32768
LONGEST = 131072
"""Tokens of context of a model that has only a shape."""
RANDOM_WEIGHTS = "random-weights"
"""A file in the folder of such a model: a name on a hub, or a folder with weights of any kind, is never served so."""


@contextmanager
def prepared_model(model: str | None, stats: str | None, architecture: str = "Llama"):
    """(model, statistics): those given, or a tiny model's of `architecture`, which live as long as the context."""
    if model is not None:
        yield model, stats or "auto"
        return
    with tempfile.TemporaryDirectory() as folder:
        tiny = build_tiny_model(Path(folder), vocabulary=VOCABULARY, architecture=architecture)
        write_tokenizer(tiny)
        yield str(tiny.path), str(tiny.stats)


@contextmanager
def shaped_model(name: str):
    """(model, statistics) in the shape `name` of SHAPES, which live as long as the context.

    It has no weights: `serving` has its servers make random ones.
    """
    with tempfile.TemporaryDirectory() as folder:
        shaped = build_shaped_model(Path(folder), SHAPES[name])
        write_tokenizer(shaped, SHAPES[name].vocabulary)
        yield str(shaped.path), str(shaped.stats)


def build_shaped_model(folder: Path, shape: Shape) -> TinyModel:
    """Writes a model's configuration and random statistics for it."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from sglang_triattn.model.rope import rope_of_transformers

    shaped = TinyModel(
        folder / shape.name, folder / "stats.safetensors", shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim
    )
    config = AutoConfig.for_model(
        "qwen3" if shape.norm_heads else "llama",
        architectures=["Qwen3ForCausalLM" if shape.norm_heads else "LlamaForCausalLM"],
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        rms_norm_eps=shape.epsilon,
        tie_word_embeddings=False,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
    )
    config.save_pretrained(shaped.path)
    (shaped.path / RANDOM_WEIGHTS).touch()
    save_random_stats(shaped, rope_of_transformers(LlamaRotaryEmbedding(config), config))
    return shaped


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The option of `asked_model` that takes the place of --model and --stats."""
    parser.add_argument("--shape", choices=SHAPES, help="instead: random weights and statistics in this model's shape")


def asked_model(options: argparse.Namespace):
    """The context of (model, statistics) for a command line with --shape, --model and --stats."""
    if options.shape:
        return shaped_model(options.shape)
    return prepared_model(options.model, options.stats)


def model_name(options: argparse.Namespace) -> str:
    """What the results call the model of `asked_model`."""
    if options.shape:
        return f"random, in the shape of {options.shape}"
    return Path(options.model).name if options.model else "tiny random Llama"


def demonstration_model() -> tuple[str, str]:
    """(model, statistics): SmolLM2-135M, as `make model` prepares it."""
    model, stats = prepare_model.prepare()
    return str(model), str(stats)


def sizes_asked(sizes: S, options: argparse.Namespace) -> S:
    """The sizes, a dataclass, with those in place that a command line gives; options that it does not give are None."""
    given = {each.name: getattr(options, each.name, None) for each in fields(sizes)}
    return replace(sizes, **{name: value for name, value in given.items() if value is not None})


def options_and_flags(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's options, and the servers' flags, which follow `--`."""
    place = argv.index("--") if "--" in argv else len(argv)
    return parser.parse_args(argv[:place]), argv[place + 1 :]


def for_a_server(name: str) -> str:
    """A model or a file as a server finds it, which has another folder than this process; other names stay."""
    return str(Path(name).absolute()) if Path(name).exists() else name


def write_tokenizer(tiny: TinyModel, vocabulary: int = VOCABULARY) -> None:
    """Gives each token id a word, for servers that return text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f" w{index}": index for index in range(vocabulary)}, unk_token=" w0"))
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f" w{END}").save_pretrained(tiny.path)


def threads() -> dict[str, str]:
    """The environment of a server on CPUs: one thread fewer than there are cores, and nothing on a GPU.

    SGLang's other processes and the client need the last core; threads that wait for one another spin.
    """
    if torch.accelerator.is_available():
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1))}


def on_cores(*numbers: int) -> dict[str, str]:
    """The environment of a server whose ranks run on one core each, these of the cores; nothing on a GPU.

    With more threads than cores, those that wait spin while the one that they wait for has no core.
    """
    if torch.accelerator.is_available():
        return {}
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[number % len(cores)]) for number in numbers)
    return {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": bound}


@contextmanager
def serving(model: str, args: Sequence[str], log: Path, env: dict[str, str] | None = None, tokenizer: bool = False):
    """A running server that takes token ids, with the SGLang memory checks that a user has.

    The weights of `shaped_model` are random.

    Args:
        env: added to the environment, which has `threads()`.
        tokenizer: whether it returns text, too.
    """
    common = ["--random-seed", "1", *(() if tokenizer else ("--skip-tokenizer-init",))]
    if not torch.accelerator.is_available():
        common += ["--dtype", "float32"]
    if (Path(model) / RANDOM_WEIGHTS).exists():
        common += ["--load-format", "dummy"]
    with running_server(model, [*common, *args], {**threads(), **(env or {})}, log) as server:
        yield server
