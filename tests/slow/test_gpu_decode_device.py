"""The parts of the decode benchmark that need a GPU, on a fake one: graphs, streams and FlashInfer's wrapper."""

import inspect
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fake_cuda
from benchmarks.decode import attention, bench, cli, model, step, tables
from decode_runs import TOY, run_decode

COMPILED_ATTENTION = Path(__file__).parents[1] / "support" / "common" / "compiled_attention.py"


def test_graphs_on_a_pretended_device(monkeypatch, tmp_path):
    """Prevents calls of torch.cuda that do not exist, and a captured step that reads the host's values at capture.

    A recorded graph replays the operations of its capture on the very same tensors.
    """
    log = fake_cuda.pretend_cuda(monkeypatch)
    monkeypatch.setattr(bench, "Eager", step.CudaGraphs)

    class Whole(attention.TorchAttention):
        """Reads lengths only on the device."""

        name = "whole"

        def plan(self, lengths):
            self._longest = self._rows.slots.shape[1]

    monkeypatch.setattr(cli, "choose", lambda *given: Whole)
    content = run_decode(tmp_path / "graphs.json", "--memories", "2")
    assert content["rows"][0]["compressed_tokens_s"] > 0
    assert content["rows"][0]["round_us"] > 0
    # One graph for the grid's batch size, and one for each batch size at a fixed memory.
    assert len(log.graphs) == 3
    assert all(graph.replays > 10 for graph in log.graphs)

    monkeypatch.setattr(cli, "choose", lambda *given: attention.TorchAttention)
    with pytest.raises(SystemExit, match=r"launched one by one differ|exactly the kept tokens"):
        run_decode(tmp_path / "stale.json")


def test_flashinfer_is_planned_as_its_signatures_are(monkeypatch):
    """Prevents arguments that the pinned FlashInfer does not take, and tables of other slots than the rows hold."""
    flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer has no wheel for this platform")
    real = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    fast = flashinfer.decode.fast_decode_plan
    plans = []

    class Wrapper:
        def __init__(self, *given, **options):
            bound = inspect.signature(real.__init__).bind(self, *given, **options).arguments
            assert bound["use_cuda_graph"]
            assert bound["use_tensor_cores"]
            assert bound["kv_layout"] == "NHD"
            self.tables = [bound[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")]
            assert {table.dtype for table in self.tables} == {torch.int32}

        def plan(self, *given, **options):
            self.check(inspect.signature(real._plan_impl).bind(self, *given, **options).arguments, "indptr")

        def check(self, bound: dict, host: str):
            plans.append(host)
            assert bound[host].device.type == "cpu"
            assert bound[host].tolist() == self.tables[0].tolist()
            assert bound["indices"].data_ptr() == self.tables[1].data_ptr()
            assert len(bound["last_page_len"]) == len(bound[host]) - 1
            sizes = [bound[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")]
            assert sizes == [8, 2, 16, 1]
            assert bound["sm_scale"] == 0.25
            assert bound["q_data_type"] == bound["kv_data_type"] == torch.bfloat16

        def run(self, *given):
            bound = inspect.signature(real.run).bind(self, *given).arguments
            queries, (k, v) = bound["q"], bound["paged_kv_cache"]
            starts, indices, _ = self.tables
            parts = [indices[a:b].long() for a, b in itertools.pairwise(starts)]
            answers = []
            for query, slots in zip(queries, parts, strict=True):
                keys, values = (x[slots, 0].float().repeat_interleave(4, 1) for x in (k, v))
                weights = torch.einsum("hd,nhd->hn", query.float(), keys).mul(0.25).softmax(-1)
                answers.append(torch.einsum("hn,nhd->hd", weights, values))
            return torch.stack(answers).to(queries.dtype)

    def fast_plan(*given, **options):
        bound = inspect.signature(fast).bind(*given, **options).arguments
        bound["self"].check(bound, "global_override_indptr_cpu")

    monkeypatch.setattr(flashinfer, "BatchDecodeWithPagedKVCacheWrapper", Wrapper)
    monkeypatch.setattr(flashinfer.decode, "fast_decode_plan", fast_plan)
    kind = attention.choose("flashinfer", TOY, "cpu")
    setting = bench.Setting(TOY, 2, [3], [256], [64], 8, [], 1, "cpu", scale=16)
    made, errors = bench.Bench(setting, kind), tables.Errors()
    plans.clear()
    rows = tables.grid(made, errors, 3)
    assert rows[0]["compressed_tokens_s"] > 0
    assert plans[0] == "indptr"
    assert set(plans[1:]) == {"global_override_indptr_cpu"}


def test_flashinfer_that_fails(monkeypatch, capsys):
    """Prevents figures for another attention than requested, and a traceback if FlashInfer cannot compile."""
    shape = model.SHAPES["Qwen3-8B"]
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: object())
    failing = lambda *given: (_ for _ in ()).throw(RuntimeError("no nvcc\nand more"))  # noqa: E731
    monkeypatch.setattr(attention, "_try_out", failing)
    assert attention.choose("auto", shape, "cuda") is attention.TritonAttention
    assert "FlashInfer does not work here (no nvcc)" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="take --attention triton"):
        attention.choose("flashinfer", shape, "cuda")
    with pytest.raises(SystemExit, match="take triton"):
        attention.choose("torch", shape, "cuda")
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
    assert attention.choose("auto", shape, "cuda") is attention.TritonAttention


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernel_that_attends_is_fit_for_a_gpu(tmp_path, architecture):
    """Prevents a dense rival that is slow because its kernel spills or copies keys in small pieces."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    command = [sys.executable, COMPILED_ATTENTION, str(architecture), str(tmp_path)]
    # Imports the kernel for a compiler, which the tests of this process may interpret.
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["spilled"] == 0
    assert found["widest_copy"] == 16
    # At least four programs fit on a multiprocessor, so that enough reads are in flight.
    assert found["shared"] <= 40 << 10
    assert found["registers"] <= 128
