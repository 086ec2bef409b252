"""Over compacted pools, FlashInfer attends to exactly the kept tokens of each head.

Each test also runs with `gather`, which reads the same page table in plain torch: a machine without a GPU tests
everything except the FlashInfer calls. Signatures: flashinfer/decode.py and flashinfer/prefill.py.
"""

import pytest
import torch

from paged_cases import GROUP, HEAD_DIM, KV_HEADS, PagedCase, PageTable
from sets import matrix, wide

Q_HEADS = KV_HEADS * GROUP
WORKSPACE = 128 << 20
# Largest error of an attended value. One token more or less changes some value by more, see the last test.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


class Gather:
    """Attention over the slots that a page table names, in float32."""

    ragged = True

    def __init__(self, case: PagedCase) -> None:
        self.k, self.v = case.k, case.v

    def plan(self, table: PageTable, counts: list[int]) -> None:
        self.table, self.counts = table, counts

    def run(self, queries: torch.Tensor) -> torch.Tensor:
        layers = zip(queries, self.k, self.v, strict=True)
        return torch.stack([self._layer(q, self._pages(k), self._pages(v)) for q, k, v in layers])

    def _pages(self, buffer: torch.Tensor) -> torch.Tensor:
        return paged(buffer, self.table.page_size)

    def _layer(self, queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        answers, first = [], 0
        for r, count in enumerate(self.counts):
            pages = self.table.indices[self.table.indptr[r] : self.table.indptr[r + 1]].long().to(k.device)
            length = (len(pages) - 1) * self.table.page_size + int(self.table.last_page_len[r])
            keys, values = (
                x[pages].flatten(0, 1)[:length].float().repeat_interleave(GROUP, 1).transpose(0, 1) for x in (k, v)
            )
            ours = queries[first : first + count].float().transpose(0, 1)
            seen = torch.ones(count, length, dtype=torch.bool, device=k.device).tril(length - count)
            weights = (ours @ keys.mT / HEAD_DIM**0.5).masked_fill(~seen, float("-inf")).softmax(-1)
            answers.append((weights @ values).transpose(0, 1))
            first += count
        return torch.cat(answers).to(queries.dtype)


class FlashInfer:
    """One of FlashInfer's wrappers, planned once for all layers."""

    def __init__(self, case: PagedCase) -> None:
        self.k, self.v, self.dtype = case.k, case.v, case.dtype
        # Zeroed because some of FlashInfer's backends count in it.
        self.workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=case.device)

    def run(self, queries: torch.Tensor) -> torch.Tensor:
        layers = zip(queries, self.k, self.v, strict=True)
        size = self.page_size
        return torch.stack([self.wrapper.run(q, (paged(k, size), paged(v, size))) for q, k, v in layers])

    def _plan(self, *lengths: torch.Tensor, page_size: int, **options) -> None:
        self.page_size = page_size
        self.wrapper.plan(
            *lengths, Q_HEADS, KV_HEADS, HEAD_DIM, page_size, pos_encoding_mode="NONE", sm_scale=HEAD_DIM**-0.5,
            q_data_type=self.dtype, kv_data_type=self.dtype, **options,
        )  # fmt: skip


class Decode(FlashInfer):
    ragged = False
    tensor_cores = False

    def __init__(self, case: PagedCase) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        super().__init__(case)
        options = {"use_tensor_cores": self.tensor_cores, **self.buffers(case)}
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", **options)

    def buffers(self, case: PagedCase) -> dict:
        return {}

    def plan(self, table: PageTable, counts: list[int]) -> None:
        assert set(counts) == {1}
        self._plan(table.indptr, table.indices, table.last_page_len, page_size=table.page_size)


class TensorCoreDecode(Decode):
    tensor_cores = True


