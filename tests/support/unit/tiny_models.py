"""Random models of a few thousand weights with a word-level tokenizer, made on the fly without a network."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = 100
COMMON = {
    "vocab_size": WORDS + 2,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def make_model(folder: Path, config: transformers.PreTrainedConfig, *, bos: bool = False, seed: int = 0) -> Path:
    """Saves a random model of `config`, its weights large enough that queries differ between tokens."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    make_tokenizer(bos).save_pretrained(folder)
    return folder


def make_tokenizer(bos: bool) -> transformers.PreTrainedTokenizerFast:
    """Words w0 to w99 are tokens 2 to 101; `bos` puts token 1 before every text."""
    vocabulary = {"<unk>": 0, "<s>": 1, **{f"w{i}": i + 2 for i in range(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>" if bos else None
    )


def make_text(path: Path, words: int, seed: int = 0) -> list[int]:
    """Writes a text of random words; returns their token ids, without BOS."""
    picks = torch.randint(WORDS, (words,), generator=torch.Generator().manual_seed(seed)).tolist()
    path.write_text(" ".join(f"w{i}" for i in picks), encoding="utf-8")
    return [i + 2 for i in picks]
