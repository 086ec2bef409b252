"""A word tokenizer for the tiny model, and a chat template whose next turn starts with all ids of the last."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast, Qwen3_5Tokenizer

from tiny_model import VOCABULARY, TinyModel

NAMED = ("system", "user", "assistant", "tool", "done")
"""The words that the template needs; all others are w3, w4 and so on."""
FIRST, LAST = 3, VOCABULARY - len(NAMED) - 1
"""Token ids of the first and the last numbered word."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} done {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def with_tokenizer(tiny: TinyModel, folder: Path, words: Sequence[str] = ()) -> TinyModel:
    """A copy of the model, in `folder`, with a tokenizer, see `word_tokenizer`, and a chat template."""
    shutil.copytree(tiny.path, folder)
    word_tokenizer(words).save_pretrained(folder)
    return replace(tiny, path=folder)


def word_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Tokens are words including the space before them, as in most models, so that texts join to what was generated.

    Args:
        words: other names of the first numbered words.
    """
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>"])}
    numbered = [*words, *(f"w{index}" for index in range(FIRST + len(words), LAST + 1))]
    vocabulary |= {f" {word}": FIRST + index for index, word in enumerate([*numbered, *NAMED])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Prepend(" ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" [^ ]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def added_words() -> Qwen3_5Tokenizer:
    """The same words, with the same ids, in the one class that transformers reads a Qwen3.5's tokenizer in.

    It splits numbers into digits, so the words are added to it.
    """
    named = {"unk_token": "<unk>", "pad_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Qwen3_5Tokenizer({"<unk>": 0, "<s>": 1, "</s>": 2}, chat_template=TEMPLATE, **named)
    words = [*(f"w{index}" for index in range(FIRST, LAST + 1)), *NAMED]
    tokenizer.add_tokens([AddedToken(word, lstrip=True, normalized=False) for word in words])
    return tokenizer


def text(seed: int, length: int) -> str:
    """`length` random words, one token each."""
    draw = random.Random(seed)
    return " ".join(f"w{draw.randint(FIRST, LAST)}" for _ in range(length))
