"""The quick look at whether the next step may lack slots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_triattn.patches.request.compressed import attach_options
from sglang_triattn.patches.rounds.memory_pressure import most_of_next_step
from sglang_triattn.request.options import CompressionOptions


@pytest.mark.parametrize("extra", [0, 8])
def test_rows_of_a_decode_server_are_counted(extra):
    """Prevents a decode server, which has rows for requests in transfer, from finding that no request holds a row."""
    size, taken, page_size = 4, 3, 16
    arguments = {"max_context_len": 8, "device": "cpu", "enable_memory_saver": False}
    rows = DecodeReqToTokenPool(size, pre_alloc_size=extra, **arguments) if extra else ReqToTokenPool(size, **arguments)
    del rows.free_slots[:taken]
    request = SimpleNamespace(beam_group=None, skip_radix_cache_insert=False)
    attach_options(request, CompressionOptions(None))
    assert most_of_next_step(SimpleNamespace(req_to_token_pool=rows), request, page_size) == taken * page_size
