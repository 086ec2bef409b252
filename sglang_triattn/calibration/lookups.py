"""Fits weights that predict from a cached key how strongly later tokens may look it up.

How strongly a text's tokens are looked up at most is measured as KVzip does (arXiv 2505.23416): the model reads the
text, is asked to repeat it, and reads it again. With a the attention of the second reading to the first,

    s = max over the queries of the second reading, and over the query heads that share the key, of a

KVzap (arXiv 2601.07891) predicts such values from hidden states. Here a ridge regression for each layer and KV head
predicts them from the value v, and from what RoPE does not turn of the key, the sizes of its complex components K_f:

    log(s + EPSILON) ~ sum_f w_f |K_f| + sum_d u_d v_d + constant

So what a KV pool holds of a token is enough, wherever the token stands in a text. Half of the texts are the
calibration's own, half are records that nothing predicts (`records.py`). `kernels.score.value_size` uses the weights.

Shape symbols: L layers, H_q query heads, H_kv KV heads, F frequencies (half the rotated dims), n tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_triattn.calibration.job import CalibrationError, CalibrationJob
from sglang_triattn.calibration.records import records
from sglang_triattn.model.rope import Rope, to_complex
from sglang_triattn.transformers_cache.queries import watching_attention

WINDOW, WINDOWS = 1024, 12
"""Tokens of a text, and how many texts are read, half of them records."""
REQUEST = "\n\nRepeat the previous text exactly:\n"
EPSILON = 1e-3
"""Attention that hardly differs from none."""
RIDGE = 0.03
"""Penalty on weights of standardised features, relative to their variance."""
MIN_WORDS = 100
# Most queries of a second reading that are compared at once.
_CHUNK = 512
# The first tokens of a text are attended to wherever there is nothing to look up.
_SINKS = 8
_CHARACTERS_PER_TOKEN = 6


@dataclass(frozen=True)
class Measured:
    """The KV of a text, and how strongly each token is looked up as the model reads the text again.

    Attributes:
        keys: [L, H_kv, n, head_dim] float32, after RoPE.
        values: [L, H_kv, n, v_head_dim] float32.
        most: [L, H_kv, n] float32, s.
    """

    keys: torch.Tensor
    values: torch.Tensor
    most: torch.Tensor


def features(keys: torch.Tensor, values: torch.Tensor, rope: Rope) -> torch.Tensor:
    """What the weights multiply, [..., F + v_head_dim] float32: |K_f| of keys [..., head_dim], and values."""
    return torch.cat([to_complex(keys.float(), rope).abs(), values.float()], -1)


def lookup_inputs(
    tokenizer: Any, windows: Sequence[Sequence[int]]
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Token ids of the texts to read, the beginnings of a calibration's windows, then as many of records; and of what
    stands between two readings.

    Raises:
        CalibrationError: the windows have too few different words to make records of.
    """
    own = [tuple(ids[:WINDOW]) for ids in windows[: WINDOWS // 2]]
    plain = tokenizer.decode([token for ids in windows for token in ids], skip_special_tokens=True)
    words = sorted(set(re.findall(r"\b[^\W_]{3,9}\b", plain.lower())))
    if len(words) < MIN_WORDS:
        raise CalibrationError(
            f"The calibration text has {len(words)} different words of 3 to 9 letters, but look-ups need {MIN_WORDS}: "
            "give more --data, or leave --look-ups out."
        )
    made = (records(seed, words, WINDOW * _CHARACTERS_PER_TOKEN) for seed in range(WINDOWS - WINDOWS // 2))
    drawn = [tuple(_ids(tokenizer, text)[:WINDOW]) for text in made]
    return (*own, *drawn), tuple(_ids(tokenizer, REQUEST))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def check_no_latents(model_path: str, job: CalibrationJob, latent: bool) -> None:
    """Raises CalibrationError if look-ups of latent KV are asked for."""
    if latent and job.lookup_texts:
        raise CalibrationError(
            f"Look-ups of {model_path}, whose KV is latent, cannot be predicted: leave --look-ups out."
        )


class Reading:
    """What attention layers show of two readings of a text, in one forward pass.

    Args:
        length: tokens of the text.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        # By the layer whose KV is read: [H_kv, tokens, head_dim], [H_kv, length, v_head_dim] and [H_kv, length].
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._most: dict[int, torch.Tensor] = {}

    def see(
        self, place: int, queries: torch.Tensor, scaling: float, kv: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        """Takes in one layer's attention.

        Args:
            place: of the layer whose KV it reads.
            queries: [H_q, tokens, head_dim].
            scaling: what logits are multiplied by.
            kv: keys [H_kv, tokens, head_dim] and values [H_kv, tokens, v_head_dim]; None where the layer has none of
                its own.
        """
        # The first layer that reads KV writes it. Cloned, because a view would keep the queries too.
        if place not in self._keys and kv is not None:
            self._keys[place], self._values[place] = kv[0].clone(), kv[1][:, : self._length].clone()
        if place in self._keys:
            again = queries[:, self._length :].float() * scaling
            most = strongest_attention(again, self._keys[place].float(), self._length)
            self._most[place] = torch.maximum(self._most.get(place, most), most)

    def measured(self, places: Sequence[int]) -> Measured:
        """What the layers at `places` have shown. Raises CalibrationError if some have not."""
        if list(places) != sorted(self._most):
            raise CalibrationError(
                f"Only {len(self._most)} of {len(places)} layers show their keys, but look-ups need those of all: "
                "leave --look-ups out."
            )
        found = ([part[each] for each in places] for part in (self._keys, self._values, self._most))
        keys, values, most = map(torch.stack, found)
        return Measured(keys[:, :, : self._length].float(), values.float(), most)


def read_again(body: Any, request: Sequence[int], ids: Sequence[int], places: Mapping[int, int]) -> Measured:
    """Reads a text twice.

    Args:
        body: decoder layers of transformers, whose attention can be watched.
        request: token ids that stand between the two readings.
        ids: the text.
        places: of each layer that reads the KV of a scored one, the place of that one among the scored.

    Raises:
        CalibrationError: a layer's attention does not show.
    """
    reading, device = Reading(len(ids)), next(body.parameters()).device

    def see(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> None:
        if layer in places:
            factor = query.shape[-1] ** -0.5 if scaling is None else scaling
            reading.see(places[layer], query[0], factor, (key[0], value[0]))

    with watching_attention(see):
        body(input_ids=torch.tensor([[*ids, *request, *ids]], device=device), use_cache=False)
    return reading.measured(sorted({*places.values()}))


def attention_to(queries: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """[H_kv, S, count]: what the newest queries [H_q, S, d], scaled, give the first keys of [H_kv, T, d].

    Of the query heads that share a key, the one that gives it most counts.
    """
    size, total = queries.shape[1], keys.shape[1]
    logits = torch.einsum("hgsd,htd->hgst", queries.unflatten(0, (keys.shape[0], -1)), keys)
    seen = torch.ones(size, total, dtype=torch.bool, device=keys.device).tril(total - size)
    return logits.masked_fill_(~seen, float("-inf")).softmax(-1)[..., :count].amax(1)


def strongest_attention(queries: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """[H_kv, count]: the most that one of many newest queries gives the first keys; arguments as for `attention_to`.

    Takes memory for 512 queries at once.
    """
    ends = range(keys.shape[1] - queries.shape[1], keys.shape[1], _CHUNK)
    parts = queries.split(_CHUNK, dim=1)
    found = [attention_to(part, keys[:, : end + part.shape[1]], count) for end, part in zip(ends, parts, strict=True)]
    return torch.stack([each.amax(1) for each in found]).amax(0)


class LookupSums:
    """Sums over texts of what weights are fitted by, so that memory does not grow with the texts.

    Args:
        rope: how the model turns its keys.
    """

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._count = 0
        # Of features and, last, of what they predict: [L, H_kv, F + v_head_dim + 1], and of all products of two,
        # both float64.
        self._total = self._products = torch.zeros(0)

    def add(self, measured: Measured) -> None:
        """Adds a text."""
        parts = []
        # Layer by layer, because float64 takes much memory.
        for keys, values, most in zip(measured.keys, measured.values, measured.most, strict=True):
            both = torch.cat([features(keys, values, self._rope), torch.log(most + EPSILON)[..., None]], -1)
            both = both[:, _SINKS:].double()
            parts.append((both.sum(1), both.mT @ both))
        total, products = (torch.stack(each) for each in zip(*parts, strict=True))
        if self._count:
            total, products = self._total + total, self._products + products
        self._total, self._products = total, products
        self._count += measured.most.shape[2] - _SINKS

    def weights(self) -> torch.Tensor:
        """The weights w and u, [L, H_kv, F + v_head_dim] float32, on the CPU.

        Raises:
            CalibrationError: they are not finite.
        """
        count, mean = self._count, self._total / self._count
        covariance = self._products / count - mean[..., None] * mean[..., None, :]
        variance = covariance[..., :-1, :-1].diagonal(dim1=-2, dim2=-1)
        spread = (variance.clamp_min(0) * count / (count - 1)).sqrt().clamp_min(1e-4)
        scaled = covariance[..., :-1, :-1] / (spread[..., None] * spread[..., None, :])
        scaled = scaled + RIDGE * torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
        # Not `solve`, whose factors of many matrices come out wrong on a CPU after `torch.set_num_threads`.
        factors, failed = torch.linalg.cholesky_ex(scaled)
        weights = torch.cholesky_solve(covariance[..., :-1, -1:] / spread[..., None], factors)[..., 0] / spread
        if failed.any() or not torch.isfinite(weights).all():
            raise CalibrationError("The model computes NaN or infinite keys: choose another --dtype.")
        return weights.float().cpu()


def fit_lookups(
    body: Any, job: CalibrationJob, rope: Rope, places: Mapping[int, int], progress: Callable[[], object]
) -> torch.Tensor:
    """The weights [L, H_kv, F + v_head_dim] of a model of transformers.

    Args:
        body, places: as for `read_again`.
        job: its texts are read.
        progress: called after each text.

    Raises:
        CalibrationError: the weights are not finite.
    """
    sums = LookupSums(rope)
    for ids in job.lookup_texts:
        sums.add(read_again(body, job.lookup_request, ids, places))
        progress()
    return sums.weights()
