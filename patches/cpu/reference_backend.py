"""An attention backend of SGLang for CPUs that computes what a layer asks for, and refuses what it does not know.

SGLang's `torch_native` leaves out attention sinks and caps of the scores, reads layers with a window through the slots
of the other layers where the two have pools of their own, and knows no latent KV and no drafted tokens. Here all of
these go through `attention.attend`.

SGLang parts: `AttentionBackend` (sglang/srt/layers/attention/base_attn_backend.py), whose methods these are;
`SWAKVPool` (sglang/srt/mem_cache/swa_memory_pool.py), whose window layers have their own slots; `MLATokenToKVPool`
(sglang/srt/mem_cache/memory_pool.py), whose values are the first dims of its keys. Models with latent KV call it as
they call Triton's backend (sglang/srt/models/deepseek_common/attention_backend_handler.py): a prefill without a prefix
gives keys and values that are made of its own tokens' latents, and everything else reads latents from the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_triattn.patches.cpu.attention import Span, attend, drafted_spans

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_triattn.patches.sglang_types import ModelRunner


def spans_of(batch: ForwardBatch) -> list[Span]:
    """What each request of the batch asks, in the batch's order.

    Groups of ranks with batches of their own fill these up to one size, with requests that were never sent. They come
    last, and ask nothing.
    """
    rows, lengths = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
    if batch.forward_mode.is_idle() or not rows:
        return []
    filled, sent = len(rows), batch._original_batch_size
    rows, lengths = rows[:sent], lengths[:sent]
    if batch.forward_mode.is_decode():
        return [Span(row, length - 1, 1) for row, length in zip(rows, lengths, strict=True)]
    if batch.forward_mode.is_target_verify():
        # Here alone the lengths do not count the queries.
        mask = getattr(batch.spec_info, "custom_mask", None)
        return drafted_spans(rows, lengths, batch.input_ids.numel() // filled, mask)
    assert batch.extend_prefix_lens is not None
    assert batch.extend_seq_lens is not None
    before, queries = batch.extend_prefix_lens.tolist()[:sent], batch.extend_seq_lens.tolist()[:sent]
    return [Span(*span) for span in zip(rows, before, queries, strict=True)]


class ReferenceBackend(AttentionBackend):
    """The backend of one model runner. One step is one call of `init_forward_metadata`, then each layer's."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        # Public, because models read these of the backend (sglang/srt/model_executor/forward_context.py).
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._spans: list[Span] = []
        # Of layers of one kind: for each span, the slots that it reads and which of them each query sees.
        self._read: dict[tuple[int, bool, bool], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        # Slots of the step's new tokens, and what these are in the pool of the window layers.
        self._new_slots: torch.Tensor | None = None
        self._window_slots: torch.Tensor | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._spans, self._read = spans_of(forward_batch), {}
        self._new_slots = None

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        return 1

    # Without SGLang's further keywords: what they ask for must not be left out in silence.
    def forward_extend(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the step's K/V, then answers its queries.

        Args:
            q: [tokens, H_q * D] or [tokens, H_q, D]; tokens of all requests, in the batch's order.
            k: [tokens, H_kv, D]. For latent KV, the latent and the turned key in one row, with H_kv = 1.
            v: [tokens, H_kv, D_v]. K and V may be None where a layer reads those of another.
            layer: its settings.
            forward_batch: the step.
            save_kv_cache: whether K/V are to be stored. Where latents have been stored already, K and V are those of
                the step's tokens for each query head.
            sinks: [H_q], see `attend`.

        Returns:
            [tokens, H_q * D_v] in the dtype of `q`.

        Raises:
            NotImplementedError: the layer asks for something else still.
        """
        # A model that drafts a block of tokens at once sees all of it.
        is_block = forward_batch.forward_mode.is_target_verify()
        looks_ahead = is_block and layer.attn_type is AttentionType.ENCODER_ONLY
        _check(layer, looks_ahead=looks_ahead)
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            places = KVWriteLoc.for_batch(forward_batch, swa_loc=self._in_windows(forward_batch.out_cache_loc))
            # The parameter is declared a tensor; all pools take either.
            pool.set_kv_buffer(layer, places, k, v)  # pyright: ignore[reportArgumentType]
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        # That of layers without a state, if others have one.
        own = getattr(pool, "full_kv_pool", pool)
        expanded = not save_kv_cache and isinstance(own, MLATokenToKVPool)
        if expanded and k is not None and v is not None:
            if any(span.first for span in self._spans):
                raise NotImplementedError("The reference backend reads a prefix as latents: serve this model on a GPU.")
            keys, values = k, v
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        answers = queries.new_zeros(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        done = 0
        for span, (slots, seen) in zip(self._spans, self._reads(layer, looks_ahead=looks_ahead), strict=True):
            block = slice(done, done + span.queries)
            read = block if expanded else slots
            answers[block] = attend(
                queries[block],
                keys[read],
                values[read],
                seen,
                layer.scaling,
                cap=layer.logit_cap or 0.0,
                sinks=sinks,
            )
            done += span.queries
        return answers.flatten(1)

    # A decode step is one query per request.
    forward_decode = forward_extend  # pyright: ignore[reportAssignmentType]

    def _in_windows(self, slots: torch.Tensor) -> torch.Tensor | None:
        """The step's slots in the pool of the window layers, where these have one; kept for the next layer."""
        pool = self.token_to_kv_pool
        if not isinstance(pool, SWAKVPool):
            return None
        # Groups of ranks fill some batches up after `init_forward_metadata`.
        if slots is not self._new_slots:
            self._new_slots, self._window_slots = slots, pool.translate_loc_from_full_to_swa(slots)
        return self._window_slots

    def _reads(self, layer: RadixAttention, *, looks_ahead: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each span, what its queries read: slots in the layer's pool, [length - first_key] int64, and which of
        them each query sees, see `Span.visible`. Layers of one kind read the same."""
        pool, window = self.token_to_kv_pool, layer.sliding_window_size
        windows = pool if isinstance(pool, SWAKVPool) and pool.layers_mapping[layer.layer_id][1] else None
        kind = window, windows is not None, looks_ahead
        if kind not in self._read:
            slots = [self._slots(span, window) for span in self._spans]
            if windows is not None:
                slots = [windows.translate_loc_from_full_to_swa(each) for each in slots]
            seen = [span.visible(window, looks_ahead=looks_ahead) for span in self._spans]
            self._read[kind] = list(zip(slots, seen, strict=True))
        return self._read[kind]

    def _slots(self, span: Span, window: int) -> torch.Tensor:
        """[length - first_key] int64: slots of the tokens that the span's queries may see."""
        branched, first = 0 if span.branch is None else len(span.branch), span.first_key(window)
        slots = self.req_to_token_pool.req_to_token[span.row, first : span.length - branched].long()
        # A window may begin within the branch.
        return slots if span.branch is None else torch.cat([slots, span.branch])[first - span.length :]


def _check(layer: RadixAttention, *, looks_ahead: bool) -> None:
    """Raises NotImplementedError for a layer whose attention is another than `attend` computes."""
    asked = {
        "cross attention": layer.is_cross_attention,
        "attention in both directions": not (layer.attn_type is AttentionType.DECODER or looks_ahead),
        "attention within chunks": layer.use_irope,
        "a temperature that depends on the position": layer.xai_temperature_len > 0,
        f"caps by {layer.logit_capping_method}": layer.logit_cap and layer.logit_capping_method != "tanh",
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise NotImplementedError(f"The reference backend has no {what}: serve this model on a GPU.")
