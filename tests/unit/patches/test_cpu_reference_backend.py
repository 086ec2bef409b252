"""The reference attention backend over SGLang's own pools: which slots it writes and reads, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from sglang_triattn.patches.cpu.attention import Span, attend
from sglang_triattn.patches.cpu.reference_backend import ReferenceBackend, spans_of

SLOTS, HEADS, KV_HEADS, WIDTH, WINDOW = 64, 4, 2, 8, 3
FULL, WINDOWED = 0, 1
COMMON = {"dtype": torch.float32, "page_size": 1, "device": "cpu", "enable_memory_saver": False}


def pool_of(kind: str):
    """A pool of two layers, of which the second has a window."""
    if kind == "one pool":
        return MHATokenToKVPool(SLOTS, head_num=KV_HEADS, head_dim=WIDTH, layer_num=2, **COMMON)
    pool = SWAKVPool(
        SLOTS,
        SLOTS,
        head_num=KV_HEADS,
        head_dim=WIDTH,
        swa_attention_layer_ids=[WINDOWED],
        full_attention_layer_ids=[FULL],
        **COMMON,
    )
    pool.register_mapping(torch.cat([torch.tensor([0]), torch.randperm(SLOTS) + 1]))
    return pool


class Requests:
    """Two requests whose tokens come step by step, with the K/V that each layer was given for them."""

    def __init__(self, pool) -> None:
        self.pool = pool
        rows = torch.randperm(SLOTS)[: 2 * 20].view(2, 20) + 1
        self.table = torch.zeros(5, 20, dtype=torch.int32)
        self.table[[4, 1]] = rows.int()
        self.rows, self.lengths = [4, 1], [0, 0]
        layers = (FULL, -1), (WINDOWED, WINDOW)
        self.layers = [
            RadixAttention(HEADS, WIDTH, 0.3, KV_HEADS, number, sliding_window_size=window) for number, window in layers
        ]
        self.given = {layer.layer_id: [torch.zeros(2, 0, KV_HEADS, WIDTH) for _ in range(2)] for layer in self.layers}
        runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=self.table), token_to_kv_pool=pool)
        self.backend = ReferenceBackend(runner)

    def step(self, mode: ForwardMode, new: list[int], mask: torch.Tensor | None = None, trees=(None, None)) -> None:
        """Runs a step in which the requests have so many new tokens, and compares what it answers."""
        after = [length + count for length, count in zip(self.lengths, new, strict=True)]
        spans = [Span(*part) for part in zip(self.rows, self.lengths, new, trees, strict=True)]
        slots = torch.cat([self.table[span.row, span.first : span.length] for span in spans]).long()
        batch = SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=torch.tensor(self.rows),
            seq_lens=torch.tensor(self.lengths if mode == ForwardMode.TARGET_VERIFY else after),
            extend_prefix_lens=torch.tensor(self.lengths) if mode == ForwardMode.EXTEND else None,
            extend_seq_lens=torch.tensor(new) if mode == ForwardMode.EXTEND else None,
            input_ids=torch.zeros(sum(new)),
            spec_info=SimpleNamespace(custom_mask=mask),
            out_cache_loc=slots,
            out_cache_loc_is_physical=False,
            _original_batch_size=None,
        )
        self.backend.init_forward_metadata(batch)
        for layer in self.layers:
            query, (key, value) = torch.randn(sum(new), HEADS * WIDTH), torch.randn(2, sum(new), KV_HEADS, WIDTH)
            answers = self.backend.forward(query, key, value, layer, batch)
            assert answers.shape == (sum(new), HEADS * WIDTH)
            given = self.given[layer.layer_id]
            parts = zip(query.split(new), torch.stack([key, value]).split(new, 1), answers.split(new), strict=True)
            for number, (own_query, own, answer) in enumerate(parts):
                known = torch.cat([given[number], own], dim=1)
                if mode != ForwardMode.TARGET_VERIFY:
                    given[number] = known
                first = spans[number].first_key(layer.sliding_window_size)
                seen = spans[number].visible(layer.sliding_window_size)
                if layer.attn_type is AttentionType.ENCODER_ONLY:
                    seen |= torch.ones_like(seen).triu(seen.shape[1] - seen.shape[0])
                queries = own_query.view(-1, HEADS, WIDTH)
                expected = attend(queries, known[0, first:], known[1, first:], seen, 0.3).flatten(1)
                torch.testing.assert_close(answer, expected)
        if mode != ForwardMode.TARGET_VERIFY:
            self.lengths = after

    def forget_what_no_window_sees(self) -> None:
        """As SGLang's allocator does: the slots have no peer in the window's pool any more, which is number 0."""
        for row, length in zip(self.rows, self.lengths, strict=True):
            self.pool.full_to_swa_index_mapping[self.table[row, : max(0, length - WINDOW)].long()] = 0
        for buffer in self.pool.get_kv_buffer(WINDOWED):
            buffer[0] = torch.nan


@pytest.mark.parametrize("kind", ["one pool", "window pool"])
def test_steps_of_two_requests(kind):
    """Prevents K/V of a window layer from being written or read at the slots of another, tokens outside the window from
    being read after they were freed, and requests of one batch from being mixed up."""
    torch.manual_seed(3)
    requests = Requests(pool_of(kind))
    requests.step(ForwardMode.EXTEND, [6, 2])
    requests.step(ForwardMode.EXTEND, [1, 5])
    if kind == "window pool":
        requests.forget_what_no_window_sees()
    requests.step(ForwardMode.DECODE, [1, 1])
    tree = torch.tensor([[True, False, False], [True, True, False], [True, False, True]])
    trees = [torch.cat([torch.ones(3, length, dtype=torch.bool), tree], dim=1) for length in requests.lengths]
    requests.step(ForwardMode.TARGET_VERIFY, [3, 3], torch.cat([part.flatten() for part in trees]), trees)
    requests.step(ForwardMode.TARGET_VERIFY, [3, 3])
    requests.step(ForwardMode.DECODE, [1, 1])


def test_a_block_of_drafted_tokens():
    """Prevents a model that drafts a block at once from seeing only the tokens before each of its own, and those that a
    window has left."""
    torch.manual_seed(3)
    requests = Requests(pool_of("one pool"))
    requests.step(ForwardMode.EXTEND, [6, 2])
    requests.layers = [
        RadixAttention(
            HEADS, WIDTH, 0.3, KV_HEADS, number, sliding_window_size=window, attn_type=AttentionType.ENCODER_ONLY
        )
        for number, window in ((FULL, -1), (WINDOWED, WINDOW))
    ]
    requests.step(ForwardMode.TARGET_VERIFY, [3, 3])


@pytest.mark.parametrize("sent", [0, 1])
def test_requests_that_fill_a_batch_up_ask_nothing(sent):
    """Prevents a group of ranks with fewer requests than another one from failing at the drafts that it has not, and
    from reading rows that are not its own."""
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=torch.tensor([3, 0]),
        seq_lens=torch.tensor([5, 1]),
        input_ids=torch.zeros(4),
        spec_info=SimpleNamespace(custom_mask=torch.ones(sent * 2 * 7, dtype=torch.bool)),
        _original_batch_size=sent,
    )
    assert [(span.row, span.first, span.queries) for span in spans_of(batch)] == [(3, 5, 2)][:sent]


def test_latent_kv():
    """Prevents K/V of models with latent KV from being stored or read as keys and values of heads."""
    pool = MLATokenToKVPool(SLOTS, kv_lora_rank=6, qk_rope_head_dim=2, layer_num=1, **COMMON)
    requests = Requests(pool)
    layer = RadixAttention(HEADS, 8, 0.3, 1, 0, v_head_dim=6)
    batch = SimpleNamespace(
        _original_batch_size=None,
        forward_mode=ForwardMode.EXTEND,
        req_pool_indices=torch.tensor([4]),
        seq_lens=torch.tensor([5]),
        extend_prefix_lens=torch.tensor([0]),
        extend_seq_lens=torch.tensor([5]),
        out_cache_loc=requests.table[4, :5].long(),
        out_cache_loc_is_physical=False,
    )
    requests.backend.init_forward_metadata(batch)
    query, key = torch.randn(5, HEADS * 8), torch.randn(5, 1, 8)
    with get_parallel().override(dcp_enabled=False):
        found = requests.backend.forward(query, key, key[..., :6], layer, batch)
    expected = attend(query.view(5, HEADS, 8), key, key[..., :6], Span(4, 0, 5).visible(), 0.3)
    torch.testing.assert_close(found, expected.flatten(1))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "both directions"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "both directions"),
        ({"use_irope": True}, "within chunks"),
        ({"logit_cap": 30.0, "logit_capping_method": "clip"}, "caps by clip"),
    ],
)
def test_what_it_cannot_do_is_refused(settings, named):
    """Prevents a layer that asks for more from being answered as if it did not."""
    requests = Requests(pool_of("one pool"))
    requests.layers = [RadixAttention(HEADS, WIDTH, 0.3, KV_HEADS, 0, **settings)]
    with pytest.raises(NotImplementedError, match=named):
        requests.step(ForwardMode.EXTEND, [2, 2])
