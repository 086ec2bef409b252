"""What pipeline stages agree on at launch, and the requests of other microbatches."""

from types import SimpleNamespace

import pytest
import torch

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.rope import Rope
from sglang_triattn.patches.model.layers import UnsupportedModel
from sglang_triattn.patches.model.served_shape import join_stages
from sglang_triattn.patches.ranks.pipeline import batches_in_flight, keeps_equal_sets, requests_of_other_batches
from sglang_triattn.patches.ranks.tensor_parallel import agreed
from sglang_triattn.stats.file import ModelShape, QueryStats


def shape(layers: tuple[int, ...], base: float = 100.0) -> ModelShape:
    rope = Rope(
        inv_freq=base ** -torch.arange(4, dtype=torch.float64), attention_scaling=1.0, rotary_dim=8, style="half"
    )
    return ModelShape(layers, 4, 2, 8, rope, "f", tuple(layer % 3 > 0 for layer in layers))


def test_stages_make_one_model():
    """Prevents statistics that are compared with a part of the model, or layers that change places."""
    whole = join_stages([shape((0, 1)), shape((2, 3, 4))])
    assert whole.layers == (0, 1, 2, 3, 4)
    assert whole.rotates == (False, True, True, False, True)
    with pytest.raises(UnsupportedModel, match="another rotary embedding"):
        join_stages([shape((0, 1)), shape((2,), base=90.0)])


def test_a_stage_takes_its_own_layers():
    """Prevents a stage from scoring its keys by the queries of another's layers."""
    mean = torch.arange(5.0)[:, None, None].expand(5, 4, 4).to(torch.complex64)
    stats = QueryStats(mean, mean.abs(), 2, 8, None, None, 1, "s", (3, 4, 6, 7, 9), (True, False, True, True, False))
    own = stats.of_layers([6, 9])
    assert (own.layers, own.rotates) == ((6, 9), (True, False))
    assert own.mean[:, 0, 0].real.tolist() == own.abs_mean[:, 0, 0].tolist() == [2.0, 4.0]


def group(*others: str | None) -> SimpleNamespace:
    return SimpleNamespace(world_size=1 + len(others), all_gather_object=lambda own: [own, *others])


@pytest.mark.parametrize("stages", [group("No."), group(None)], ids=["other stage", "own stage"])
def test_all_stages_refuse_where_one_does(stages):
    """Prevents a launch that hangs because one stage has refused, in another stage or on another rank of this one."""
    ranks = group("No.") if stages.all_gather_object(None) == [None, None] else group(None)
    with pytest.raises(TriAttentionError, match="No"), agreed(SimpleNamespace(tp_group=ranks, pp_group=stages)):
        pass
    with agreed(SimpleNamespace(tp_group=group(None), pp_group=group(None))):
        pass


def test_stages_never_keep_the_same():
    """Prevents stages whose trees hold different parts of one row."""
    assert keeps_equal_sets(SimpleNamespace(dp_tp_group=group(), pp_group=group()), "per-head")
    assert keeps_equal_sets(SimpleNamespace(dp_tp_group=group(None), pp_group=group()), "union")
    assert not keeps_equal_sets(SimpleNamespace(dp_tp_group=group(None), pp_group=group()), "per-head")
    assert not keeps_equal_sets(SimpleNamespace(dp_tp_group=group(), pp_group=group(None)), "union")


def request(*, holds_kv: bool = True, finished: bool = False) -> SimpleNamespace:
    return SimpleNamespace(kv=SimpleNamespace(holds_kv=holds_kv), finished=lambda: finished)


def test_requests_of_other_microbatches():
    """Prevents slots that two microbatches count on, and requests that are reserved for twice."""
    own, decoding, filling, chunked = (request() for _ in range(4))
    batches = [SimpleNamespace(reqs=reqs) for reqs in ([own], [decoding, request(holds_kv=False)])]
    prefill = SimpleNamespace(reqs=[filling, chunked, request(finished=True)])
    scheduler = SimpleNamespace(running_batch=batches[0], chunked_req=chunked)
    assert requests_of_other_batches(scheduler) == batches_in_flight(scheduler) == []
    scheduler.running_mbs, scheduler.mbs = batches, [batches[0], prefill]
    assert requests_of_other_batches(scheduler) == [decoding, filling]
    assert batches_in_flight(scheduler) == [prefill]
