"""`sglang-triattn plan`: whether compression pays on a GPU, in memory and in bytes per step, from a config.json."""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_triattn import capacity
from sglang_triattn.capacity import Gpus, Workload
from sglang_triattn.cli import plan_text
from sglang_triattn.cli.plan_text import Findings
from sglang_triattn.compatibility.traits import uncovered_in_file
from sglang_triattn.compatibility.uncovered import why_uncovered
from sglang_triattn.config import BUDGET_SCOPES, ENABLE, PREFIX, Config, read_settings
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.gpus import GPUS
from sglang_triattn.model.sizes import FP8_KV, MODEL_HELP, ModelSizes, load_config, read_sizes, weight_bytes
from sglang_triattn.model.weights import WEIGHT_DTYPES
from sglang_triattn.profiles import METAVAR
from sglang_triattn.rounds.rules import RoundRules, complete
from sglang_triattn.traffic import Model, break_even, mean_step, traffic

_UNITS = {"G": 1 << 30, "GIB": 1 << 30, "M": 1 << 20, "MIB": 1 << 20}
# Bandwidth, unlike memory, comes in powers of ten.
_RATES = {"G": 1e9, "T": 1e12}

PARSER = {
    "help": "calculate what fits a GPU, and what a decode step reads, dense and compressed",
    "description": "Calculates from a model's config.json how many tokens and requests the KV cache of a GPU holds, "
    "dense, in 8 bits, compressed, and both; and how many bytes a decode step reads, which bounds what compression can "
    "gain in speed. Needs no weights, no GPU and no network.",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "--model-path", required=True, metavar="CONFIG", help=MODEL_HELP)
    _add_gpu_options(parser)
    _add_request_options(parser)
    _add_setting_options(parser)
    parser.add_argument("--json", metavar="FILE", help="file to write the same to, in bytes and tokens")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="file (.png or .svg) for a picture of the bytes of a step over the length of the requests",
    )
    parser.set_defaults(run=run)


def _add_gpu_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu",
        choices=GPUS,
        help="fills in --memory and --bandwidth from the data sheet; of the two, one that is also given wins",
    )
    parser.add_argument("--memory", metavar="SIZE", help="memory of one GPU, such as 24G or 24GiB (both 2^30 bytes)")
    parser.add_argument(
        "--bandwidth",
        metavar="RATE",
        help="memory bandwidth of one GPU in bytes per second, such as 3.35T or 864G (10^12, 10^9)",
    )
    parser.add_argument(
        "--weights",
        metavar="SIZE",
        help="size of all weights, such as 18.5G (estimated from the config's shapes for Llama-like models, and some "
        "with experts)",
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
    _add_number(parser, "tp", 1, "GPUs that share the model")
    _add_number(
        parser,
        "dp",
        1,
        "groups of these GPUs with requests and KV of their own, each with all of attention (attention data "
        "parallelism): as SGLang's --attn-dp-size, or --dp-size with --enable-dp-attention; plan one of several plain "
        "replicas alone",
    )
    _add_number(parser, "page-size", 1, "as SGLang's")


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    _add_number(
        parser,
        "prompt",
        None,
        "tokens of a request's prompt, with the inputs of a conversation's later turns: all that stays (1024, or the "
        "length if less)",
    )
    _add_number(
        parser,
        "length",
        None,
        "tokens of a request, prompt and answer (32768, or the model's context limit if less)",
    )
    _add_number(
        parser,
        "batch",
        None,
        "requests that run at once, all groups together, for the bytes of a step (--requests, or as many as fit dense, "
        "or if none does, compressed)",
    )


def _add_setting_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        "--triattention-profile",
        metavar=METAVAR,
        help="as --triattention-profile; a budget or an interval that is also given wins",
    )
    for name in ("budget", "interval"):
        parser.add_argument(
            f"--{name}",
            f"--triattention-{name}",
            type=int,
            metavar="N",
            help=f"as --triattention-{name} (the profile's, or {getattr(Config, name)})",
        )
    parser.add_argument(
        "--keep-share",
        "--triattention-keep-share",
        type=float,
        metavar="SHARE",
        help=f"as --triattention-keep-share ({Config.keep_share:g})",
    )
    parser.add_argument(
        "--budget-scope",
        "--triattention-budget-scope",
        choices=BUDGET_SCOPES,
        default=Config.budget_scope,
        help="as --triattention-budget-scope (%(default)s)",
    )
    parser.add_argument(
        "--share",
        type=float,
        metavar="FRACTION",
        help="recommend, and plan with, the budget of which this share of the whole answer stays",
    )
    _add_number(parser, "requests", None, "recommend, and plan with, the largest budget at which so many requests fit")


