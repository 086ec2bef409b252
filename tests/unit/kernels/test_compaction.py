"""The device's part of a round, slice by slice: the same as for all requests at once, and in little memory."""

import itertools
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from sglang_triattn.kernels import device_round
from sglang_triattn.kernels.compact.reference import unchanged_start
from sglang_triattn.kernels.device_round import SLICE_BYTES, compact_rows, request_bytes
from sglang_triattn.kernels.launcher import Launcher
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.score.tables import build_tables
from sglang_triattn.kernels.scorer import Chosen, Scorer
from sglang_triattn.kernels.select import SELECTIONS, selection_named

LAYERS, HEADS = 2, 2


class Server:
    """A scorer and a mover over a pool of `slots`; on the meta device everything has a size but no memory."""

    def __init__(
        self,
        selection: str,
        *,
        layers=LAYERS,
        heads=HEADS,
        slots=500,
        device="cpu",
        num_tokens=100,
        share=0.0,
        **options,
    ):
        generator = torch.Generator().manual_seed(0)
        mean = torch.complex(*torch.randn(2, layers, heads, 8, generator=generator))
        tables = build_tables(mean, 1.2 * mean.abs(), torch.ones(8), 1.0, "half", heads, device)
        self.k, self.v = (
            [torch.randn(slots, heads, 16, generator=generator).to(device) for _ in range(layers)] for _ in "kv"
        )
        scores = {"num_tokens": num_tokens, "longest": num_tokens, "selection": selection}
        values = {"v_buffers": self.v, "value_share": share}
        self.scorer = Scorer(self.k, tables, **scores, **values, **options)
        self.mover = Mover(self.k, self.v, **options)


@pytest.mark.parametrize(
    ("selection", "strategy", "cut"),
    [*((s, "remap", None) for s in SELECTIONS if selection_named(s).shared),
     *((s, *how) for s, how in itertools.product(SELECTIONS, (("slide", None), ("fill", None), ("fill", 14))))],
)  # fmt: skip
def test_slices_change_nothing(monkeypatch, selection, strategy, cut):
    """Prevents a request from getting another's tokens, first hole or row when the requests go slice by slice."""
    lengths = torch.tensor([40, 33, 20, 37, 40])
    slots = torch.randperm(500, generator=torch.Generator().manual_seed(1))[:200].int().view(5, 40)
    arguments = slots, lengths, lengths + 100, 20, 4, strategy, cut
    each = request_bytes(Server(selection).scorer, 20, 40, strategy)
    results = []
    for limit in (SLICE_BYTES, 2 * each, each, 1):
        monkeypatch.setattr(device_round, "SLICE_BYTES", limit)
        server = Server(selection)
        answer = compact_rows(server.scorer, server.mover, *arguments)
        results.append([*answer, *server.k, *server.v])
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("cut", [0, 11, 16, None])
def test_a_row_is_unchanged_up_to_its_cut(cut):
    """Prevents the tree from taking newest tokens, which moved up to the cut, for those that were there before."""
    server, kept = Server("per-layer-head"), torch.arange(20).repeat(2, LAYERS, HEADS, 1)
    kept[1, 0, 1, 12:16] += 2
    kept[..., 16:] = torch.arange(36, 40)
    server.scorer.in_turn = lambda *_, **__: [Chosen(slice(0, 2), kept)]
    slots, lengths = torch.arange(80).view(2, 40), torch.tensor([40, 40])
    unchanged, _ = compact_rows(server.scorer, server.mover, slots, lengths, lengths, 20, 4, "fill", cut)
    assert unchanged.tolist() == [16 if cut is None else cut, min(12, 16 if cut is None else cut)]


def storages(tree) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in tree_iter(tree) if isinstance(each, torch.Tensor)]


class Live(TorchDispatchMode):
    """Counts the bytes of new tensors that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # A view shares the storage of its base.
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(result):
            if storage._cdata not in given:
                self._born(storage)
        return result

    def _born(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.bytes += size
        self.most = max(self.most, self.bytes)
        weakref.finalize(storage, self._died, size)

    def _died(self, size: int) -> None:
        self.bytes -= size


@pytest.fixture
def no_launches(monkeypatch):
    """Launches no kernels; the launching code allocates what it would on a GPU."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    monkeypatch.setattr(Launcher, "__call__", lambda *_: None)


def peak(selection: str, strategy: str, *, requests: int, num_tokens: int, keep: int, share: float = 0.0) -> int:
    """Bytes that a round of a model with 36 layers and 8 KV heads takes on top of what is held anyway."""
    options = {"layers": 36, "heads": 8, "slots": 16, "device": "meta", "kernels": True, "num_tokens": num_tokens}
    server = Server(selection, share=share, **options)
    lengths = torch.empty(requests, dtype=torch.int64, device="meta")
    slots = torch.empty(requests, num_tokens, dtype=torch.int32, device="meta")
    with Live() as live:
        cut = keep - 128 if strategy == "fill" else None
        compact_rows(server.scorer, server.mover, slots, lengths, lengths, keep, 128, strategy, cut)
    assert live.most > 0
    return live.most


@pytest.mark.parametrize(("num_tokens", "keep"), [(2176, 2048), (6000, 2048), (40_000, 1024)])
@pytest.mark.parametrize(
    ("selection", "strategy", "share"),
    [("union", "remap", 0), ("shared-mean", "fill", 0), ("per-head", "slide", 0),
     *(("per-layer-head", strategy, share) for strategy in ("fill", "slide") for share in (0, 0.75)),
     ("per-layer-head", "fill", 1)],
)  # fmt: skip
def test_memory_of_a_round_is_bounded(no_launches, selection, strategy, share, num_tokens, keep):
    """Prevents running out of memory under load: the plan that sized the KV pool includes none of this."""
    remaps = strategy == "remap"
    most = peak(selection, strategy, requests=256, num_tokens=num_tokens, keep=keep, share=share)
    assert most <= (SLICE_BYTES + 256 * num_tokens * 4 if remaps else 0) + (1 << 20)
    one = peak(selection, strategy, requests=1, num_tokens=num_tokens, keep=keep, share=share)
    each = 42 * num_tokens if remaps else 0
    assert 0.5 * each <= one <= each + num_tokens * 4 + (1 << 16)


def test_first_hole_is_found_in_little_memory():
    """Prevents int64 copies of all kept sets just to compute one number per request."""
    kept = torch.arange(64).repeat(3, 4, 1)
    kept[0, 1, 5:] += 1
    kept[1, :, 60:] += 2
    with Live() as live:
        assert unchanged_start(kept).tolist() == [5, 60, 64]
    assert live.most < kept.numel() * 2
