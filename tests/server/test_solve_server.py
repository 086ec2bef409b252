"""Problems solved by a live server: its texts are those of the cache for transformers."""

from __future__ import annotations

import pytest

from benchmarks.quality.choices import read_choice
from benchmarks.quality.model import load_model, load_tokenizer
from benchmarks.quality.server import AskError
from benchmarks.quality.solve.cells import Cell
from benchmarks.quality.solve.chat import Chat
from benchmarks.quality.solve.format import Problem
from benchmarks.quality.solve.here import Solver
from benchmarks.quality.solve.server import ServerSolver
from harness import BUDGET, INTERVAL
from sglang_triattn.stats.file import load_stats
from word_tokenizer import text

LIMIT = 160


@pytest.fixture(scope="module")
def chat(chat_model):
    return Chat(load_tokenizer(str(chat_model.path)))


def quiet(line: str) -> None:
    pass


@pytest.mark.wide
def test_texts_equal_those_of_the_cache_for_transformers(chat_client, chat_model, chat):
    """Prevents figures of a server that compacts at other tokens, or is asked for another prompt or budget."""
    model = load_model(str(chat_model.path), "cpu", "float32")
    here = Solver(model, chat, load_stats(chat_model.stats), INTERVAL, limit=LIMIT, progress=quiet)
    served = ServerSolver(chat_client.url, chat, INTERVAL, limit=LIMIT, progress=quiet)
    settings = read_choice("settings:recent=16")
    cells = [Cell(read_choice("dense"), 0.5), Cell(settings, 0.25), Cell(settings, None, BUDGET)]
    problem = Problem("a", "t", ({"role": "user", "content": text(3, 30)},), "none")
    found = served.solve(problem, cells)
    assert found == here.solve(problem, cells)
    assert [answer.evicted > 0 for answer in found.values()] == [False, True, True]


def test_what_a_server_cannot_be_asked(chat_client, chat):
    """Prevents figures under the name of settings that the server did not run."""
    served = ServerSolver(chat_client.url, chat, progress=quiet)
    for name in ("newest", "per-layer-head", "settings:value_share=0.5"):
        with pytest.raises(AskError, match=f"cannot be asked for {name}"):
            served.fields_of(Cell(read_choice(name), 0.5), 100)
    with pytest.raises(AskError, match="start it with --triattention-budget 1000"):
        served.fields_of(Cell(read_choice("default"), 0.5), 2000)
    assert served.fields_of(Cell(read_choice("default"), 0.5), 100) == {"budget": 50, "interval": INTERVAL}
