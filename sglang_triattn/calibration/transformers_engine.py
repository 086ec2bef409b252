"""Calibration with transformers: the mean pre-RoPE query of every head, measured on texts.

Queries are captured where every transformers model passes them to its attention function, and RoPE is undone there.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from sglang_triattn.calibration.inputs import Texts, loaded, prepare_job
from sglang_triattn.calibration.job import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_WINDOW,
    SAVE_EVERY_TOKENS,
    CalibrationError,
    CalibrationJob,
)
from sglang_triattn.calibration.latent_queries import absorbed, key_weights
from sglang_triattn.calibration.lookups import check_no_latents, fit_lookups
from sglang_triattn.calibration.query_sums import QuerySums, join_runs
from sglang_triattn.calibration.resume import Progress, load_progress, remove_progress, save_progress
from sglang_triattn.model.families import family_of
from sglang_triattn.model.fingerprint import model_fingerprint, shown_name
from sglang_triattn.model.layers import head_width, kv_heads, never_rotates, readers, scored_layers
from sglang_triattn.model.rope import Rope, RopeError, no_rotation, rope_of_transformers
from sglang_triattn.stats.file import QueryStats
from sglang_triattn.transformers_cache.queries import attention_for, watching_queries


def calibrate(
    model_path: str,
    data: str | Sequence[str],
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    window: int = DEFAULT_WINDOW,
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
    partial: Path | None = None,
    lookups: bool = False,
) -> QueryStats:
    """Measures the query statistics of a model on texts (arXiv 2604.04921, section 4).

    Every token has equal weight.

    Args:
        model_path: model folder or hub name for transformers.
        data: UTF-8 files, ideally of the kind the model will serve: .jsonl has one chat per line, anything else is one
            text.
        max_tokens: tokens used, from the start of the first file.
        window: tokens per forward pass. Each window is a separate text, which bounds memory, and starts with the
            tokenizer's BOS if texts do.
        device: torch device; by default "cuda" if there is one, else "cpu".
        dtype: name of a torch dtype, or "auto" for the checkpoint's; by default float32 on the CPU, else "auto".
        progress: whether to show a progress bar.
        partial: progress file (.safetensors), from which the same call resumes after an interruption.
        lookups: whether to fit look-up weights too, see `calibration.lookups`.

    Raises:
        CalibrationError: the model or the text cannot be used.
    """
    device, dtype = device_and_dtype(device, dtype)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CalibrationError(f"Device {device!r} does not exist here: give cpu, cuda or cuda:N.") from error
    files = (data,) if isinstance(data, str) else tuple(data)
    texts = Texts(data=files, max_tokens=max_tokens, window=window, lookups=lookups)
    job = prepare_job(model_path, texts, identity=f"transformers {dtype}", partial=partial)
    stats = run_job(model_path, job, device=device, dtype=dtype, progress=progress)
    remove_progress(job)
    return stats


def device_and_dtype(device: str | None, dtype: str | None) -> tuple[str, str]:
    """The device and dtype to use where the user gave none."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return device, dtype or ("float32" if device == "cpu" else "auto")


