"""Private forward passes inside a scheduler: eager, on rows and slots of its pools, all of which are given back.

SGLang parts: `Req` and `ScheduleBatch` (sglang/srt/managers/schedule_batch.py), `ForwardBatch`
(sglang/srt/model_executor/forward_batch_info.py), `ModelRunner`, `release_kv_cache` (sglang/srt/mem_cache/common.py),
the streams of `Scheduler` (sglang/srt/managers/scheduler.py), which runs passes on `forward_stream` with overlap or
stages and on `schedule_stream` without.

Requests here are handled like SGLang's own profiling requests (managers/scheduler_components/dynamic_chunk_sizer.py):
matched, locked, allocated, and released without entering the tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from sglang_triattn.patches.ranks.pipeline import has_forward_stream, is_staged

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_triattn.patches.sglang_types import Scheduler

# With it, these requests match no prefix that the tree may hold.
_NAMESPACE = "sglang-triattn"


@contextmanager
def eager(model_runner: ModelRunner) -> Iterator[None]:
    """While open, `model_runner` replays no captured graph, so that every module's own forward runs."""
    kept = model_runner.decode_cuda_graph_runner, model_runner.prefill_cuda_graph_runner
    model_runner.decode_cuda_graph_runner = model_runner.prefill_cuda_graph_runner = None
    try:
        with torch.no_grad():
            yield
    finally:
        model_runner.decode_cuda_graph_runner, model_runner.prefill_cuda_graph_runner = kept


def forward_stream_of(scheduler: Scheduler) -> torch.Stream:
    """The stream on which SGLang runs forward passes, and rounds with them."""
    return scheduler.forward_stream if has_forward_stream(scheduler) else scheduler.schedule_stream


@contextmanager
def on_forward_stream(scheduler: Scheduler) -> Iterator[None]:
    """While open, enqueues work on the stream that SGLang's own forward passes use.

    PyTorch keeps freed memory for the stream it was allocated on, so memory allocated here can serve those passes. What
    is unused at the end goes back to the device.
    """
    device, stream = scheduler.device_module, forward_stream_of(scheduler)
    outer = device.current_stream()
    stream.wait_stream(outer)
    try:
        with device.stream(stream):
            yield
    finally:
        outer.wait_stream(stream)
        if hasattr(device, "empty_cache"):
            device.empty_cache()


class EagerBatch:
    """Requests that are prefilled together and then decode in step. It must be closed, even after an error.

    Attributes:
        positions: [tokens] int64, those of the pass that runs or ran last, as the model was given them.
    """

    def __init__(self, scheduler: Scheduler, texts: Sequence[Sequence[int]]) -> None:
        """Makes the requests.

        Args:
            texts: token ids of each request; together they must fit into the pools.
        """
        self._scheduler = scheduler
        self._requests = [_request(scheduler, index, ids) for index, ids in enumerate(texts)]
        self.positions: torch.Tensor
        self._batch: ScheduleBatch

    def prefill(self, positions: Sequence[int] | None = None) -> torch.Tensor:
        """Prefills all requests.

        Args:
            positions: RoPE position of each token, all texts concatenated; None for from 0 on in each.

        Returns:
            Logits [requests, vocabulary] of each text's next token, on the model's device; nothing of use in a
            stage that is not the last.
        """
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        scheduler = self._scheduler
        for request in self._requests:
            request.init_next_round_input(scheduler.tree_cache)
            request.lock = scheduler.tree_cache.lock(request.last_node)
            request.extend_end = len(request.full_untruncated_fill_ids)
        self._batch = ScheduleBatch.init_new(
            list(self._requests),
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            False,
            # These requests draft nothing, even if the server's do, whose batches get no slot for one token at a time.
            SpeculativeAlgorithm.NONE,
        )
        self._batch.prepare_for_extend()
        self._batch.input_ids = cast(torch.Tensor, self._batch.prefill_input_ids_cpu).to(self._batch.device)
        self._batch.prefill_input_ids_cpu = None
        return self._forward(positions)

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        """Decodes one more token of each remaining request; returns logits [requests, vocabulary]."""
        self._batch.input_ids = torch.tensor(tokens, dtype=torch.int64, device=self._batch.device)
        self._batch.prepare_for_decode()
        return self._forward()

    def keep(self, indices: Sequence[int]) -> None:
        """Releases all remaining requests except those at `indices`."""
        for index, request in enumerate(self._requests):
            if index not in indices:
                self._release(request)
        self._requests = [self._requests[index] for index in indices]
        self._batch.filter_batch(keep_indices=list(indices))

    def close(self) -> None:
        """Gives back every row and slot still held."""
        for request in self._requests:
            self._release(request)
        self._requests = []

    def _forward(self, positions: Sequence[int] | None = None) -> torch.Tensor:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        scheduler = self._scheduler
        runner = scheduler.tp_worker.model_runner
        # With attention data parallelism, ranks exchange the sizes of their batches.
        scheduler.dp_attn_adapter.maybe_prepare_mlp_sync_batch(self._batch)
        forward = ForwardBatch.init_new(self._batch, runner, return_hidden_states_before_norm=False)
        if positions is not None:
            forward.positions = torch.tensor(positions, dtype=forward.positions.dtype, device=forward.positions.device)
            if forward.mrope_positions is not None:
                forward.mrope_positions = forward.positions.to(forward.mrope_positions.dtype).expand(3, -1).contiguous()
        # Some models move the positions that they are given (Gemma-4).
        self.positions = forward.positions.clone()
        if is_staged(self._scheduler):
            return self._forward_stage(forward)
        output = cast("LogitsProcessorOutput", runner.forward(forward).logits_output)
        return cast(torch.Tensor, output.next_token_logits)

    def _forward_stage(self, forward: ForwardBatch) -> torch.Tensor:
        """This stage's part of a pass, which takes what the stage before computed; only the last returns logits."""
        from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

        stages, ranks = self._scheduler.pp_group, self._scheduler.attn_tp_group
        received = None if stages.is_first_rank else PPProxyTensors(stages.recv_tensor_dict(all_gather_group=ranks))
        output: Any = self._scheduler.tp_worker.model_runner.forward(forward, pp_proxy_tensors=received).logits_output
        if stages.is_last_rank:
            return output.next_token_logits
        stages.send_tensor_dict(output.tensors, all_gather_group=ranks)
        return torch.empty(0)

    def _release(self, request: Req) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        if request.kv.holds_kv:
            release_kv_cache(request, self._scheduler.tree_cache, checkpoint=False)
        elif request.lock is not None:
            self._scheduler.tree_cache.unlock(request.lock)
            request.lock = None


def _request(scheduler: Scheduler, index: int, ids: Sequence[int]) -> Req:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = Req(
        rid=f"{_NAMESPACE}-{index}",
        origin_input_text="",
        origin_input_ids=array("q", ids),
        # Tokens are chosen by the caller; this only has to be valid.
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        vocab_size=scheduler.model_config.vocab_size,
        extra_key=_NAMESPACE,
    )
    # As for each request without log-probabilities of its prompt: ranks that exchange sizes hold it to that.
    request.logprob_start_len = -1
    return request
