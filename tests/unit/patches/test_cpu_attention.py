"""The arithmetic of the reference attention backend, against a loop over single scores in float64."""

import math

import pytest
import torch

from sglang_triattn.patches.cpu import attention
from sglang_triattn.patches.cpu.attention import Span, attend, drafted_spans

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 6, 2, 8, 5


def one_by_one(query, key, value, sees, scale, cap=0.0, sinks=None):
    """[Q, H_q, D_v] float64; `sees(q, k)` is whether query q sees key k."""
    group = query.shape[1] // key.shape[1]
    answers = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float64)
    for q in range(query.shape[0]):
        for head in range(query.shape[1]):
            weights = {}
            for k in range(key.shape[0]):
                if sees(q, k):
                    score = scale * sum(a * b for a, b in zip(query[q, head], key[k, head // group], strict=True))
                    weights[k] = math.exp(cap * math.tanh(score / cap) if cap else score)
            total = sum(weights.values()) + (0.0 if sinks is None else math.exp(sinks[head]))
            for k, weight in weights.items():
                answers[q, head] += weight / total * value[k, head // group]
    return answers


def random_row(queries: int, keys: int, seed: int = 0):
    """Query, key and value of one request, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (queries, HEADS, WIDTH), (keys, KV_HEADS, WIDTH), (keys, KV_HEADS, VALUE_WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("first", [0, 3, 9], ids="before={}".format)
@pytest.mark.parametrize("window", [-1, 0, 4], ids="window={}".format)
@pytest.mark.parametrize(("cap", "sinks"), [(0.0, False), (1.5, True)], ids=["plain", "cap and sinks"])
def test_a_layer_of_a_request(monkeypatch, first, window, cap, sinks):
    """Prevents a mask that is off by one, a cap after the mask or the sinks, sinks that move values, and query heads
    that read another's keys; also where the queries do not fit at once."""
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", 3)
    span = Span(row=0, first=first, queries=7)
    query, key, value = random_row(span.queries, span.length, seed=first)
    sink_scores = torch.linspace(-2, 2, HEADS, dtype=torch.float64) if sinks else None

    def sees(q, k):
        return k <= first + q and (window < 0 or k >= first + q - window)

    expected = one_by_one(query, key, value, sees, 0.4, cap, sink_scores)
    oldest = span.first_key(window)
    assert oldest == (0 if window < 0 else max(0, first - window))
    inputs = [part.float() for part in (query, key[oldest:], value[oldest:])]
    found = attend(*inputs, span.visible(window), 0.4, cap=cap, sinks=None if sink_scores is None else sink_scores)
    assert_equal(found, expected)


def test_latents_that_all_heads_share():
    """Prevents values of latent KV, which are the first dims of its keys, from being taken for a head's own."""
    query, key, _ = random_row(4, 9)
    key = key[:, :1]
    value = key[..., :VALUE_WIDTH]
    span = Span(0, 5, 4)
    expected = one_by_one(query, key, value, lambda q, k: k <= 5 + q, 0.3)
    assert_equal(attend(query.float(), key.float(), value.float(), span.visible(), 0.3), expected)


# Of five drafted tokens, which ones each sees: 1 and 2 continue 0, 3 continues 1, and 4 continues 2.
SEEN = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}]


def mask_of(lengths: list[int], spare: int) -> torch.Tensor:
    """`spec_info.custom_mask` of requests of these lengths, each with SEEN, and the rest of a larger buffer."""
    parts = []
    for length in lengths:
        tree = torch.tensor([[seen in sees for seen in range(len(SEEN))] for sees in SEEN])
        parts.append(torch.cat([torch.ones(len(SEEN), length, dtype=torch.bool), tree], dim=1).flatten())
    return torch.cat([*parts, torch.ones(spare, dtype=torch.bool)])


@pytest.mark.parametrize("window", [-1, 3], ids="window={}".format)
@pytest.mark.parametrize("spare", [0, 11], ids="spare={}".format)
def test_trees_of_drafted_tokens(window, spare):
    """Prevents a drafted token from seeing its siblings, or another request's part of the mask, and a branch's window
    from counting the tokens of other branches."""
    lengths, drafted = [4, 9, 1], len(SEEN)
    spans = drafted_spans([8, 2, 5], lengths, drafted, mask_of(lengths, spare))
    assert [(span.row, span.first, span.queries) for span in spans] == [(8, 4, 5), (2, 9, 5), (5, 1, 5)]
    for span in spans:
        query, key, value = random_row(drafted, span.length, seed=span.row)

        def sees(q, k, before=span.first):
            if k >= before and k - before not in SEEN[q]:
                return False
            distance = len(SEEN[q]) - len(SEEN[k - before]) if k >= before else before + len(SEEN[q]) - 1 - k
            return window < 0 or distance <= window

        expected = one_by_one(query, key, value, sees, 0.4)
        oldest = span.first_key(window)
        inputs = [part.float() for part in (query, key[oldest:], value[oldest:])]
        assert_equal(attend(*inputs, span.visible(window), 0.4), expected)


def test_drafts_that_are_a_chain():
    """Prevents a chain, which comes without a mask, from being verified with every token in sight."""
    (span,) = drafted_spans([3], [6], 4, None)
    query, key, value = random_row(4, 10)
    expected = one_by_one(query, key, value, lambda q, k: k <= 6 + q, 1.0)
    assert_equal(attend(query.float(), key.float(), value.float(), span.visible(), 1.0), expected)


def test_a_mask_of_another_layout_is_refused():
    """Prevents the masks that SGLang's own CPU engine makes, of the drafted tokens alone, from being read as others."""
    with pytest.raises(ValueError, match="does not cover 2 requests' 5 drafted tokens"):
        drafted_spans([0, 1], [4, 9], 5, torch.ones(2 * 5 * 5, dtype=torch.bool))