def run_job(model_path: str, job: CalibrationJob, *, device: str, dtype: str, progress: bool) -> QueryStats:
    """Runs the windows of a job; traces need SGLang. The caller removes its partial file.

    Raises:
        CalibrationError: the model cannot be used.
    """
    config = loaded(transformers.AutoConfig, model_path).get_text_config()
    _check_config(config)
    body = _load_body(model_path, dtype, attention_for(config)).to(device)
    layers, rotates = scored_layers(config)
    try:
        rope = no_rotation(head_width(config)) if never_rotates(config) else rope_of_transformers(body, config)
    except RopeError as error:
        raise CalibrationError(f"Model {model_path} cannot be calibrated: {error}") from error
    places = {reader: layers.index(layer) for reader, layer in readers(config).items()}
    latent = getattr(config, "kv_lora_rank", None) or 0
    check_no_latents(model_path, job, bool(latent))
    sums = QuerySums(rope, rotates, list(places.values()), _absorb(body, layers) if latent else None)
    start = load_progress(job)
    saved = 0
    done = sum(map(job.tokens_of, range(start.done)))
    bar = tqdm(total=job.tokens, initial=done, unit="token", desc="calibrate", disable=not progress)

    def add(layer: int, query: torch.Tensor) -> None:
        # One window at a time, at positions 0 to S - 1.
        if layer not in places:
            return
        positions = torch.arange(query.shape[2], device=query.device)
        if latent:
            still, turning = query[0].split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
            sums.add_latent(places[layer], turning, positions, still, absorbed=False)
        else:
            sums.add(places[layer], query[0], positions)

    with torch.inference_mode(), bar, watching_queries(add):
        for index in range(start.done, len(job.windows)):
            ids = job.windows[index]
            body(input_ids=torch.tensor([ids], device=device), use_cache=False)
            sums.end_pass(len(ids))
            bar.update(len(ids))
            saved += len(ids)
            if saved >= SAVE_EVERY_TOKENS:
                save_progress(job, Progress(index + 1, join_runs(sums.read(), start.sums)))
                saved = 0
    weights = _lookups(body, job, rope, places, progress) if job.lookup_texts else None
    total = join_runs(sums.read(), start.sums)
    mean, abs_mean, unrotated = total.means()
    if latent and config.rope_interleave:
        # transformers separates the halves of each pair as it turns them; SGLang's pool interleaves them.
        rope = replace(rope, style="interleaved")
    return QueryStats(
        mean=mean,
        abs_mean=abs_mean,
        num_kv_heads=kv_heads(config),
        head_dim=total.head_dim,
        rope=rope,
        fingerprint=model_fingerprint(model_path),
        model=shown_name(model_path),
        token_count=total.count,
        source=f"of {model_path}",
        layers=layers,
        rotates=rotates,
        unrotated_mean=unrotated,
        rotary_start=latent,
        lookups=weights,
    )


def _lookups(
    body: torch.nn.Module, job: CalibrationJob, rope: Rope, places: dict[int, int], progress: bool
) -> torch.Tensor:
    texts = len(job.lookup_texts)
    with torch.inference_mode(), tqdm(total=texts, unit="text", desc="look-ups", disable=not progress) as bar:
        return fit_lookups(body, job, rope, places, bar.update)


def _absorb(body: torch.nn.Module, layers: Sequence[int]) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """`absorb` of `QuerySums` for the scored `layers` of a transformers model with latent KV."""
    # Typed as Any, because torch types all attributes of modules as modules or tensors.
    attentions: list[Any] = [module for module in body.modules() if hasattr(module, "kv_b_proj")]
    found = {attention.layer_idx: attention for attention in attentions}

    def absorb(place: int, summed: torch.Tensor) -> torch.Tensor:
        attention = found[layers[place]]
        weights = key_weights(
            attention.kv_b_proj,
            attention.kv_lora_rank,
            len(summed),
            attention.qk_nope_head_dim,
            like=attention.kv_a_layernorm.weight,
        )
        return absorbed(summed, weights)

    return absorb


def _load_body(model_path: str, dtype: str, attention: str) -> torch.nn.Module:
    """The decoder layers, without the vocabulary projection, whose logits would dwarf the rest, and without a vision
    encoder."""
    config = loaded(transformers.AutoConfig, model_path)
    images = family_of(config.architectures).images is not None and hasattr(config, "vision_config")
    kind = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    base = loaded(kind, model_path, dtype=dtype, attn_implementation=attention).eval().base_model
    return base.get_submodule("language_model") if images else base


def _check_config(config) -> None:
    """Raises CalibrationError unless some layers cache keys per head and attend to all of them."""
    if getattr(config, "kv_lora_rank", None) and not family_of(config.architectures).latent:
        raise CalibrationError(
            f"Models of type {config.model_type} have latent KV (MLA), whose queries are known for DeepSeek-V3 and "
            "GLM-4.7-Flash alone: use one of these, or a model with grouped-query attention and RoPE."
        )
    if not scored_layers(config)[0]:
        raise CalibrationError(
            f"Models of type {config.model_type} have layers of types {sorted(set(config.layer_types))}, but "
            "TriAttention needs some with full attention: use a model that has them."
        )
