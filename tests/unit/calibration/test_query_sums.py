"""Streaming sums of queries, and the file in which an interrupted calibration keeps its place."""

import pytest
import torch

from sglang_triattn.calibration.job import CalibrationError, CalibrationJob
from sglang_triattn.calibration.query_sums import QuerySums, Sums, join_heads
from sglang_triattn.calibration.resume import Progress, load_progress, partial_path, remove_progress, save_progress
from sglang_triattn.model.rope import Rope, rotate, to_complex

ROPE = Rope(10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4), 1.25, 8, "half")


def measured(queries: torch.Tensor, passes: int = 1) -> Sums:
    """Sums of pre-RoPE queries [L, H, S, d] that arrive rotated, in several passes."""
    sums = QuerySums(ROPE, [True] * len(queries))
    positions = torch.arange(100, 100 + queries.shape[2])
    for part, where in zip(queries.chunk(passes, dim=2), positions.chunk(passes), strict=True):
        for layer, query in enumerate(part):
            sums.add(layer, rotate(query, where, ROPE), where)
        sums.end_pass(len(where))
    return sums.read()


def test_sums_are_those_of_unrotated_queries():
    """Prevents queries un-rotated at the wrong positions, with the scaling left in, or weighted unequally."""
    queries = torch.randn(3, 2, 60, 8)
    z = to_complex(queries.double(), ROPE)
    for passes in (1, 4):
        mean, abs_mean, unrotated = measured(queries, passes).means()
        assert unrotated.shape == (3, 2, 0)
        torch.testing.assert_close(mean.to(torch.complex128), z.mean(2), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(abs_mean.double(), z.abs().mean(2), rtol=1e-5, atol=1e-5)


def test_sums_of_dims_and_layers_without_rope():
    """Prevents dims or layers that RoPE leaves alone from being turned back all the same, and their means from being
    lost where ranks and runs are joined."""
    queries, rotates = torch.randn(2, 4, 60, 14), (True, False)
    positions = torch.arange(60)

    def part(heads: slice, tokens: slice) -> Sums:
        sums = QuerySums(ROPE, rotates)
        for index, query in enumerate(queries[:, heads, tokens]):
            where = positions[tokens]
            sums.add(index, rotate(query, where, ROPE) if rotates[index] else query, where)
        sums.end_pass(len(positions[tokens]))
        return sums.read()

    heads, runs = (slice(0, 2), slice(2, 4)), (slice(0, 25), slice(25, 60))
    first, second = (join_heads([part(own, tokens) for own in heads]) for tokens in runs)
    mean, abs_mean, unrotated = second.plus(first).means()
    z = to_complex(queries.double(), ROPE)
    torch.testing.assert_close(mean.to(torch.complex128), z.mean(2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(abs_mean.double(), z.abs().mean(2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(unrotated.double(), queries[..., 8:].double().mean(2), rtol=1e-5, atol=1e-5)


def test_queries_of_all_layers_that_read_one_kv():
    """Prevents statistics of one reader alone, and a reader that was not seen from being overlooked."""
    queries = torch.randn(4, 2, 30, 8)
    sums, where = QuerySums(ROPE, [True, True], [0, 1, 1, 1]), torch.arange(30)
    for place, query in zip((0, 1, 1, 1), queries, strict=True):
        sums.add(place, rotate(query, where, ROPE), where)
    sums.end_pass(30)
    mean, abs_mean, _ = sums.read().means()
    z = to_complex(queries.double(), ROPE)
    for found, each in ((mean.to(torch.complex128), z), (abs_mean.double(), z.abs())):
        torch.testing.assert_close(found[0], each[0].mean(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1], each[1:].mean((0, 2)), rtol=1e-5, atol=1e-5)
    for place in (0, 1, 1):
        sums.add(place, queries[0], where)
    with pytest.raises(CalibrationError, match="of 2 layers could be observed"):
        sums.end_pass(30)


def test_memory_does_not_grow_with_the_text():
    """Prevents buffering the queries of all tokens."""
    sums = QuerySums(ROPE, [True])
    for _ in range(3):
        sums.add(0, torch.randn(2, 50, 11), torch.arange(50))
        sums.end_pass(50)
    (kept,) = sums._parts
    assert sum(tensor.numel() for tensor in kept) == 2 * (4 + 4 + 3)
    assert not sums._seen


def test_ranks_and_runs_are_joined():
    """Prevents heads of ranks in the wrong order, and tokens of an earlier run that are lost or counted twice."""
    queries = torch.randn(3, 4, 60, 8)
    whole = measured(queries)
    ranks = join_heads([measured(queries[:, :2]), measured(queries[:, 2:])])
    runs = measured(queries[:, :, 30:])
    first = measured(queries[:, :, :30])
    assert ranks.count == whole.count == 60
    torch.testing.assert_close(ranks.total, whole.total)
    assert first.plus(None) is first
    assert runs.plus(first).count == 60


@pytest.mark.parametrize("layers", [[0], [0, 0, 1], [0, 1, 1]])
def test_every_layer_counts_once(layers):
    """Prevents statistics of a model with layers that were not seen, or were seen twice."""
    sums = QuerySums(ROPE, [True, True])
    for layer in layers:
        sums.add(layer, torch.randn(2, 5, 8), torch.arange(5))
    with pytest.raises(CalibrationError, match="of 2 layers could be observed"):
        sums.end_pass(5)


def test_nan_is_refused():
    """Prevents statistics that no later check could explain."""
    with pytest.raises(CalibrationError, match="NaN or infinite"):
        measured(torch.full((1, 1, 5, 8), torch.nan)).means()


def job(tmp_path, **changes) -> CalibrationJob:
    fields = {
        "windows": ((1, 2), (3, 4)),
        "identity": "model",
        "partial": str(partial_path(tmp_path / "s.safetensors")),
    }
    return CalibrationJob(**fields | changes)


def test_place_is_kept(tmp_path):
    """Prevents sums from being lost at an interruption, or coming back rounded."""
    sums = measured(torch.randn(2, 2, 9, 13))
    save_progress(job(tmp_path), Progress(1, sums))
    found = load_progress(job(tmp_path))
    assert (found.done, found.sums.count, found.sums.head_dim) == (1, 9, 13)
    assert torch.equal(found.sums.total, sums.total)
    assert torch.equal(found.sums.abs_total, sums.abs_total)
    assert torch.equal(found.sums.unrotated, sums.unrotated)
    assert [path.name for path in tmp_path.iterdir()] == ["s.partial.safetensors"]
    remove_progress(job(tmp_path))
    assert not list(tmp_path.iterdir())
    assert load_progress(job(tmp_path)).done == 0


@pytest.mark.parametrize(
    "change", [{"windows": ((1, 2), (3, 5))}, {"prompts": ((1,),)}, {"seed": 1}, {"identity": "other"}], ids=str
)
def test_place_of_another_job_is_not_taken(tmp_path, change):
    """Prevents one file from mixing the queries of two models, texts or settings."""
    save_progress(job(tmp_path), Progress(1, measured(torch.randn(2, 2, 9, 8))))
    assert load_progress(job(tmp_path, **change)).sums is None


@pytest.mark.parametrize("content", [b"", b"\x00" * 200, b"text"])
def test_damaged_place_means_the_start(tmp_path, content):
    """Prevents a damaged file from stopping every later run."""
    partial_path(tmp_path / "s.safetensors").write_bytes(content)
    assert load_progress(job(tmp_path)).sums is None


def test_job_without_a_file_keeps_none(tmp_path, monkeypatch):
    """Prevents a server that calibrates itself from leaving files on the disk."""
    monkeypatch.chdir(tmp_path)
    save_progress(job(tmp_path, partial=None), Progress(1, measured(torch.randn(1, 1, 4, 8))))
    assert not list(tmp_path.iterdir())