class CapturedDecode(Decode):
    """Captured by the first run, replayed by later ones: later plans must come through the buffers."""

    def buffers(self, case: PagedCase) -> dict:
        requests = len(case.rows)
        empty = [
            torch.zeros(n, dtype=torch.int32, device=case.device) for n in (requests + 1, len(case.k[0]), requests)
        ]
        names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
        self.graph = None
        return {"use_cuda_graph": True, **dict(zip(names, empty, strict=True))}

    def run(self, queries: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            self.queries = queries.clone()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                super().run(self.queries)  # loads the kernels, which a capture must not
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.answers = super().run(self.queries)
        self.queries.copy_(queries)
        self.answers.fill_(float("nan"))
        self.graph.replay()
        return self.answers.clone()


class CapturedTensorCoreDecode(CapturedDecode):
    tensor_cores = True


class Prefill(FlashInfer):
    ragged = True

    def __init__(self, case: PagedCase) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        super().__init__(case)
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")

    def plan(self, table: PageTable, counts: list[int]) -> None:
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = (starts, table.indptr, table.indices, table.last_page_len)
        self._plan(*lengths, page_size=table.page_size, causal=True)


def paged(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """[slots, H, D] as [pages, page_size, H, D] without a copy: FlashInfer's layout NHD."""
    return buffer.view(-1, page_size, *buffer.shape[1:])


@pytest.fixture(params=[Gather, Decode, TensorCoreDecode, CapturedDecode, CapturedTensorCoreDecode, Prefill])
def attention(request, device):
    if request.param is not Gather:
        if device != "cuda":
            pytest.skip("FlashInfer's kernels need a CUDA device")
        pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    return request.param


def difference(case: PagedCase, attend, table: PageTable, counts: list[int]) -> float:
    """Plans and runs; returns the largest difference from the attention in float64."""
    queries = case.queries(counts)
    attend.plan(table, counts)
    answer = attend.run(queries.to(case.device))
    assert answer.dtype == case.dtype
    # NaN, read from slots without an owner, stays NaN through `amax`.
    return (answer.cpu().double() - case.expected(queries, counts)).abs().amax().item()


# How K/V is moved, for which kept sets, the page size of the pool, and the page size that FlashInfer gets: SGLang
# plans token by token for every page size.
STRATEGIES = ["fill", "cut", "slide"]
SETS = [("shared", 1, 1), ("per-head", 1, 1), ("shared", 16, 16), ("per-head", 16, 16), ("per-layer-head", 16, 1)]
ROUNDS = [
    *matrix(STRATEGIES, SETS, [*TOLERANCES], strength=1),
    ("remap", SETS[0], torch.bfloat16),
    wide("remap", SETS[0], torch.float16),
]


@pytest.mark.parametrize(("strategy", "how", "dtype"), ROUNDS, ids=str)
def test_attention_is_over_the_kept_tokens(device, attention, strategy, how, dtype):
    """Prevents reading evicted or freed K/V, losing kept K/V, and a captured graph that keeps its initial lengths.

    Requests grow longer and longer; then come a round, more tokens, and a second round that leaves less than ever.
    """
    sets, page_size, view = how
    case = PagedCase(device, dtype, page_size)
    attend = attention(case)

    def check(counts: list[int]) -> None:
        counts = counts if attend.ragged else [1, 1, 1]
        assert difference(case, attend, PageTable.of(case.rows, view), counts) < TOLERANCES[dtype]

    check([1, 3, 2])
    case.compact(strategy, sets, 33)
    assert [len(row) for row in case.rows] == [65, 65, 33]
    # One query each: after "fill", the last places of a row do not hold its newest tokens.
    check([1, 1, 1])
    case.append(7)
    check([1, 3, 2])
    case.compact(strategy, sets, 24)
    assert [len(row) for row in case.rows] == [56, 56, 24]
    check([1, 1, 1])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("mistake", ["a token too few", "a token twice", "another's token", "an evicted token"])
def test_one_wrong_token_is_noticed(device, mistake, dtype):
    """Prevents a tolerance under which the test above could not fail."""
    case = PagedCase(device, dtype, 1)
    case.compact("remap", "shared", 33)
    rows = [row.clone() for row in case.rows]
    if mistake == "a token too few":
        rows[0] = rows[0][:-1]
    elif mistake == "a token twice":
        rows[0][-1] = rows[0][-2]
    elif mistake == "another's token":
        rows[0][-1] = rows[1][-1]
    else:
        rows[0][-1] = next(slot for slot in range(len(case.k[0])) if case.k[0][slot].isnan().all())
    assert not difference(case, Gather(case), PageTable.of(rows, 1), [1, 1, 1]) < TOLERANCES[dtype]


def test_page_tables_name_pages_in_row_order():
    """Prevents one page too many when the last one is full, and counting tokens instead of pages."""
    rows = [torch.tensor([8, 9, 10, 11, 4]), torch.arange(12, 16), torch.tensor([0])]
    table = PageTable.of(rows, 4)
    assert table.indptr.tolist() == [0, 2, 3, 4]
    assert table.indices.tolist() == [2, 1, 3, 0]
    assert table.last_page_len.tolist() == [1, 4, 1]
    tokens = PageTable.of(rows, 1)
    assert tokens.indices.tolist() == torch.cat(rows).tolist()
    assert tokens.last_page_len.tolist() == [1, 1, 1]
    assert {x.dtype for x in (table.indptr, table.indices, table.last_page_len)} == {torch.int32}
