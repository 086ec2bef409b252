"""Calibration: the mean pre-RoPE query of every head, measured with transformers on a plain text.

Queries are taken where every transformers model hands them to its attention function, and RoPE is undone
there. Hooks on `q_proj` would miss a q_norm (Qwen3) and fused projections; at the attention function the
query is, by construction, the one that meets the keys. Sums are streamed per layer in float64, so memory does
not grow with the text.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.fingerprint import model_fingerprint
from sglang_triattn.rope import Rope, RopeError, rope_of_transformers, to_complex, unrotate
from sglang_triattn.stats import QueryStats

MIN_TOKENS = 256
MIN_WINDOW = 16
DEFAULT_MAX_TOKENS = 32768
DEFAULT_WINDOW = 2048
# No common tokenizer averages more characters a token; reading on would only load a corpus into memory.
_CHARACTERS_PER_TOKEN = 16
_ATTENTION = "sdpa"


class CalibrationError(TriAttentionError):
    """Calibration cannot be done; the message is one sentence for the user."""


def calibrate(
    model_path: str,
    data_path: str,
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    window: int = DEFAULT_WINDOW,
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> QueryStats:
    """Measures the query statistics of a model on a text (arXiv 2604.04921, section 4; spec 1.1).

    Every token has equal weight.

    Args:
        model_path: model folder or hub name for transformers.
        data_path: UTF-8 text, best of the kind the model will serve.
        max_tokens: tokens used, from the start of the text.
        window: tokens per forward pass. Each window is a text of its own, which bounds memory, and starts
            with the tokenizer's BOS if texts do.
        device: torch device; by default "cuda" if there is one, else "cpu".
        dtype: name of a torch dtype or "auto", the checkpoint's; by default float32 on the CPU, else "auto".
        progress: whether to show a progress bar.

    Raises CalibrationError when the model or the text cannot be used.
    """
    if max_tokens < MIN_TOKENS or window < MIN_WINDOW:
        raise CalibrationError(
            f"A calibration on {max_tokens} tokens in windows of {window} means nothing: use at least "
            f"{MIN_TOKENS} tokens in windows of at least {MIN_WINDOW}."
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "auto")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CalibrationError(f"Device {device!r} does not exist here: give cpu, cuda or cuda:N.") from error
    text = _read_text(data_path, max_tokens * _CHARACTERS_PER_TOKEN)
    config = _loaded(transformers.AutoConfig, model_path).get_text_config()
    _check_config(config)
    windows = _windows(_loaded(transformers.AutoTokenizer, model_path), text, max_tokens, window, config)
    model = _loaded(transformers.AutoModelForCausalLM, model_path, dtype=dtype, attn_implementation=_ATTENTION).eval()
    body = model.base_model.to(device)  # without the vocabulary projection, whose logits would dwarf the rest
    try:
        rope = rope_of_transformers(body, config)
    except RopeError as error:
        raise CalibrationError(f"Model {model_path} cannot be calibrated: {error}") from error
    sums = _QuerySums(config.num_hidden_layers, rope)
    count = sum(map(len, windows))
    bar = tqdm(total=count, unit="token", desc="calibrate", disable=not progress)
    with torch.inference_mode(), bar, sums.recording():
        for ids in windows:
            body(input_ids=torch.tensor([ids], device=device), use_cache=False)
            sums.end_window()
            bar.update(len(ids))
    mean, abs_mean = sums.means(count)
    if not torch.isfinite(abs_mean).all():
        raise CalibrationError(
            f"Model {model_path} computes NaN or infinite queries with dtype {dtype}: choose another dtype."
        )
    return QueryStats(
        mean=mean,
        abs_mean=abs_mean,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=sums.head_dim,
        rope=rope,
        fingerprint=model_fingerprint(model_path),
        token_count=count,
        source=f"of {model_path}",
    )


class _QuerySums:
    """Running sums, over tokens, of the pre-RoPE queries that pass through transformers' attention
    function."""

    def __init__(self, num_layers: int, rope: Rope):
        self.rope = rope
        self.head_dim = 0
        self._sums: list[torch.Tensor | None] = [None] * num_layers  # each [H_q, F] complex128
        self._abs_sums: list[torch.Tensor | None] = [None] * num_layers  # each [H_q, F] float64
        self._seen: list[int] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While open, every attention call of transformers models is added before it runs."""
        attend = ALL_ATTENTION_FUNCTIONS[_ATTENTION]

        def record(module, query, *args, **kwargs):
            self._add(module.layer_idx, query)
            return attend(module, query, *args, **kwargs)

        # The mapping's own override level: deleting it brings the original function back.
        ALL_ATTENTION_FUNCTIONS[_ATTENTION] = record
        try:
            yield
        finally:
            del ALL_ATTENTION_FUNCTIONS[_ATTENTION]

    def _add(self, layer: int, query: torch.Tensor) -> None:
        """query: [1, H_q, S, head_dim], post-RoPE, positions 0 to S-1."""
        positions = torch.arange(query.shape[2], device=query.device)
        z = to_complex(unrotate(query[0].float(), positions, self.rope), self.rope)  # [H_q, S, F]
        total = z.sum(1, dtype=torch.complex128).cpu()
        abs_total = z.abs().sum(1, dtype=torch.float64).cpu()
        if self._sums[layer] is not None:
            total, abs_total = total + self._sums[layer], abs_total + self._abs_sums[layer]
        self._sums[layer], self._abs_sums[layer] = total, abs_total
        self._seen.append(layer)
        self.head_dim = query.shape[-1]

    def end_window(self) -> None:
        """Raises CalibrationError unless each layer attended exactly once since the last call."""
        if sorted(self._seen) != list(range(len(self._sums))):
            raise CalibrationError(
                f"Only {len(set(self._seen))} of {len(self._sums)} layers use transformers' own attention, "
                "but TriAttention needs the queries of all: use another model."
            )
        self._seen.clear()

    def means(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[L, H_q, F] complex64 and float32 means over `count` tokens."""
        mean, abs_mean = torch.stack(self._sums) / count, torch.stack(self._abs_sums) / count
        return mean.to(torch.complex64), abs_mean.float()


def _read_text(data_path: str, characters: int) -> str:
    try:
        with Path(data_path).open(encoding="utf-8") as file:
            return file.read(characters)
    except UnicodeDecodeError as error:
        raise CalibrationError(f"Calibration text {data_path} is not UTF-8 text: give a plain text file.") from error
    except OSError as error:
        raise CalibrationError(
            f"Calibration text {data_path} cannot be read ({error.strerror}): give a plain text file."
        ) from error


def _loaded(kind, model_path: str, **options):
    try:
        return kind.from_pretrained(model_path, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise CalibrationError(
            f"Model {model_path} cannot be loaded: transformers says {reason!r}; give a model folder or a "
            "Hugging Face name."
        ) from error


def _check_config(config) -> None:
    """Raises CalibrationError for models whose layers do not all attend to RoPE-turned keys alike."""
    if getattr(config, "kv_lora_rank", None):
        raise CalibrationError(
            f"Models of type {config.model_type} use latent attention (MLA), which caches no keys per head, "
            "but TriAttention needs them: use a model with grouped-query attention and RoPE."
        )
    if len(set(getattr(config, "layer_types", None) or [])) > 1:
        raise CalibrationError(
            f"Models of type {config.model_type} mix layers of types {sorted(set(config.layer_types))}, but "
            "TriAttention needs all alike: use a model with full attention in every layer."
        )
    uses_rope = getattr(config, "no_rope_layers", None) or []  # despite its name, 1 where a layer has RoPE
    if not all(uses_rope):
        raise CalibrationError(
            f"Models of type {config.model_type} leave RoPE out of some layers, but TriAttention needs it in "
            "all: use a model that has."
        )


def _windows(tokenizer, text: str, max_tokens: int, window: int, config) -> list[list[int]]:
    """Token windows of the first `max_tokens`, none longer than `window` and the model's own limit."""
    ids = tokenizer(text, verbose=False)["input_ids"][:max_tokens]
    if len(ids) < MIN_TOKENS:
        raise CalibrationError(
            f"Calibration text is too short: {len(ids)} tokens, but at least {MIN_TOKENS} are needed."
        )
    window = min(window, getattr(config, "max_position_embeddings", None) or window)
    start = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    rest = ids[len(start) :]
    step = window - len(start)
    return [start + rest[first : first + step] for first in range(0, len(rest), step)]
