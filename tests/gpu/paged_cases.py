"""Requests that decode in a paged KV pool and are compacted, and attention over what they kept, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_triattn.kernels.compact.reference import cut_column, remap
from sglang_triattn.kernels.mover import Mover

LAYERS, KV_HEADS, GROUP, HEAD_DIM = 2, 2, 4, 64
FROZEN = 32
"""Tokens of the prefix that the first two requests share; whole pages."""
RECENT = 4


@dataclass(frozen=True)
class PageTable:
    """What FlashInfer plans with, int32 on the host: the pages of all requests, one request after the other."""

    indptr: torch.Tensor
    """[R + 1]: where the pages of each request begin."""
    indices: torch.Tensor
    """[indptr[-1]]: pages in row order."""
    last_page_len: torch.Tensor
    """[R]: tokens on the last page of each request, 1 to page_size."""
    page_size: int

    @staticmethod
    def of(rows: list[torch.Tensor], page_size: int) -> PageTable:
        """Builds the table; rows: each request's slots in row order, at least one; pages contiguous and aligned."""
        pages = [row[::page_size] // page_size for row in rows]
        indptr = torch.tensor([0, *map(len, pages)]).cumsum(0)
        last = torch.tensor([(len(row) - 1) % page_size + 1 for row in rows])
        return PageTable(indptr.int(), torch.cat(pages).int(), last.int(), page_size)


class PagedCase:
    """Three requests of different lengths: two share a frozen prefix, the third has none.

    The pool is NaN wherever no request holds a token, including after the last token of a page: reading evicted, freed
    or never owned K/V gives NaN.

    Attributes:
        k, v: per layer [slots, H_kv, D].
        rows: per request [physical length] int64, slots in row order.
        held: per request [L, H_kv, physical length] int64, the tokens that each head kept, in no particular order.
    """

    def __init__(self, device: str, dtype: torch.dtype, page_size: int) -> None:
        self._random = torch.Generator().manual_seed(0)
        private = (65, 49, 81)
        self.page_size, self.device, self.dtype = page_size, device, dtype
        pages = 2 * (FROZEN + sum(private)) // page_size + 8
        shape = (pages * page_size, KV_HEADS, HEAD_DIM)
        self.k, self.v = (
            [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(LAYERS)] for _ in "kv"
        )
        self._free = torch.randperm(pages, generator=self._random).tolist()
        self.frozen = [FROZEN, FROZEN, 0]
        # Per request [2, L, H_kv, tokens, D]: K and V of every token that it ever had.
        self._all = [torch.empty(2, LAYERS, KV_HEADS, 0, HEAD_DIM, dtype=dtype) for _ in private]
        self.rows = [torch.empty(0, dtype=torch.int64) for _ in private]
        self.held = [torch.empty(LAYERS, KV_HEADS, 0, dtype=torch.int64) for _ in private]
        self._grow(0, FROZEN)
        self.rows[1], self._all[1], self.held[1] = (x[0].clone() for x in (self.rows, self._all, self.held))
        for request, tokens in enumerate(private):
            self._grow(request, tokens)

    def append(self, tokens: int) -> None:
        """Every request decodes `tokens` more tokens."""
        for request in range(len(self.rows)):
            self._grow(request, tokens)

    def _grow(self, request: int, tokens: int) -> None:
        new = torch.randn(2, LAYERS, KV_HEADS, tokens, HEAD_DIM, generator=self._random).to(self.dtype)
        first = self._all[request].shape[3]
        self._all[request] = torch.cat([self._all[request], new], 3)
        ids = torch.arange(first, first + tokens).expand(LAYERS, KV_HEADS, -1)
        self.held[request] = torch.cat([self.held[request], ids], 2)
        row = self.rows[request].tolist()
        for _ in range(tokens):
            place = len(row) % self.page_size
            row.append(row[-1] + 1 if place else self._free.pop() * self.page_size)
        self.rows[request] = torch.tensor(row)
        slots = self.rows[request][len(row) - tokens :].to(self.device)
        for layer in range(LAYERS):
            self.k[layer][slots], self.v[layer][slots] = new[:, layer].transpose(1, 2).to(self.device)

    def compact(self, strategy: str, sets: str, keep: int) -> None:
        """Runs one round of all requests: `keep` private tokens stay, the newest and random others.

        Args:
            strategy: "remap", "slide", "fill" at the row's end, or "cut", which is "fill" before the newest tokens.
            sets: "shared", "per-head" or "per-layer-head".
        """
        private = [row[frozen:] for row, frozen in zip(self.rows, self.frozen, strict=True)]
        padded = torch.stack([torch.cat([row, row[:1].expand(max(map(len, private)) - len(row))]) for row in private])
        kept = torch.stack([self._random_set(len(row), keep, sets) for row in private])
        slots = padded.int().to(self.device)
        places = [self._places(request) for request in range(len(private))]
        if strategy == "remap":
            left = [row.long() for row in remap(slots, kept.to(self.device)).cpu()]
        else:
            cut, how = keep, strategy
            if strategy == "cut":
                how, lost = "fill", [len(row) - keep for row in private]
                sizes = zip(self.frozen, lost, strict=True)
                (cut,) = {cut_column(keep, RECENT, frozen, evicted, self.page_size) for frozen, evicted in sizes}
            lengths = torch.tensor([len(row) for row in private], device=self.device)
            Mover(self.k, self.v, kernels=True).move(slots, kept.to(self.device), how, cut=cut, lengths=lengths)
            left = [torch.cat([row[:cut], row[cut + len(row) - keep :]]) for row in private]
        for request, frozen in enumerate(self.frozen):
            each = kept[request].view(*[1] * (3 - kept[request].ndim), *kept[request].shape)
            each = each.expand(LAYERS, KV_HEADS, -1) + frozen
            self.held[request] = torch.cat([places[request][..., :frozen], places[request].gather(2, each)], 2)
            self.rows[request] = torch.cat([self.rows[request][:frozen], left[request][:keep]])
        self._release()

    def _random_set(self, private: int, keep: int, sets: str) -> torch.Tensor:
        """[*heads, keep] int64, ascending indices into the private part."""
        shape = {"shared": (), "per-head": (KV_HEADS,), "per-layer-head": (LAYERS, KV_HEADS)}[sets]
        older = torch.rand(*shape, private - RECENT, generator=self._random).argsort(-1)[..., : keep - RECENT]
        return torch.cat([older, torch.arange(private - RECENT, private).expand(*shape, -1)], -1).sort(-1).values

    def _places(self, request: int) -> torch.Tensor:
        """[L, H_kv, physical length] int64: which token is where, found by its key, as "fill" promises no order."""
        keys = torch.stack([k[self.rows[request].to(self.device)] for k in self.k]).cpu().transpose(1, 2)
        same = (keys[..., :, None, :] == self._all[request][0][..., None, :, :]).all(-1)
        assert (same.sum(-1) == 1).all(), "a place of the row holds no token of its request"
        places = same.int().argmax(-1)
        assert torch.equal(places.sort(-1).values, self.held[request].sort(-1).values), "a kept token was lost"
        return places

    def _release(self) -> None:
        """Frees every page that no row names, and poisons every slot that holds no token of a row."""
        owned = torch.cat(self.rows)
        lost = torch.ones(len(self.k[0]), dtype=torch.bool)
        lost[owned] = False
        for buffer in (*self.k, *self.v):
            buffer[lost.to(self.device)] = float("nan")
        pages = set((owned // self.page_size).tolist())
        self._free = [page for page in range(len(lost) // self.page_size) if page not in pages]

    def queries(self, counts: list[int]) -> torch.Tensor:
        """[L, sum of counts, H_q, D]: queries of each request's newest tokens, one request after the other."""
        shape = (LAYERS, sum(counts), KV_HEADS * GROUP, HEAD_DIM)
        return torch.randn(shape, generator=self._random).to(self.dtype)

    def expected(self, queries: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """float64, shaped like `queries`: attention over exactly each head's kept tokens, up to the query's own."""
        answers, first = [], 0
        for request, count in enumerate(counts):
            newest = self._all[request].shape[3]
            for back in range(count - 1, -1, -1):
                answers.append(self._attend(request, queries[:, first].double(), newest - back))
                first += 1
        return torch.stack(answers, 1)

    def _attend(self, request: int, query: torch.Tensor, end: int) -> torch.Tensor:
        """[L, H_q, D] from `query` [L, H_q, D] over the kept tokens before token `end`."""
        answer = torch.empty_like(query)
        for layer in range(LAYERS):
            for head in range(KV_HEADS * GROUP):
                tokens = self.held[request][layer, head // GROUP]
                keys, values = self._all[request][:, layer, head // GROUP, tokens[tokens < end]].double()
                weights = torch.softmax(keys @ query[layer, head] / HEAD_DIM**0.5, 0)
                answer[layer, head] = weights @ values
        return answer