def _add_number(parser: argparse.ArgumentParser, name: str, default: int | None, text: str) -> None:
    shown = f"{text} (%(default)s)" if default is not None else text
    parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=shown)


def run(arguments: argparse.Namespace) -> None:
    """Prints the plan and writes --json and --plot. Raises TriAttentionError for a user error."""
    _check_numbers(arguments)
    content = load_config(arguments.model)
    _check_model(content)
    sizes = read_sizes(content)
    sizes.check_ranks(_ranks(arguments))
    found = _findings(arguments, sizes, content)
    print("\n".join(plan_text.lines(found)))
    if arguments.json:
        _write_json(Path(arguments.json), plan_text.to_dict(found))
    if arguments.plot:
        # Imports matplotlib.
        from sglang_triattn.cli.plan_figure import draw

        draw(found, Path(arguments.plot))


def _findings(arguments: argparse.Namespace, sizes: ModelSizes, content: dict) -> Findings:
    """All that the command prints, in numbers."""
    workload = _workload(arguments, sizes)
    memory, bandwidth, notes = _hardware(arguments)
    given = None if arguments.weights is None else _bytes("--weights", arguments.weights)
    weights = weight_bytes(sizes, content, arguments.weight_dtype, given)
    gpus = Gpus(
        memory_bytes=memory,
        reserve=arguments.reserve,
        weight_bytes=weights.total,
        scratch_bytes=0,
        tp=arguments.tp,
        page_size=arguments.page_size,
        dp=arguments.dp,
        copied_bytes=weights.copied_bytes(arguments.tp, arguments.dp),
    )
    _check_memory(gpus)
    kv_dtype = sizes.kv_dtype if arguments.kv_dtype == "auto" else arguments.kv_dtype
    rules, reason = _budgeted(arguments, sizes, gpus, workload, kv_dtype)
    gpus = dataclasses.replace(gpus, scratch_bytes=capacity.scratch_bytes(sizes, rules, gpus.ranks))
    _check_memory(gpus)
    rows = capacity.plan(sizes, gpus, rules, workload, kv_dtype)
    of_dtype = [row for row in rows if row.kv_dtype == kv_dtype]
    dense, compressed = of_dtype[0], of_dtype[1]
    model = Model(sizes, gpus, kv_dtype, weights)
    batch = arguments.batch or arguments.requests or dense.requests or compressed.requests
    return Findings(
        model=model,
        rules=rules,
        workload=workload,
        rows=rows,
        dense=dense,
        compressed=compressed,
        bandwidth=bandwidth,
        notes=notes,
        budget_reason=reason,
        traffic=traffic(model, rules, workload, batch) if batch else None,
        dense_fits=capacity.longest_dense(sizes, gpus, kv_dtype, batch) if batch else None,
        break_even=break_even(model, rules, workload.prompt),
        tokens_per_byte={
            row.name: row.requests / mean_step(model, settings, workload, row.requests).total if row.requests else 0.0
            for row, settings in ((dense, None), (compressed, rules))
        },
    )


