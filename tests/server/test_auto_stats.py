"""The flag alone: statistics are measured at the first launch, kept, found by the next, and good enough."""

from __future__ import annotations

import decimal
import difflib
import doctest
import inspect
import logging
import random
import re
from collections import Counter
from importlib import resources

import pytest
import torch

import harness
import prepare_model
from documents import README, section
from forked_servers import run_command, running_server
from sglang_triattn.calibration.transformers_engine import calibrate
from sglang_triattn.kernels.score.reference import score_torch
from sglang_triattn.kernels.select import SELECTIONS
from sglang_triattn.kernels.select.reference import select_torch
from sglang_triattn.patches.calibration import stats_source
from sglang_triattn.rounds.scoring import score_tables
from sglang_triattn.stats.file import load_stats
from word_tokenizer import NAMED, with_tokenizer

LENGTHS = {"budget": 96, "interval": 32, "recent": 16}
ANSWER = LENGTHS["budget"] + 2 * LENGTHS["interval"]
# In bfloat16, processors without bfloat16 arithmetic would measure for minutes.
SMALL = ("--max-total-tokens", "6144", "--sleep-on-idle", "--dtype", "float32")
DRAFTS = {
    "NGRAM": "--page-size 1 --speculative-num-draft-tokens 6",
    "STANDALONE": f"{' '.join(harness.DRAFTS)} --speculative-draft-model-path",
}


@pytest.fixture(scope="module")
def smollm():
    return prepare_model.prepare()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def serve_and_ask(forkserver, model, cache, log, *flags: str) -> tuple[str, str]:
    """What the log of one launch says about the statistics, and the report of a compressed answer."""
    env = {**harness.STRICT, "XDG_CACHE_HOME": str(cache)}
    with running_server(forkserver, model, ["--enable-triattention", *flags], env, log) as server:
        client = harness.Client(server)
        response = client.generate(list(range(1000, 1040)), ANSWER, custom_params={"triattention": LENGTHS})
        served = client.totals()["stats"]
    report = harness.compression(response)
    # Steps that verify drafts end with other lengths.
    assert report["rounds"] >= 1 if "--speculative-algorithm" in flags else report["rounds"] == 1
    return served, log.read_text()


@pytest.fixture(scope="module")
def worded(tiny, tmp_path_factory):
    """The tiny model with a tokenizer, without which nothing can be measured."""
    return with_tokenizer(tiny, tmp_path_factory.mktemp("worded") / "model").path


@pytest.fixture(scope="module")
def first_launch(forkserver, worded, cache, tmp_path_factory):
    """A launch with no more flags than the README's first command has."""
    assert "    python -m sglang.launch_server --model-path M --enable-triattention\n" in section(README, "Quick start")
    return serve_and_ask(forkserver, worded, cache, tmp_path_factory.mktemp("logs") / "first.log")


def test_the_first_launch_measures_and_says_so(first_launch, cache):
    """Prevents a first command that needs a flag that the README does not name, a silent wait, and a file that no line
    names."""
    served, log = first_launch
    (file,) = (cache / "sglang-triattn" / "statistics").glob("*.safetensors")
    assert served == str(file)
    stated, shown, kept = "expects this to take about", "TriAttention statistics:", f"keeps them in {file}"
    assert log.index(stated) < log.index(shown) < log.index(kept)


def test_the_next_launch_finds_them(forkserver, first_launch, worded, cache, tmp_path):
    """Prevents measuring at every launch, and a launch that fails because the folder cannot be written."""
    served, log = serve_and_ask(forkserver, worded, cache, tmp_path / "next.log", *SMALL)
    assert served == first_launch[0]
    assert "found the statistics of this model" in log
    assert "expects this to take" not in log


def test_a_launch_can_fit_look_ups(forkserver, tiny, tmp_path):
    """Prevents weights that are fitted at every launch, that other servers take for their own, or that leave a part to
    scores."""
    text = Counter(re.findall(r"\b[a-z]{3,9}\b", (resources.files("sglang_triattn") / stats_source.TEXT).read_text()))
    words = [word for word, _ in text.most_common(200) if word not in NAMED]
    model = with_tokenizer(tiny, tmp_path / "model", words).path
    files = []
    for name, wanted in (("first", "look-ups"), ("next", "look-ups"), ("other", "auto")):
        log = tmp_path / f"{name}.log"
        served, logged = serve_and_ask(forkserver, model, tmp_path, log, *SMALL, "--triattention-stats", wanted)
        files.append(served)
        assert ("expects this to take about" in logged) == (name != "next")
        # Of a model with random weights, scores predict little, of which a log line warns where they choose.
        assert ("--triattention-value-share" in logged) == (name == "other")
    assert files[0] == files[1] != files[2]
    assert load_stats(files[0]).lookups is not None
    assert load_stats(files[2]).lookups is None


