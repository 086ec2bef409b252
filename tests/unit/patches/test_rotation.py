"""Which rotation lies between the queries of a token at two positions, for each layer."""

import pytest
import torch

from sglang_triattn.model.rope import Rope, rotate
from sglang_triattn.patches.model.layers import UnsupportedModel
from sglang_triattn.patches.model.rotation import match_rotation

HEADS, HEAD_DIM, POSITION = 4, 32, 997


def rope(base=1e4, dims=32, style="half", scaling=1.0) -> Rope:
    return Rope(base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims), scaling, dims, style)


def turned(plain: torch.Tensor, by: Rope, position: int) -> torch.Tensor:
    return rotate(plain[:, None], torch.tensor([position]), by)[:, 0]


def queries(by: Rope | None, noise=0.0, seed=0):
    """Of one token, at both positions."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
    first, second = (
        plain if by is None else rotate(plain[:, None], torch.tensor([position]), by)[:, 0]
        for position in (0, POSITION)
    )
    return first, second + noise * torch.randn(HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)


def match(seen, ropes, layers=None):
    return match_rotation(seen, layers or range(len(seen)), ropes, POSITION)


LOCAL, GLOBAL = rope(1e4), rope(1e6)
OTHERS = [rope(1e4, style="interleaved"), rope(1e4, dims=16), rope(8e3), rope(9e3, dims=24, scaling=1.4)]


@pytest.mark.parametrize(
    "used", [GLOBAL, LOCAL, *OTHERS], ids=["global", "local", "interleaved", "partial", "near", "scaled"]
)
def test_the_embedding_in_use_is_found(used):
    """Prevents scoring by an embedding that the model holds and does not use here."""
    found = match([queries(used, noise=0.01), queries(None, seed=1), queries(used, seed=2)], [LOCAL, GLOBAL, *OTHERS])
    assert found.rope is used
    assert found.rotates == (True, False, True)


def test_layers_that_never_rotate_still_pair_up_their_dims():
    """Prevents a failure where only window layers, which are not scored, rotate."""
    found = match([queries(None)], [LOCAL])
    assert (found.rope, found.rotates) == (LOCAL, (False,))
    with pytest.raises(UnsupportedModel, match="no rotary embedding"):
        match([queries(None)], [])


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ([queries(rope(3e4))], "layer 0 turns its queries in an unknown way"),
        ([queries(LOCAL), queries(GLOBAL)], "layer 1 has another rotary embedding"),
        ([(queries(LOCAL)[0], torch.full((HEADS, HEAD_DIM), float("nan")))], "in an unknown way"),
    ],
    ids=["unknown", "two", "nan"],
)
def test_anything_else_is_refused(seen, words):
    """Prevents scores by wrong phases, which nothing would notice later."""
    with pytest.raises(UnsupportedModel, match=words):
        match(seen, [LOCAL, GLOBAL])


def test_layers_that_read_one_kv():
    """Prevents one entry for each reader of a layer's KV, and one rotation for readers that turn differently."""
    turned, plain = queries(LOCAL), queries(None)
    assert match([plain, turned, turned], [LOCAL], [3, 5, 5]).rotates == (False, True)
    with pytest.raises(UnsupportedModel, match="not all layers that read the KV of layer 5 rotate"):
        match([turned, turned, plain], [LOCAL], [3, 5, 5])


def test_norms_after_the_rotation_are_noticed():
    """Prevents scoring keys that are scaled dim by dim after they were rotated, as in Hunyuan."""
    weights = 1 + torch.rand(HEAD_DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    first, second = queries(LOCAL)
    with pytest.raises(UnsupportedModel, match="in an unknown way"):
        match([(first * weights, second * weights)], [LOCAL])


def test_unseen_queries_are_believed_where_there_is_one_embedding():
    """Prevents refusing a served statistics file because a backend rotates the queries itself."""
    assert match([None, None], [LOCAL]).rotates == (True, True)
    with pytest.raises(UnsupportedModel, match="within the attention backend"):
        match([None], [LOCAL, GLOBAL])
