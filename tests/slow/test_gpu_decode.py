"""The decode benchmark runs from start to end on a CPU, and reports no figure for wrong answers."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from benchmarks import plot
from benchmarks.decode import batch, bench, cli, model, step, tables
from benchmarks.decode.attention import TorchAttention
from checkout import ROOT
from decode_runs import SMALL, TOY, run_decode
from sglang_triattn.kernels import device_round
from sglang_triattn.kernels.scorer import Scorer


@pytest.mark.wide
def test_whole_run(tmp_path, capsys, monkeypatch):
    """Prevents a table that cannot be produced end to end, and cells that are silently left out."""
    out = tmp_path / "decode-toy.json"
    content = run_decode(out, "--batches", "1", "3", "--contexts", "4096", "8192", "--budgets", "1024", "4096")
    rows = {(r["batch"], r["context"], r["budget"], r["page_size"], r["selection"]): r for r in content["rows"]}
    assert set(rows) == {(b, c, k, *bench.DEFAULT) for b in (1, 3) for c in (256, 512) for k in (64, 256)} | {
        (b, 512, k, *way) for b in (1, 3) for k in (64, 256) for way in bench.WAYS
    }
    for (_, context, budget, *_), row in rows.items():
        assert row["dense_tokens_s"] > 0
        assert row["dense_share"] == pytest.approx(row["dense_tokens_s"] / row["dense_ceiling"])
        if (context, budget) == (256, 256):
            assert row["compressed_tokens_s"] is None
            assert row["note"] == "no round yet at this context"
        else:
            assert row["speedup"] == pytest.approx(row["compressed_tokens_s"] / row["dense_tokens_s"])
            assert row["compressed_ceiling"] > row["dense_ceiling"]
            assert row["round_us"] > 0
            assert 0 < row["round_share"] < 1
            assert row["note"] == ""
    # One step of one dense request in the middle of its run, at the bandwidth that the run saw.
    setting, shape = content["setting"], TOY
    middle = 512 - 8 / 2 + 0.5
    count = shape.read_bytes(2) + middle * shape.kv_bytes(2)
    assert rows[1, 512, 64, *bench.DEFAULT]["dense_ceiling"] == pytest.approx(setting["copy_gb_s"] * 1e9 / count)
    assert setting["attention"] == "torch"
    assert 0 < setting["largest_error"] < 0.01
    assert {(r["page_size"], r["compaction"], r["requests"]) for r in content["rounds"]} == {
        (1, "remap", 1), (1, "remap", 8), (1, "fill", 1), (1, "fill", 8), (16, "fill", 1), (16, "fill", 8),
    }  # fmt: skip
    assert content["arrangements"] == []
    tokens = int(0.5e9 / 147456 / 16)
    held = {(r["context"], r["budget"]): (r["dense_batch"], r["compressed_batch"]) for r in content["capacity"]}
    assert held == {
        (256, 64): (tokens // 256, tokens // 76),
        (512, 64): (tokens // 512, tokens // 76),
        (512, 256): (tokens // 512, tokens // 268),
    }
    assert content["goals"] == content["goal_rows"] == []
    assert content["complete"]
    assert "no round yet at this context" in capsys.readouterr().out
    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    plot.main()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_rounds_that_meet_and_rounds_that_do_not(tmp_path):
    """Prevents a figure of a burst for rounds that are spread, and the reverse."""
    content = run_decode(tmp_path / "out.json", "--batches", "16", "--interval", "256", "--memories")
    found = {row["rounds"]: row["passes"] for row in content["arrangements"]}
    assert found == {"spread": 16, "together": 1, "level": 2}
    for row in content["arrangements"]:
        # Each pass is one of the run's steps.
        assert row["longest_us"] < row["step_us"] * 16


def test_weights_counted_for_the_ceiling():
    """Prevents a ceiling computed from another model's bytes."""
    made = model.Model(TOY, 2, 16, "cpu")
    tensors = [x for layer in made.layers for x in vars(layer).values()] + [made.norm, made.head]
    assert made.shape.read_bytes(2) == sum(x.nbytes for x in tensors)
    assert made.shape.held_bytes(2) == made.shape.read_bytes(2) + made.embedding.nbytes
    published = {"Qwen3-8B": 8_190_735_360, "Llama-3-8B": 8_030_261_248}
    for name, count in published.items():
        shape = model.SHAPES[name]
        assert shape.held_bytes(shape.layers) == 2 * count


def test_cells_beyond_the_memory(tmp_path):
    """Prevents a crash, and figures for fewer requests, when a batch's KV does not fit."""
    kv = TOY.kv_bytes(2)
    content = run_decode(tmp_path / "small.json", "--memories", "16", "--pool", str(600 * kv / 1e9))
    row = content["rows"][0]
    assert row["dense_tokens_s"] is row["speedup"] is None
    assert "of KV" in row["note"]
    assert row["compressed_tokens_s"] > 0
    assert {r["compressed_batch_tokens_s"] for r in content["capacity"]} == {None}
    assert "the pool holds 600 of" in content["capacity"][0]["note"]