def test_a_launch_without_a_tokenizer_measures_too(forkserver, worded, tmp_path):
    """Prevents a server for token ids alone that refuses to start, although its model has a tokenizer."""
    served, log = serve_and_ask(
        forkserver, worded, tmp_path / "cache", tmp_path / "log", *SMALL, "--skip-tokenizer-init"
    )
    assert served.startswith(str(tmp_path / "cache"))
    assert "expects this to take about" in log


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
def test_a_launch_that_drafts_measures_too(forkserver, worded, tmp_path, algorithm):
    """Prevents a server with drafts that refuses to start until statistics are in the cache: a batch that measures
    decodes one token at a time, where the server's own batches reserve slots for drafts instead."""
    flags = ["--speculative-algorithm", algorithm, *DRAFTS[algorithm].split()]
    if algorithm == "STANDALONE":
        flags.append(str(worded))
    served, log = serve_and_ask(forkserver, worded, tmp_path / "cache", tmp_path / "log", *SMALL, *flags)
    assert served.startswith(str(tmp_path / "cache"))
    assert "expects this to take about" in log


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().square().sum() / other.abs().square().sum()).sqrt().item()


@pytest.fixture(scope="module")
def keys(smollm):
    """Post-RoPE keys of SmolLM2 on a text that neither calibration has seen: per layer [n, H_kv, head_dim]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "\n\n".join(map(inspect.getdoc, (difflib.SequenceMatcher, random, decimal, doctest, logging.Formatter)))
    ids = AutoTokenizer.from_pretrained(smollm[0])(text, return_tensors="pt").input_ids[:, :1024]
    model = AutoModelForCausalLM.from_pretrained(smollm[0], dtype=torch.float32).eval()
    with torch.no_grad():
        cache = model.model(ids, use_cache=True).past_key_values
    return [layer.keys[0].transpose(0, 1).contiguous() for layer in cache.layers]


def kept_sets(stats, keys, selection: str, keep: int) -> torch.Tensor:
    tables = score_tables(stats, stats.num_kv_heads, "cpu")
    count = len(keys[0])
    scores = score_torch(keys, torch.arange(count)[None], torch.tensor([count]), tables)
    lengths = torch.tensor([count])
    return select_torch(scores, lengths, keep, 64, selection=selection, num_kv_heads=stats.num_kv_heads)[0]


# Minutes of a trained model.
@pytest.mark.wide
def test_they_agree_with_a_longer_calibration(forkserver, smollm, keys, tmp_path, record_property):
    """Prevents a quick measurement that keeps other tokens than a thorough one."""
    served, _ = serve_and_ask(forkserver, smollm[0], tmp_path / "cache", tmp_path / "log", *SMALL)
    quick, careful = load_stats(served), load_stats(smollm[1])
    difference = relative(quick.mean, careful.mean)
    agreements = {}
    for selection in SELECTIONS:
        one, other = (kept_sets(stats, keys, selection, 512).flatten(0, -2) if selection.endswith("head") else
                      kept_sets(stats, keys, selection, 512)[None] for stats in (quick, careful))  # fmt: skip
        same = sum(len(set(a) & set(b)) for a, b in zip(one.tolist(), other.tolist(), strict=True))
        agreements[selection] = same / one.numel()
    shown = ", ".join(f"{name} {share:.1%}" for name, share in agreements.items())
    record_property(
        "figures",
        f"measured at launch against a calibration on {careful.token_count} other tokens: means differ by "
        f"{difference:.1%}, kept sets (512 of {len(keys[0])}) agree to {shown}",
    )
    assert difference < 0.15
    assert all(share >= 0.9 for share in agreements.values())


@pytest.mark.wide
def test_the_engine_measures_what_transformers_does(forkserver, smollm, tmp_path):
    """Prevents an engine calibration that is right only for small models in float32."""
    (tmp_path / "text.txt").write_text(prepare_model.calibration_text()[:4000])
    out = tmp_path / "engine.safetensors"
    words = ["--model", str(smollm[0]), "--data", str(tmp_path / "text.txt"), "--window", "512"]
    command = ["calibrate", "--engine", "sglang", *words, "--out", out, "--device", "cpu"]
    ended = run_command(forkserver, tmp_path, [*command, "--", "--max-total-tokens", "2048"], harness.STRICT)
    assert ended.code == 0, ended.output[-3000:]
    engine = load_stats(out)
    expected = calibrate(str(smollm[0]), words[3], window=512, device="cpu", progress=False)
    assert engine.token_count == expected.token_count > 512
    assert relative(engine.mean, expected.mean) < 1e-2
    assert relative(engine.abs_mean, expected.abs_mean) < 1e-2