def _check_model(content: Mapping[str, Any]) -> None:
    """Raises TriAttentionError if compression does not cover the model."""
    reason = why_uncovered(uncovered_in_file(content))
    if reason is not None:
        raise TriAttentionError(
            f"The model type {content.get('model_type') or 'unknown'} cannot be planned, because {reason}: use a "
            "decoder-only model with ordinary multi-head or grouped-query attention."
        )


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("budget", "interval", "page_size", "prompt", "length", "tp", "dp", "batch", "requests"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise TriAttentionError(f"--{name.replace('_', '-')} is {value}, but it must be at least 1.")
    if not 0 <= arguments.reserve < 1:
        raise TriAttentionError(f"--reserve is {arguments.reserve:g}, but it must be a fraction from 0 to below 1.")
    if arguments.share is not None and not 0 < arguments.share <= 1:
        raise TriAttentionError(f"--share is {arguments.share:g}, but it must be a fraction above 0, at most 1.")
    budgets = [name for name in ("budget", "share", "requests") if getattr(arguments, name) is not None]
    if len(budgets) > 1:
        raise TriAttentionError(
            f"--{budgets[0]} and --{budgets[1]} are given, but each sets the budget: use one of them."
        )
    suffix = Path(arguments.plot).suffix if arguments.plot else ".png"
    if suffix not in (".png", ".svg"):
        raise TriAttentionError(
            f"--plot is {arguments.plot}, but a file that ends in .png or .svg was expected: rename it."
        )


def _ranks(arguments: argparse.Namespace) -> int:
    """GPUs that share the attention of a request."""
    if arguments.tp % arguments.dp:
        raise TriAttentionError(
            f"--dp is {arguments.dp}, but groups of equally many of the {arguments.tp} GPUs of --tp were expected: use "
            "a number that divides --tp, or plan one of several plain replicas alone."
        )
    return arguments.tp // arguments.dp


def _hardware(arguments: argparse.Namespace) -> tuple[int, float | None, list[str]]:
    """(bytes of memory of one GPU, its bandwidth in bytes per second if known, what a given flag overrides)."""
    known = GPUS.get(arguments.gpu)
    if known is None and arguments.memory is None:
        raise TriAttentionError(
            "Neither --gpu nor --memory is given, but the memory of a GPU was expected: add one, such as --gpu H100 or "
            "--memory 24G."
        )
    memory = None if arguments.memory is None else _bytes("--memory", arguments.memory)
    bandwidth = None if arguments.bandwidth is None else _rate("--bandwidth", arguments.bandwidth)
    notes = []
    if known is not None:
        if memory not in (None, known.memory_bytes):
            notes.append(f"--memory {arguments.memory} wins over the {known.memory_bytes >> 30}G of {arguments.gpu}")
        if bandwidth not in (None, known.bandwidth):
            notes.append(
                f"--bandwidth {arguments.bandwidth} wins over the {known.bandwidth / 1e12:g}T of {arguments.gpu}"
            )
        memory, bandwidth = memory or known.memory_bytes, bandwidth or known.bandwidth
    assert memory is not None
    return memory, bandwidth, notes


def _bytes(name: str, text: str) -> int:
    found = _with_unit(text, _UNITS)
    if not found:
        raise TriAttentionError(f"{name} is {text}, but a size such as 24G, 24GiB or 900M was expected (2^30, 2^20).")
    return int(found)


def _rate(name: str, text: str) -> float:
    found = _with_unit(text, _RATES)
    if not found:
        raise TriAttentionError(
            f"{name} is {text}, but bytes per second such as 3.35T or 864G were expected (10^12, 10^9)."
        )
    # 2.039T is a whole number of bytes.
    return float(round(found))


def _with_unit(text: str, units: Mapping[str, float]) -> float:
    """A number with its unit; 0 if there is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]+)", text)
    return float(match[1]) * units.get(match[2].upper(), 0) if match else 0


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


def _budgeted(
    arguments: argparse.Namespace, sizes: ModelSizes, gpus: Gpus, workload: Workload, kv_dtype: str
) -> tuple[RoundRules, str | None]:
    """The rules, and why they have this budget if the command chose it."""
    if arguments.share is not None:
        budget = capacity.budget_for_share(arguments.share, workload)
        answer = workload.length - workload.prompt
        return _rules(arguments, sizes, budget), f"{arguments.share:.4g} of the {answer:,} tokens of an answer"
    if arguments.requests is None:
        return _rules(arguments, sizes, arguments.budget), None
    budget = capacity.budget_for_requests(
        sizes,
        gpus,
        lambda budget: _rules(arguments, sizes, budget),
        workload,
        kv_dtype,
        arguments.requests,
        least=max(sizes.layout.window, 1),
    )
    if budget is None:
        raise TriAttentionError(
            f"No budget lets {arguments.requests:,} requests of {workload.length:,} tokens, {workload.prompt:,} of "
            f"them prompt, fit on {gpus.tp} x {plan_text.gib(gpus.memory_bytes)}: lower --requests, --prompt or "
            "--interval, or use more memory."
        )
    return _rules(arguments, sizes, budget), f"the largest at which {arguments.requests:,} requests fit"


def _rules(arguments: argparse.Namespace, sizes: ModelSizes, budget: int | None) -> RoundRules:
    given = {PREFIX + name: getattr(arguments, name) for name in ("profile", "interval", "budget_scope", "keep_share")}
    config = read_settings({ENABLE: True, **given, PREFIX + "budget": budget})
    assert config is not None
    layout = sizes.layout
    return complete(config, window=layout.window, latent=layout.latent, page_size=arguments.page_size)


def _check_memory(gpus: Gpus) -> None:
    if gpus.kv_bytes <= gpus.scratch_bytes:
        raise TriAttentionError(
            f"The weights ({plan_text.gib(gpus.weight_share)} a GPU) and --reserve {gpus.reserve:g} leave too little "
            f"of {plan_text.gib(gpus.memory_bytes)} for a KV cache: use a larger --memory, more GPUs (--tp), or "
            "smaller weights."
        )


def _write_json(path: Path, content: dict) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise TriAttentionError(f"Cannot write {path} ({error.strerror}): choose another --json.") from error
