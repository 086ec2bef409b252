"""Rounds of the real compressor with the Triton kernels instead of their references.

Not collected by itself: tests/slow/test_interpreted.py runs it in a process with Triton's interpreter.
"""

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.memory import allocator as kernels_of_sglang
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

from checks import check_books, check_row, decode_together
from sets import matrix, shown, wide
from sglang_triattn.kernels.launcher import Launcher
from sglang_triattn.kernels.select import keep_kernel
from sglang_triattn.patches.request import compressed as requests_patch
from sglang_triattn.patches.rounds import rehearsal
from sglang_triattn.request.options import CompressionOptions
from simulation import CONTEXT, Simulation


def history(**options) -> list[torch.Tensor]:
    """Positions that three requests of unequal length hold at the end, after a few rounds each."""
    sim = Simulation(**options)
    requests = [sim.request([5] * 8 + [tail] * (1 + tail)) for tail in range(3)]
    for request in requests:
        assert sim.admit(request, 1000)
    decode_together(sim, requests, 29)
    assert sim.rounds >= 6
    check_books(sim)
    for request in requests:
        check_row(sim, request)
    return [request.positions for request in requests]


SETTINGS = [
    {"selection": "shared-mean"},
    {"selection": "union", "budget_scope": "total"},
    {"selection": "per-head"},
    {"selection": "per-layer-head", "recent": 10},
    {"selection": "per-layer-head", "value_share": 0.75},
    {"selection": "per-layer-head", "value_share": 1.0},
    {"selection": "per-layer-head", "value_share": 1.0, "recency": 0.5},
]


@pytest.mark.parametrize(("page_size", "settings"), matrix([1, 4], SETTINGS, strength=1), ids=shown)
def test_kernels_keep_what_their_references_keep(page_size, settings):
    """Prevents arguments from reaching a kernel in another dtype, order or unit than its reference understands."""
    with_kernels, without = (history(page_size=page_size, kernels=kernels, **settings) for kernels in (True, False))
    for one, other in zip(with_kernels, without, strict=True):
        assert torch.equal(one, other)


def recording(seen: set) -> Callable:
    """What launches a kernel, and records its name and the compile-time settings that it is launched with."""

    def launch(launcher: Launcher, grid: tuple, *arguments) -> None:
        settings = tuple(sorted((key, str(value)) for key, value in launcher._settings.items()))
        seen.add((launcher._kernel.fn.__name__, settings))
        LAUNCH(launcher, grid, *arguments)

    return launch


LAUNCH = Launcher.__call__


def rehearse(sim: Simulation) -> None:
    """The warm-up of a launch, as if the simulation's scheduler had a CUDA device."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    module = SimpleNamespace(current_stream=lambda: None, stream=lambda stream: nullcontext(), synchronize=lambda: None)
    scheduler = SimpleNamespace(device="cuda", device_module=module, enable_overlap=True, forward_stream=stream)
    rehearsal.rehearse(scheduler, sim.compressor)


SELECTIONS = [("union", 0), ("shared-mean", 0), ("per-head", 0), *(("per-layer-head", share) for share in (0, 0.75, 1))]


WARMED_UP = [(1, ("per-layer-head", 0.75)), (4, ("shared-mean", 0))]
OTHERS = [each for each in itertools.product([1, 4], SELECTIONS) if each not in WARMED_UP]


@pytest.mark.parametrize(("page_size", "selection"), [*WARMED_UP, *(wide(*each) for each in OTHERS)])
def test_the_warm_up_compiles_all_that_rounds_launch_and_writes_nothing(page_size, selection, monkeypatch):
    """Prevents a compilation while requests wait, and a warm-up that touches a slot, a row or the books."""
    rehearsed, served = set(), set()
    # Makes rows of these lengths long, both for one program and for the memory of all layers.
    monkeypatch.setattr(keep_kernel, "BLOCK", 16)
    sim = Simulation(page_size, kernels=True, selection=selection[0], value_share=selection[1])
    kept = sim.config.budget
    small = {"num_tokens": 20, "limit": 0, "most_kept": kept}
    sim.compressor._scorer.plan = dataclasses.replace(sim.compressor.workspace_plan, **small)
    assert sim.compressor.workspace_plan.launch(CONTEXT, kept, kept) == (1, 1)
    generator = torch.Generator().manual_seed(1)
    buffers = [*sim.pool.k_buffer, *sim.pool.v_buffer]
    for buffer in buffers:
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    before = [buffer.clone() for buffer in (*buffers, sim.rows.req_to_token, sim.allocator.get_all_free_pages())]
    monkeypatch.setattr(Launcher, "__call__", recording(rehearsed))
    rehearse(sim)
    after = (*buffers, sim.rows.req_to_token, sim.allocator.get_all_free_pages())
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    check_books(sim)
    monkeypatch.setattr(Launcher, "__call__", recording(served))
    for settings in ({}, {"recent": 9, "interval": 5}, {"budget": 6, "interval": 4}):
        request = sim.request([5] * 4)
        requests_patch.attach_options(request.req, CompressionOptions(dataclasses.replace(sim.config, **settings)))
        assert sim.admit(request, 1000)
        for _ in range(26):
            sim.compress()
            assert sim.decode(request)
    assert sim.rounds > 3
    assert served
    assert served <= rehearsed
    assert {name for name, _ in served} == {name for name, _ in rehearsed}


class Recorded:
    """A kernel of SGLang's that records what Triton compiles it anew for: dtypes of tensors, and constants."""

    def __init__(self, kernel, name: str, seen: set) -> None:
        self._kernel, self._name, self._seen = kernel, name, seen

    def __getitem__(self, grid):
        def launch(*args, **settings):
            shown = (str(getattr(each, "dtype", each)) for each in args)
            self._seen.add((self._name, *(each for place, each in enumerate(shown) if place != NUM_PAGES)))
            return self._kernel[grid](*args, **settings)

        return launch


NUM_PAGES = 5
"""Place of the argument that SGLang's kernel is not specialized for."""


@pytest.mark.parametrize("page_size", [wide(1), 4])
def test_the_warm_up_compiles_what_frees_window_slots(page_size, monkeypatch):
    """Prevents the first round of a model with window pools from compiling SGLang's kernel while requests wait, and a
    warm-up that frees a slot."""
    rehearsed, served = set(), set()
    name = "get_and_clear_swa_pages_kernel"
    kernel = getattr(kernels_of_sglang, name)
    monkeypatch.setattr(SWATokenToKVPoolAllocator, "_free_swa_pages_none_cuda", _as_on_cuda)
    sim = Simulation(page_size, window=3, selection="per-head", kernels=True)
    mapping, free = sim.allocator.full_to_swa_index_mapping.clone(), sim.allocator.swa_available_size()
    monkeypatch.setattr(kernels_of_sglang, name, Recorded(kernel, name, rehearsed))
    rehearse(sim)
    assert torch.equal(sim.allocator.full_to_swa_index_mapping, mapping)
    assert sim.allocator.swa_available_size() == free
    monkeypatch.setattr(kernels_of_sglang, name, Recorded(kernel, name, served))
    request = sim.request([5] * 4)
    assert sim.admit(request, 1000)
    for _ in range(26):
        sim.compress()
        assert sim.decode(request)
    assert sim.rounds
    assert served
    assert served <= rehearsed


def _as_on_cuda(allocator: SWATokenToKVPoolAllocator, representatives: torch.Tensor) -> torch.Tensor:
    return allocator._free_swa_pages_cuda(representatives)
