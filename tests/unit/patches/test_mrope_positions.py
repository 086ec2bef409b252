"""Rotary positions of several axes that SGLang computes for rows that rounds have shortened."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.mm_utils import extend_mrope_positions_for_retracted_request
from sglang.srt.managers.schedule_batch import MultimodalInputs
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_triattn.patches.request import positions
from sglang_triattn.patches.request.fields import rotary_shift_of

PROMPT = 20
RUNNER = SimpleNamespace(device="cpu")


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    deterministic = SimpleNamespace(rl_on_policy_target=None)
    monkeypatch.setattr(forward_batch_info, "get_exec", lambda: SimpleNamespace(deterministic=deterministic))


def media(generated: int = 0) -> MultimodalInputs:
    """Of a prompt of PROMPT tokens with an image of 3 by 4 in it; `generated` tokens came before a retraction."""
    before, after = torch.arange(5).expand(3, -1), torch.arange(9, 12).expand(3, -1)
    image = torch.stack([torch.zeros(12), torch.arange(3).repeat_interleave(4), torch.arange(4).repeat(3)]).long() + 5
    table = torch.cat([before, image, after], dim=1)
    shift = table.max() + 1 - PROMPT
    table = extend_mrope_positions_for_retracted_request(table, generated)
    return MultimodalInputs(mm_items=[], mrope_positions=table, mrope_position_delta=shift.reshape(1, 1))


def steps(mode: ForwardMode, logical: list[int], evicted: list[int], kinds: list, chunk: int = 1):
    """What SGLang would compute from the logical lengths, and what the hook does from those of shortened rows."""
    found = []
    for lost in ([0] * len(logical), evicted):
        lengths = torch.tensor(logical) - torch.tensor(lost)
        forward = ForwardBatch(
            forward_mode=mode, batch_size=len(logical), input_ids=torch.zeros(0), req_pool_indices=torch.zeros(0),
            seq_lens=lengths, seq_lens_cpu=lengths, out_cache_loc=torch.zeros(0), seq_lens_sum=0,
        )  # fmt: skip
        reqs = [SimpleNamespace(triattention=SimpleNamespace(evicted_tokens=count), session=None) for count in lost]
        batch = SimpleNamespace(
            reqs=reqs, multimodal_inputs=kinds, orig_seq_lens=torch.tensor(logical, dtype=torch.int32),
            extend_lens=[chunk] * len(logical), prefix_lens=(lengths - chunk).tolist(),
        )  # fmt: skip
        before = lengths.clone(), list(batch.prefix_lens)
        positions._use_logical_lengths(ForwardBatch._compute_mrope_positions, forward, RUNNER, batch)
        assert torch.equal(forward.seq_lens, before[0])
        assert torch.equal(forward.seq_lens_cpu, before[0])
        assert batch.prefix_lens == before[1]
        found.append(forward.mrope_positions)
    return found


def test_decoded_tokens_follow_image_and_text():
    """Prevents positions that fall back by what a round evicted."""
    kinds = [media(), None, media()]
    expected, found = steps(ForwardMode.DECODE, [150, 90, 45], [64, 32, 0], kinds)
    assert torch.equal(found, expected)
    assert expected[0].tolist() == [149 - 8, 89, 44 - 8]
    assert [rotary_shift_of(SimpleNamespace(multimodal_inputs=one)) for one in kinds] == [-8, 0, -8]


def test_a_retracted_request_is_not_looked_up_by_its_shortened_length():
    """Prevents a position from the table that SGLang extends over a retracted answer, which the short row is within."""
    kinds = [media(generated=100), None]
    expected, found = steps(ForwardMode.DECODE, [150, 90], [64, 0], kinds)
    assert torch.equal(found, expected)
    assert expected[0].tolist() == [149 - 8, 89]


def test_chunks_between_rounds():
    """Prevents the rest of a prefill, of an answer or of a text prompt, from being turned like what was evicted."""
    expected, found = steps(ForwardMode.EXTEND, [110, 300], [40, 128], [media(generated=100), None], chunk=30)
    assert torch.equal(found, expected)
    assert expected[1].tolist() == [*range(80 - 8, 110 - 8), *range(270, 300)]


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2], ids=lambda mode: mode.name)
def test_drafted_tokens_follow_image_and_text(mode):
    """Prevents drafted tokens of a shortened row from being turned like those that a round evicted."""
    kinds, evicted = [media(), None], [64, 32]
    physical = torch.tensor([[150, 151, 151], [90, 91, 92]]) - torch.tensor(evicted)[:, None]
    forward = ForwardBatch(
        forward_mode=mode, batch_size=2, input_ids=torch.zeros(6), req_pool_indices=torch.zeros(2),
        seq_lens=physical[:, 0], out_cache_loc=torch.zeros(6), seq_lens_sum=0, positions=physical.flatten(),
    )  # fmt: skip
    reqs = [SimpleNamespace(triattention=SimpleNamespace(evicted_tokens=count), session=None) for count in evicted]
    batch = SimpleNamespace(
        reqs=reqs, multimodal_inputs=kinds, seq_lens=forward.seq_lens, spec_info=SimpleNamespace(positions=None)
    )
    forward.compute_spec_mrope_positions(RUNNER, batch, seq_positions=forward.positions)
    positions._use_logical_positions(forward, ForwardBatch, batch)
    assert forward.positions.tolist() == [150, 151, 151, 90, 91, 92]
    assert forward.mrope_positions.tolist() == [[142, 143, 143, 90, 91, 92]] * 3


def test_images_are_left_out_once_tokens_are_gone():
    """Prevents SGLang from looking for an image's tokens by their places in a row that was shortened."""
    kinds = [media(), media(), None]
    reqs = [SimpleNamespace(triattention=SimpleNamespace(evicted_tokens=count)) for count in (0, 7, 7)]
    forward = SimpleNamespace(mm_inputs=kinds)
    positions._leave_out_computed_images(forward, SimpleNamespace(reqs=reqs))
    assert forward.mm_inputs == [kinds[0], None, None]
    assert kinds[1] is not None
