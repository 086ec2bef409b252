"""`sglang-triattn check`: whether a model and a server's flags will be compressed, according to a config.json."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_triattn.compatibility.rules import SETTING_FIELDS
from sglang_triattn.compatibility.verdict import Verdict, attention_words, judge, scored_words, strategy_words
from sglang_triattn.config import ENABLE, OPTIONS, SWITCH, Config, add_flags, flag, read_settings
from sglang_triattn.errors import TriAttentionError, suggestion
from sglang_triattn.model.fields import Fields
from sglang_triattn.model.sizes import MODEL_HELP, load_config

REFUSED = 1

# Other names that SGLang's command line has for a setting, and abbreviations of them that its users type.
ALIASES = {
    "attention_context_parallel_size": "attn_cp_size",
    "attention_data_parallel_size": "attn_dp_size",
    "data_parallel_size": "dp_size",
    "decode_context_parallel_size": "dcp_size",
    "dp": "dp_size",
    "enable_hicache": "enable_hierarchical_cache",
    "monokernel_backend": "enable_amd_monokernel",
    "pipeline_parallel_size": "pp_size",
    "speculative_draft_model": "speculative_draft_model_path",
    "tensor_parallel_size": "tp_size",
}
# The settings that are whole numbers: by name, and by how a name ends.
_COUNTS = {"context_length", "max_total_tokens", "nnodes"}
_COUNT_ENDINGS = ("_size", "_num", "_topk")
# SETTING_FIELDS has what follows from the last of these: over how many ranks --tp-size splits a head.
_KNOWN = {*SETTING_FIELDS, "dp_size", "enable_dp_attention"}
_IGNORED = {"trust_remote_code"}

PARSER = {
    "help": "say whether a model and server flags will be compressed",
    "usage": "sglang-triattn check --model CONFIG [--json] [SERVER_FLAGS]",
    "description": "Says from a model's config.json and the flags of a server whether compression works with them, "
    "and what is scored; else the reason, with exit status 1. Starts nothing and needs no weights and no GPU. "
    "SERVER_FLAGS may be any of SGLang's; it lists those that it does not judge.",
    "allow_abbrev": False,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        "--model-path",
        required=True,
        metavar="CONFIG",
        help=MODEL_HELP,
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    server = parser.add_argument_group("flags of the server")
    server.add_argument("--page-size", type=int, default=1, metavar="N", help="as SGLang's (%(default)s)")
    names = ("--tp-size", "--tensor-parallel-size", "--tp")
    server.add_argument(*names, type=int, default=1, metavar="N", help="as SGLang's (%(default)s)")
    server.add_argument(
        "--json-model-override-args", default="{}", metavar="JSON", help="as SGLang's: fields that replace the file's"
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the verdict and returns the exit status. Raises TriAttentionError for a user error."""
    for name in ("page_size", "tp_size"):
        if getattr(arguments, name) < 1:
            raise TriAttentionError(
                f"--{name.replace('_', '-')} is {getattr(arguments, name)}, but it must be at least 1."
            )
    _check_names(arguments.others)
    given, others = _read_flags(arguments.others)
    config = read_settings({**vars(arguments), ENABLE: True})
    assert isinstance(config, Config)
    content = {**load_config(arguments.model), **_overrides(arguments.json_model_override_args)}
    _check_groups(arguments.tp_size, given.get("attn_dp_size", 1))
    settings = {**given, "page_size": arguments.page_size, "tp_size": arguments.tp_size}
    weighed, refusal = _read_stats(config, content, Path(arguments.model))
    verdict = judge(content, arguments.model, config, settings, weighed=weighed)
    if verdict.refusal is None:
        verdict = dataclasses.replace(verdict, refusal=refusal)
    if arguments.json:
        print(json.dumps({**verdict.to_dict(), "not_judged": others}, indent=1))
    else:
        print("\n".join(_lines(verdict, config, others)))
    return REFUSED if verdict.refusal is not None else 0


