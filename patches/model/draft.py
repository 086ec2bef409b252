"""The draft model of speculative decoding, whose K/V lie in slots of the same numbers as the served model's.

SGLang parts: `StandaloneWorkerV2` (sglang/srt/speculative/standalone_worker_v2.py) and `EAGLEWorkerV2`
(sglang/srt/speculative/eagle_worker_v2.py), whose draft model has a KV pool of its own and the served model's rows and
allocator. So a round that rewrites a row or frees slots does it for both, and moves K/V in both pools, see
`kernels.follower`.

`DFlashWorkerV2` (sglang/srt/speculative/dflash_worker_v2.py) drafts a block at once. It makes the draft model's K/V of
the served model's hidden states, in the slots of the same tokens.

`FrozenKVMTPWorkerV2` (sglang/srt/speculative/frozen_kv_mtp_worker_v2.py) has a draft model without K/V, which reads
that of the served model's last layers: there is nothing to move.

`MultiLayerEagleWorkerV2` (sglang/srt/speculative/multi_layer_eagle_worker_v2.py) has a runner, with a pool, for each
token of a draft. Each runs one layer, which sees a window: its K/V lie in the peers of the served model's slots (see
`request.window_pool`). Rounds move none of these, and keep the newest tokens in their order, more than a window shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_triattn.kernels.follower import Follower
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.patches.model.buffers import kv_buffers
from sglang_triattn.patches.model.inspect import check_slots, layers_with_kv
from sglang_triattn.patches.model.layers import UnsupportedModel, attention_layers, check_windows

if TYPE_CHECKING:
    import torch

    from sglang_triattn.patches.sglang_types import ModelRunner, Scheduler


def draft_runner(scheduler: Scheduler) -> ModelRunner | None:
    """The runner of the draft model; None if there is no such model with K/V, or if each of its layers has one."""
    algorithm = scheduler.spec_algorithm
    # SGLang counts assistants among EAGLE.
    reads_text = (algorithm.is_standalone() or algorithm.is_eagle()) and not algorithm.is_frozen_kv_mtp()
    has_kv = algorithm.is_dflash() or (reads_text and not layered_runners(scheduler))
    return _only_runner(scheduler) if has_kv else None


def _only_runner(scheduler: Scheduler) -> ModelRunner:
    worker: Any = scheduler.draft_worker
    return worker.draft_worker.draft_runner


def layered_runners(scheduler: Scheduler) -> list[ModelRunner]:
    """The runners of a draft model that has one for each token of a draft; none for others."""
    from sglang.srt.runtime_context import get_spec

    # SGLang turns it on for some models, which the settings that the user gave do not show.
    if not (scheduler.spec_algorithm.is_eagle() and get_spec().enable_multi_layer_eagle):
        return []
    worker: Any = scheduler.draft_worker
    return worker.draft_worker.draft_runner_list


def check_draft_model(scheduler: Scheduler, window: int) -> None:
    """Raises UnsupportedModel unless the draft model, if there is one, attends to all tokens of a plain KV pool, or to
    the newest `--speculative-draft-window-size` of a row.

    Of a model whose layers keep a state, the draft model must be its own draft layer, which has such a pool alone. One
    that drafts blocks has a plain pool for any model, and may have windows, which count along the row.
    Where each layer of the draft model has a runner, all must see a window of at most `window` tokens, the newest that
    rounds keep, and have their K/V in a pool of window layers. Of one that reads the served model's, windows must be
    no longer than that.
    """
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.runtime_context import get_spec

    if scheduler.spec_algorithm.is_frozen_kv_mtp():
        check_windows(attention_layers(_only_runner(scheduler).model), window)
    for each in layered_runners(scheduler):
        layers = attention_layers(each.model)
        check_windows(layers, window)
        if not (isinstance(each.token_to_kv_pool, SWAKVPool) and all(layer.window for layer in layers)):
            raise UnsupportedModel("a layer of its draft model attends to all tokens")
    runner = draft_runner(scheduler)
    if runner is None:
        return
    pool = runner.token_to_kv_pool
    own_layer = isinstance(pool, HybridLinearKVPool)
    has_states = isinstance(scheduler.token_to_kv_pool_allocator.get_kvcache(), HybridLinearKVPool)
    drafts_blocks = scheduler.spec_algorithm.is_dflash()
    if has_states != own_layer and not drafts_blocks:
        raise UnsupportedModel("another model drafts for one whose layers keep a state, or is such a model")
    try:
        check_slots(pool.full_kv_pool if isinstance(pool, HybridLinearKVPool) else pool)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"of its draft model: {error.reason}") from None
    windows = {layer.attention.sliding_window_size for layer in attention_layers(runner.model) if layer.window}
    if not drafts_blocks and windows - {get_spec().speculative_draft_window_size}:
        raise UnsupportedModel("its draft model has layers with a sliding window")


def make_follower(scheduler: Scheduler, *, kernels: bool) -> Follower | None:
    """The Follower of the draft model's K/V; None if there is no such model.

    Raises:
        ValueError: the kernels cannot move what its KV pool holds.
    """
    runner = draft_runner(scheduler)
    if runner is None:
        return None
    pool = runner.token_to_kv_pool
    keys, values = kv_buffers(pool, layers_with_kv(pool))
    ahead = not scheduler.spec_algorithm.is_dflash()
    return Follower(Mover(keys, values, kernels=kernels), len(keys), keys[0].shape[1], ahead=ahead)


def window_buffers(scheduler: Scheduler) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of the layers that each have a runner, per layer [peers, H_kv, head_dim]."""
    found = [
        kv_buffers(runner.token_to_kv_pool, [layer.number for layer in attention_layers(runner.model)])
        for runner in layered_runners(scheduler)
    ]
    return [each for keys, _ in found for each in keys], [each for _, values in found for each in values]