def test_memory_that_runs_out(tmp_path, monkeypatch):
    """Prevents a crash that loses all figures, including those measured before a run is cut short."""
    plain = TorchAttention.__call__

    def limited(self, queries, *pools):
        if len(queries) > 1:
            raise torch.OutOfMemoryError
        return plain(self, queries, *pools)

    monkeypatch.setattr(TorchAttention, "__call__", limited)
    out = tmp_path / "limited.json"
    content = run_decode(out, "--batches", "1", "2")
    one, two = ([row for row in content["rows"] if row["batch"] == batch] for batch in (1, 2))
    assert all(row["speedup"] > 0 and not row["note"] for row in one)
    assert {(row["dense_tokens_s"], row["note"]) for row in two} == {
        (None, "the device's memory ran out: lower --pool")
    }
    assert content["capacity"][0]["note"] == "the device's memory ran out: lower --pool"

    def ended(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "time_rounds", ended)
    with pytest.raises(KeyboardInterrupt):
        run_decode(out)
    content = json.loads(out.read_text())
    assert content["rows"]
    assert not content["complete"]


def test_goals():
    """Prevents a goal from being met by another cell, or lost because not all layers fit."""
    setting = bench.Setting(TOY, 2, [32], [16384 // 64], [2048 // 64], 8, [], 1, "cpu", scale=64)
    tight = dataclasses.replace(setting, pool=(32 * 290 + 200) * TOY.kv_bytes(1))
    for one, layers in ((setting, 2), (tight, 1)):
        made, errors = bench.Bench(one, TorchAttention), tables.Errors()
        rows = tables.grid(made, errors, 32)
        fewer = tables.goal_rows(made, errors, rows)
        assert [row["layers"] for row in fewer] == [1] * (layers == 1)
        table = tables.goals(made, rows, fewer, 0.81)
        seen = [row["seen"] for row in table]
        cell = (fewer or rows)[0]
        assert seen == [0.81, rows[0]["round_share"], cell["speedup"], cell["compressed_share"]]
        met = [0.81 >= 0.8, seen[1] <= 0.01, seen[2] >= 2.5, seen[3] >= 0.85]
        assert [row["met"] for row in table] == ["yes" if good else "no" for good in met]
        assert ("(1 layers)" in table[2]["goal"]) == (layers == 1)
    other = dataclasses.replace(setting, batches=[2])
    made = bench.Bench(other, TorchAttention)
    assert len(tables.goals(made, tables.grid(made, tables.Errors(), 2), [], None)) == 1


def physical_positions(patch):
    plain = batch.Batch._extend
    patch.setattr(batch.Batch, "_extend", lambda self: [plain(self), self.positions.copy_(self.rows.lengths - 1)])


def an_evicted_token(patch):
    plain = device_round.remap

    def wrong(slots, kept):
        ordered = plain(slots, kept)
        ordered[:, 0] = ordered[:, kept.shape[1]]
        return ordered

    patch.setattr(device_round, "remap", wrong)


def nothing_moved(patch):
    patch.setattr(batch.Mover, "move", lambda self, *given, **named: None)


def a_token_too_few(patch):
    plain = TorchAttention.__call__

    def wrong(self, *given):
        self._rows.lengths.sub_(1)
        answers = plain(self, *given)
        self._rows.lengths.add_(1)
        return answers

    patch.setattr(TorchAttention, "__call__", wrong)


def other_tokens_kept(patch):
    plain = Scorer.keep

    def wrong(self, slots, lengths, *given):
        kept = plain(self, slots, lengths, *given)
        # The second one made is the reference.
        return kept if self.reference else torch.arange(kept.shape[-1]).expand(kept.shape)

    made = Scorer.__init__

    def init(self, *given, kernels=None, **options):
        self.reference = kernels is False
        made(self, *given, kernels=kernels, **options)

    patch.setattr(Scorer, "__init__", init)
    patch.setattr(Scorer, "keep", wrong)


def a_stale_graph(patch):
    def capture(self, work):
        work()
        return lambda: None

    patch.setattr(step.Eager, "capture", capture)


MISTAKES = {
    physical_positions: "off those at logical position",
    an_evicted_token: "off that over exactly the kept tokens",
    nothing_moved: "off that over exactly the kept tokens",
    a_token_too_few: "off that over exactly the kept tokens",
    other_tokens_kept: "a round agrees with its reference on",
    a_stale_graph: "the next tokens are not those of the largest logits",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_no_figure_for_wrong_answers(monkeypatch, tmp_path, capsys, mistake):
    """Prevents tokens per second for a decode that reads, keeps or rotates something else."""
    mistake(monkeypatch)
    with pytest.raises(SystemExit, match=MISTAKES[mistake]) as ended:
        run_decode(tmp_path / "wrong.json")
    assert ended.value.code != 0
    assert not (tmp_path / "wrong.json").exists()
    assert "tokens_s" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--layers", "3"], "--layers is 3, but Toy has 2: give 1 to 2."),
        (["--contexts", "300"], "give larger --contexts"),
        (["--batches", "0"], "batches of at least 1"),
        (["--attention", "triton"], "needs a CUDA device"),
        (["--device", "cuda"], "There is no CUDA device here"),
    ],
)
def test_options_that_cannot_be_measured(monkeypatch, options, sentence):
    """Prevents a traceback for a user's mistake."""
    monkeypatch.setattr(cli.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        cli.main([*SMALL, *options])
    assert sentence in str(ended.value)
    assert "\n" not in str(ended.value)


def test_a_bare_machine(tmp_path):
    """Prevents a benchmark that runs only where SGLang, FlashInfer and their dependencies are installed."""
    absent = ("sglang", "flashinfer", "transformers", "safetensors", "huggingface_hub", "matplotlib", "tqdm", "psutil")
    code = f"import runpy, sys; sys.modules.update(dict.fromkeys({absent})); "
    code += "runpy.run_module('benchmarks.decode', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, *SMALL, "--json", str(tmp_path / "bare.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "bare.json").read_text())["rows"]
