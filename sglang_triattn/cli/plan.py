"""`sglang-triattn plan`: how much fits on a GPU, dense and compressed, according to a config.json."""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_triattn.capacity import WINDOW_SHARE, Capacity, Gpus, Workload, plan
from sglang_triattn.compatibility.rules import why_uncovered
from sglang_triattn.compatibility.traits import uncovered_in_file
from sglang_triattn.config import BUDGET_SCOPES, ENABLE, PREFIX, Config, read_settings
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.kinds import WINDOW
from sglang_triattn.model.sizes import (
    FP8_KV,
    MODEL_HELP,
    WEIGHT_DTYPES,
    ModelSizes,
    load_config,
    read_sizes,
    weight_bytes,
)
from sglang_triattn.profiles import METAVAR
from sglang_triattn.rounds.rules import RoundRules, complete

_UNITS = {"G": 1 << 30, "GIB": 1 << 30, "M": 1 << 20, "MIB": 1 << 20}
_COLUMNS = ("bytes per token", "pool tokens", "peak of a request", "longest trace", "requests")

PARSER = {
    "help": "calculate what fits a GPU, dense and compressed",
    "description": "Calculates from a model's config.json how many tokens and requests the KV cache of a GPU holds, "
    "dense, in 8 bits, compressed, and both. Needs no weights, no GPU and no network.",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "--model-path", required=True, metavar="CONFIG", help=MODEL_HELP)
    parser.add_argument(
        "--memory", required=True, metavar="SIZE", help="memory of one GPU, such as 24G or 24GiB (both 2^30 bytes)"
    )
    parser.add_argument(
        "--weights",
        metavar="SIZE",
        help="size of all weights, such as 18.5G (estimated from the config's shapes for plain Llama-like models)",
    )
    parser.add_argument(
        "--weight-dtype",
        choices=WEIGHT_DTYPES,
        help="weights to estimate for (what the config's quantization_config says, else 16 bits); int4: groups of 128",
    )
    parser.add_argument(
        "--reserve",
        type=float,
        default=0.1,
        metavar="FRACTION",
        help="share of the memory that holds neither weights nor KV (%(default)s, as with --mem-fraction-static 0.9; "
        "SGLang's own default depends on the GPU and on other settings)",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("auto", "bfloat16", *FP8_KV),
        default="auto",
        help="KV cache of dense and compressed (%(default)s: what the config says)",
    )
    parser.add_argument(
        "--profile",
        "--triattention-profile",
        metavar=METAVAR,
        help="as --triattention-profile; a budget or an interval given beside it wins",
    )
    for name, default, text in (
        ("budget", None, f"as --triattention-budget (the profile's, or {Config.budget})"),
        ("interval", None, f"as --triattention-interval (the profile's, or {Config.interval})"),
        ("page-size", 1, "as SGLang's"),
        ("prompt", None, "tokens of a request's prompt, which stay (1024, or the length if less)"),
        ("length", None, "tokens of a request, prompt and output (32768, or the model's context limit if less)"),
        ("tp", 1, "GPUs that share the model"),
    ):
        shown = f"{text} (%(default)s)" if default is not None else text
        names = [f"--{name}", f"--triattention-{name}"] if name in ("budget", "interval") else [f"--{name}"]
        parser.add_argument(*names, type=int, default=default, metavar="N", help=shown)
    parser.add_argument(
        "--budget-scope",
        "--triattention-budget-scope",
        choices=BUDGET_SCOPES,
        default=Config.budget_scope,
        help="as --triattention-budget-scope (%(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="file to write the same to, in bytes and tokens")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the plan and writes --json. Raises TriAttentionError for a user error."""
    _check_numbers(arguments)
    content = load_config(arguments.model)
    _check_model(content)
    sizes = read_sizes(content)
    sizes.check_ranks(arguments.tp)
    workload = _workload(arguments, sizes)
    config = _settings(arguments)
    gpus, origin = _gpus(arguments, sizes, content, config)
    rows = plan(sizes, gpus, config, workload, sizes.kv_dtype if arguments.kv_dtype == "auto" else arguments.kv_dtype)
    print("\n".join([*_facts(sizes, gpus, config, workload, origin), "", *_table(rows)]))
    if arguments.json:
        content = {
            "model": _model(sizes),
            "gpus": {**dataclasses.asdict(gpus), "kv_bytes": gpus.kv_bytes},
            "settings": dataclasses.asdict(config),
            "request": dataclasses.asdict(workload),
            "weights": origin,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        _write_json(Path(arguments.json), content)


def _check_model(content: Mapping[str, Any]) -> None:
    """Raises TriAttentionError if compression does not cover the model."""
    reason = why_uncovered(uncovered_in_file(content))
    if reason is not None:
        raise TriAttentionError(
            f"The model type {content.get('model_type') or 'unknown'} cannot be planned, because {reason}: use a "
            "decoder-only model with ordinary multi-head or grouped-query attention."
        )


def _model(sizes: ModelSizes) -> dict[str, object]:
    fields = dataclasses.asdict(sizes)
    del fields["layout"]
    return {**fields, "scored_layers": len(sizes.layout.scored), "layer_kinds": sizes.layout.kinds}


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("budget", "interval", "page_size", "prompt", "length", "tp"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise TriAttentionError(f"--{name.replace('_', '-')} is {value}, but it must be at least 1.")
    if not 0 <= arguments.reserve < 1:
        raise TriAttentionError(f"--reserve is {arguments.reserve:g}, but it must be a fraction from 0 to below 1.")


def _bytes(name: str, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]+)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or not unit or not float(match[1]):
        raise TriAttentionError(f"{name} is {text}, but a size such as 24G, 24GiB or 900M was expected (2^30, 2^20).")
    return int(float(match[1]) * unit)


def _workload(arguments: argparse.Namespace, sizes: ModelSizes) -> Workload:
    length = min(32768, sizes.context) if arguments.length is None else arguments.length
    if length > sizes.context:
        raise TriAttentionError(
            f"--length is {length}, but the context limit of this {sizes.model_type} model is {sizes.context} tokens: "
            "use at most that."
        )
    prompt = min(1024, length) if arguments.prompt is None else arguments.prompt
    if prompt > length:
        raise TriAttentionError(
            f"--prompt is {prompt}, but a request of {length} tokens includes its prompt: lower it, or raise --length."
        )
    return Workload(prompt, length)


def _settings(arguments: argparse.Namespace) -> RoundRules:
    given = {PREFIX + name: getattr(arguments, name) for name in ("profile", "budget", "interval", "budget_scope")}
    config = read_settings({ENABLE: True, **given})
    assert config is not None
    return complete(config)


def _gpus(arguments: argparse.Namespace, sizes: ModelSizes, content: dict, config: RoundRules) -> tuple[Gpus, str]:
    """The GPUs, and where the size of the weights comes from, in words."""
    if arguments.weights is not None:
        weights, origin = _bytes("--weights", arguments.weights), "given"
    else:
        weights, dtype = weight_bytes(sizes, content, arguments.weight_dtype)
        origin = f"estimated: {sizes.parameters:,} parameters, {dtype}"
    gpus = Gpus(
        memory_bytes=_bytes("--memory", arguments.memory),
        reserve=arguments.reserve,
        weight_bytes=weights,
        scratch_bytes=_scratch_bytes(sizes, config, arguments.tp),
        tp=arguments.tp,
        page_size=arguments.page_size,
    )
    if gpus.kv_bytes <= gpus.scratch_bytes:
        raise TriAttentionError(
            f"The weights ({_gib(gpus.weight_share)} a GPU) and --reserve {gpus.reserve:g} leave too little of "
            f"{_gib(gpus.memory_bytes)} for a KV cache: use a larger --memory, more GPUs (--tp), or smaller weights."
        )
    return gpus, origin


def _scratch_bytes(sizes: ModelSizes, config: RoundRules, ranks: int) -> int:
    """Device memory that a compressing server takes from the pool for scoring."""
    from sglang_triattn.kernels.scorer import WorkspacePlan
    from sglang_triattn.rounds.plan import scored_tokens

    num_tokens, longest = scored_tokens(config, sizes.context)
    return WorkspacePlan(
        layers=len(sizes.layout.scored),
        q_heads=sizes.q_heads // ranks,
        kv_heads=max(sizes.kv_heads // ranks, 1),
        # As the server reserves it, which cannot know yet how many dims RoPE turns.
        frequencies=sizes.head_dim // 2,
        num_tokens=num_tokens,
        longest=longest,
        selection=config.selection,
        aggregation=config.aggregation,
        value_share=config.value_share,
    ).bytes()


def _facts(sizes: ModelSizes, gpus: Gpus, config: RoundRules, workload: Workload, origin: str) -> list[str]:
    each = f" on each of {gpus.tp} GPUs" if gpus.tp > 1 else ""
    return [
        f"model        {sizes.model_type}, {sizes.layers} layers, {sizes.q_heads} query and {sizes.kv_heads} KV heads "
        f"of {sizes.head_dim}, context {sizes.context:,}{_windows(sizes)}",
        f"memory       {_gib(gpus.memory_bytes)}{each}, {gpus.reserve:.0%} in reserve",
        f"weights      {_gib(gpus.weight_share)}{each} ({origin})",
        f"KV           {_gib(gpus.kv_bytes)}{each}, pages of {gpus.page_size}; with compression "
        f"{gpus.scratch_bytes >> 20} MiB less, for scoring",
        f"compression  {f'{config.profile}: ' if config.profile else ''}budget {config.budget:,} "
        f"({config.budget_scope}), interval {config.interval:,}",
        f"request      {workload.length:,} tokens, {workload.prompt:,} of them prompt",
    ]


def _windows(sizes: ModelSizes) -> str:
    """What the bytes per token leave out."""
    if not sizes.layout.window_pool:
        return ""
    return f"; {sizes.layout.kinds[WINDOW]} layers keep only their window, in {WINDOW_SHARE:.0%} as many slots"


def _table(rows: list[Capacity]) -> list[str]:
    lines = [f"{'':13}" + "  ".join(_COLUMNS)]
    for row in rows:
        values = (row.bytes_per_token, row.pool_tokens, row.peak_tokens, row.longest_trace, row.requests)
        cells = [f"{value:{len(title)},}" for title, value in zip(_COLUMNS, values, strict=True)]
        lines.append(f"{row.name:<13}" + "  ".join(cells))
    return lines


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"


def _write_json(path: Path, content: dict) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise TriAttentionError(f"Cannot write {path} ({error.strerror}): choose another --json.") from error
