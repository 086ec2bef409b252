"""What the readers of a tool loop's text see of what the agent wrote."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from benchmarks.serving.tool_loop_reads import VIEWS, Reader, read, rows_of
from benchmarks.serving.tool_loop_tasks import made
from tiny_model import build_tiny_model


class Words:
    """A tokenizer with one token for each word, sign or space."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, text: str, **_) -> dict:
        return {"input_ids": [3 + self.ids.setdefault(word, len(self.ids)) for word in re.findall(r"\w+|\s|\W", text)]}


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    model = build_tiny_model(tmp_path_factory.mktemp("model"), vocabulary=2048)
    return Reader(Words(), model.load())


@pytest.fixture(scope="module")
def work(reader):
    return made(0, 3, (40, 60), (12, 24), lambda text: len(reader.ids_of(text)))


def logprobs(answers: list[dict]) -> torch.Tensor:
    return torch.tensor([answer["logprob"] for answer in answers])


def test_only_the_readers_that_may_see_it_see_what_the_agent_wrote(reader, work):
    """Prevents a view that hides too little or nothing at all, and one that hides what the agent was given."""
    first, second, last = work.turns
    other = second.thinking.replace("a", "b").replace("e", "o")
    assert other != second.thinking
    assert len(reader.ids_of(other)) == len(reader.ids_of(second.thinking))
    found = read(reader, work)
    changed = read(reader, replace(work, turns=(first, replace(second, thinking=other), last)))
    for view in VIEWS:
        equal = torch.allclose(logprobs(found[view]), logprobs(changed[view]), atol=1e-5)
        assert equal == (view == "hidden"), view
    given = replace(last, input=last.input.replace("a", "b"))
    changed = read(reader, replace(work, turns=(first, second, given)))
    for view in VIEWS:
        assert not torch.allclose(logprobs(found[view]), logprobs(changed[view]), atol=1e-5), view


def test_what_is_seen_whole_is_a_plain_forward_pass(reader, work):
    """Prevents wrong positions or masks, and an answer's tokens that are judged after the wrong ones."""
    (ask,) = [ask for ask in work.asks if ask.kind == "identifier" and ask.turn == 3]
    history = "".join(turn.input + turn.thinking + turn.reply for turn in work.turns)
    ids, wanted = reader.ids_of(history) + reader.ids_of(ask.text), reader.ids_of(ask.answer)
    with torch.inference_mode():
        found = reader.model(torch.tensor([ids + wanted])).logits[0].log_softmax(-1)[len(ids) - 1 : -1]
    cache, own = reader.history(work, hides=False)
    answer = reader.answer(ask, cache, own[:0])
    assert answer["logprob"] == pytest.approx(found.gather(1, torch.tensor(wanted)[:, None]).sum().item(), abs=1e-4)
    assert cache.get_seq_length() == len(own) == len(reader.ids_of(history))


def test_what_is_counted():
    """Prevents gains that are counted as losses, and bounds of something else than the rows say."""
    right, wrong = {"right": True, "logprob": -1.0}, {"right": False, "logprob": -3.0}
    agent = {"all": [right, right, wrong], "asked": [wrong, right, right], "given": [right] * 3, "hidden": [wrong] * 3}
    rows = {row["view"]: row for row in rows_of([agent, agent])}
    assert (rows["asked"]["right"], rows["asked"]["lost"], rows["asked"]["won"]) == (4, 2, 2)
    assert (rows["hidden"]["lost"], rows["hidden"]["won"]) == (4, 0)
    assert rows["hidden"]["high"] <= 0 <= rows["given"]["low"]
    assert rows["hidden"]["logprob_high"] < 0
    assert rows["all"]["low"] == rows["all"]["high"] == 0