def _read_stats(config: Config, content: Fields, model: Path) -> tuple[bool, str | None]:
    """Whether the statistics will hold look-up weights, and why a launch would refuse the file."""
    if config.measures:
        return config.fits_lookups, None
    # Importing torch takes longer than everything else here.
    from sglang_triattn.stats.early import check_against_config
    from sglang_triattn.stats.file import load_stats

    folder = model if model.is_dir() else model.parent
    try:
        stats = load_stats(config.stats)
        check_against_config(stats, content, folder)
    except TriAttentionError as error:
        return False, str(error)
    return stats.lookups is not None, None


def _lines(verdict: Verdict, config: Config, others: list[str]) -> Iterator[str]:
    layout, rules = verdict.layout, verdict.rules
    if verdict.refusal is not None or layout is None:
        yield str(verdict.refusal)
        return
    layer = layout.layers[layout.scored[0]]
    each = f" on each of {verdict.ranks} GPUs" if verdict.ranks > 1 else ""
    pages = "" if verdict.page_size == 1 else f", whole pages of {verdict.page_size} tokens at a time"
    yield f"{SWITCH} compresses {verdict.name}"
    yield f"layers       {attention_words(layout)}; {layer.q_heads} query and {layer.kv_heads} KV heads"
    nothing = "nothing, because the value share 1 chooses by values alone"
    yield f"scored       {nothing if rules.value_share == 1 else scored_words(layout)}"
    if rules.profile is not None:
        yield f"profile      {rules.profile}"
    yield (
        f"rounds       budget {rules.budget:,}, interval {rules.interval:,}, newest {rules.recent:,} kept; "
        f"{rules.selection} at page size {verdict.page_size}: {strategy_words(rules, verdict.page_size)}"
    )
    yield f"also works   every other page size{'' if config.weighs_values else ' and selection'}"
    yield f"KV           {verdict.held_bytes:,} bytes per token held{each} ({verdict.kv_dtype})"
    if verdict.window_bytes:
        yield f"             {verdict.window_bytes:,} more while the token is in the window"
    yield f"freed        {verdict.held_bytes:,} bytes per evicted token{pages}"
    if others:
        yield f"not judged   {' '.join(others)}"


def _read_flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(settings that matter, by field, and the other flags) among words that `argparse` does not know.

    Raises:
        TriAttentionError: a word belongs to no flag, or a flag lacks its number.
    """
    given: dict[str, Any] = {}
    others: list[str] = []
    for name, values in _flags(words):
        field = name.removeprefix("--").replace("-", "_")
        field = ALIASES.get(field, field)
        if field in _KNOWN:
            given[field] = _value(name, values[-1], field) if values else True
        elif field not in _IGNORED:
            others.append(name)
    if given.pop("enable_dp_attention", False):
        given["attn_dp_size"] = given.get("dp_size", 1)
    return given, others


def _check_names(words: Sequence[str]) -> None:
    """Raises TriAttentionError for the first word that looks like a flag of this package and is none."""
    flags = [SWITCH, *(flag(option.name) for option in OPTIONS)]
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and "triat" in name:
            raise TriAttentionError(f"{name} is not a flag of sglang-triattn: {suggestion(name, flags)}")


def _check_groups(tp_size: int, attn_dp_size: int) -> None:
    """Raises TriAttentionError if attention data parallelism does not split the ranks evenly."""
    if attn_dp_size < 1 or tp_size % attn_dp_size:
        raise TriAttentionError(
            f"--tp-size {tp_size} does not split into {attn_dp_size} groups for attention data parallelism: use a "
            "number that divides it."
        )


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the values that follow it."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, joined, value = word.partition("=")
            found.append((name, [value] if joined else []))
        elif found:
            found[-1][1].append(word)
        else:
            raise TriAttentionError(
                f"{word} belongs to no flag: give --model CONFIG and the flags of a server, each with its value."
            )
    yield from found


def _value(name: str, value: str, field: str) -> float | str:
    if field.endswith("_threshold"):
        return _number(name, value)
    if field not in _COUNTS and not field.endswith(_COUNT_ENDINGS):
        return value
    if not value.isdecimal() or int(value) < 1:
        raise TriAttentionError(f"{name} is {value}, but it must be a whole number, at least 1.")
    return int(value)


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise TriAttentionError(f"{name} is {value}, but it must be a number.") from None


def _overrides(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise TriAttentionError(f"--json-model-override-args is {text}, but a JSON object was expected.")
    return content
