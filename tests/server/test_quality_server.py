"""The quality benchmark on a live server: its figures are the model's, given what the server kept."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.quality.cells import Cell
from benchmarks.quality.choices import read_choice
from benchmarks.quality.server import AskError, ServerRunner
from benchmarks.quality.tokens import Asked, Tokens
from checkout import ROOT
from harness import BUDGET, INTERVAL, RECENT, prompt
from sglang_triattn.config import Config
from sglang_triattn.stats.file import load_stats
from sglang_triattn.transformers_cache.cache import CompactedCache
from sglang_triattn.transformers_cache.feed import feed
from word_tokenizer import text

CHUNKS = ("--chunked-prefill-size", str(INTERVAL))
PROMPT, PRIVATE = 40, 200
SHARE = BUDGET / PRIVATE


@pytest.fixture(scope="module")
def streams():
    asked = tuple(Asked("facts", prompt(100 + n, 5), prompt(200 + n, 1 + n % 2)) for n in range(3))
    questions = Tokens("asked", prompt(1, PROMPT), prompt(2, PRIVATE), asked)
    return questions, Tokens("scored", prompt(3, PROMPT), prompt(4, PRIVATE), score_last=160)


def cells_of(*names):
    return [Cell(SHARE, read_choice(name)) for name in names]


def expected(tiny, model, config, ids, answer, *, evicts):
    """Whether the answer's tokens are the most likely ones, and their mean log-probability, without a server."""
    right, logprobs = True, []
    for place, token in enumerate(answer):
        whole = torch.tensor(ids + answer[:place])
        cache = CompactedCache.for_model(
            model, [config], load_stats(tiny.stats),
            capacity=len(whole), prompt_length=len(whole), protected=PROMPT,
        )  # fmt: skip
        predicted = feed(model, cache, whole, chunk=INTERVAL)[0, -1].log_softmax(-1)
        assert (cache.rows.report(0).rounds > 0) == evicts
        right &= int(predicted.argmax()) == token
        logprobs.append(float(predicted[token]))
    return right, sum(logprobs) / len(logprobs)


def test_answers_follow_what_the_server_kept(serve, tiny, streams):
    """Prevents prompts found in the tree, chunks without rounds, and answers about another token."""
    client, model = serve(*CHUNKS), tiny.load()
    runner = ServerRunner(client.url, progress=lambda line: None)
    cells = cells_of("dense", "default", "settings:recent=0")
    whole = Config(budget=10_000)
    settings = Config(budget=BUDGET, interval=INTERVAL, recent=RECENT, prompt="compact")
    newest = Config(budget=BUDGET, interval=INTERVAL, recent=0, prompt="compact")
    found = runner.run(streams[0], cells)
    ids = streams[0].prompt + streams[0].private
    for cell, config in zip(cells, (whole, settings, newest), strict=True):
        for unit, one in zip(found[cell]["facts"], streams[0].questions, strict=True):
            right, logprob = expected(tiny, model, config, ids + one.text, one.answer, evicts=config != whole)
            assert unit.right == right
            assert unit.logprob == pytest.approx(logprob, abs=2e-3)
    # What the first run left in the tree must not help the second run.
    again = runner.run(streams[0], cells[:2])
    assert again == {cell: found[cell] for cell in cells[:2]}


def test_scored_text(serve, tiny, streams):
    """Prevents tokens from being scored one place off, and agreement with anything but dense."""
    client, model = serve(*CHUNKS), tiny.load()
    runner = ServerRunner(client.url, progress=lambda line: None)
    cells = cells_of("dense", "default")
    found = runner.run(streams[1], cells)
    ids = streams[1].prompt + streams[1].private
    settings = Config(budget=BUDGET, interval=INTERVAL, recent=RECENT, prompt="compact")
    assert [unit.right for unit in found[cells[0]]["text"]] == [1, 1, 1]
    for unit, place, evicts in zip(found[cells[1]]["text"], (80, 144, 208), (False, True, True), strict=True):
        _, logprob = expected(tiny, model, settings, ids[:place], [ids[place]], evicts=evicts)
        assert unit.logprob == pytest.approx(logprob, abs=2e-3)


def test_the_command(serve, chat_model, tmp_path):
    """Prevents a benchmark that does not reach a server the way users start it."""
    lines = [
        {"id": "a", "prompt": text(1, PROMPT), "private": text(2, PRIVATE),
         "questions": [{"task": "facts", "text": text(3, 4), "answer": text(4, 2)}]},
        {"id": "b", "prompt": text(5, PROMPT), "private": text(6, PRIVATE), "score_last": 100},
    ]  # fmt: skip
    (tmp_path / "streams.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "benchmarks.quality", "--server", serve(*CHUNKS).url]
    command += ["--model", str(chat_model.path)]
    command += ["--streams", str(tmp_path / "streams.jsonl"), "--shares", str(SHARE), "--json", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "out").read_text())
    assert content["setting"]["server"]["budget"] == BUDGET
    found = [(row["task"], row["policy"], row["questions"]) for row in content["rows"]]
    assert found == [("facts", "dense", 1), ("facts", "default", 1), ("text", "dense", 2), ("text", "default", 2)]


def test_what_a_server_cannot_be_asked(serve, streams):
    """Prevents figures under the name of settings that the server did not run, and dense ones in disguise."""
    runner = ServerRunner(serve(*CHUNKS).url, progress=lambda line: None)
    for name in ("union", "value-norm", "settings:aggregation=max"):
        with pytest.raises(AskError, match="compacts as it was started"):
            runner.run(streams[0], cells_of("dense", name))
    with pytest.raises(AskError, match="--triattention-budget 100"):
        runner.run(streams[0], [Cell(0.5, read_choice("default"))])
    with pytest.raises(AskError, match=r"refuses a request: .*interval"):
        runner.run(streams[0], cells_of("settings:interval=99"))
    lines = []
    coarse = ServerRunner(serve().url, progress=lines.append)
    assert f"--chunked-prefill-size {INTERVAL}" in lines[0]
    with pytest.raises(AskError, match="ran no round on 205 tokens"):
        coarse.run(streams[0], cells_of("dense", "default"))
    with pytest.raises(AskError, match="does not compress"):
        ServerRunner(serve(compressed=False).url)
