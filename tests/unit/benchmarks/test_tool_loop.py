"""The tool loop asks for what it stated, sends what it says, and counts what was answered."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from benchmarks.serving import tool_loop
from benchmarks.serving.tool_loop_run import Agent, Loop
from benchmarks.serving.tool_loop_tasks import made

TURNS, RESULTS, THOUGHTS = 12, (80, 160), (30, 60)
SIZES = tool_loop.Sizes(agents=2, turns=TURNS, results=RESULTS, thoughts=THOUGHTS, budget=16, interval=8)


class Characters:
    """A tokenizer with one token for each word, sign or space."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {}

    def __call__(self, text: str, **_) -> dict:
        found = re.findall(r"\w+|\s|[^\w\s]", text)
        return {"input_ids": [self.words.setdefault(word, len(self.words)) for word in found]}

    def decode(self, ids: list[int]) -> str:
        words = list(self.words)
        return "".join(words[token] for token in ids)


class Oracle(Loop):
    """A server that answers rightly under some policies, and keeps a row of a budget's tokens and all inputs."""

    def __init__(self, agents: list[Agent], wrong: tuple[str, ...]) -> None:
        self.agents, self.wrong, self.asking, self.processor = agents, wrong, 64, "forced"
        self.asked = dict.fromkeys((agent.name for agent in agents), 0)
        self.seen: dict[str, list[int]] = {}

    def _ask(self, agent: Agent, ids: list[int], forced: list[int] | None, tokens: int, settings=None) -> dict:
        output = forced
        if output is None:
            ask = agent.work.asks[self.asked[agent.name]]
            self.asked[agent.name] += 1
            wrong = agent.policy.name in self.wrong
            output = agent.ids_of(f"{ask.answer}0" if wrong else f"{ask.answer}.")
        before = self.seen.get(agent.name, [])
        common = next(
            (i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(len(before), len(ids))
        )
        self.seen[agent.name] = ids + output[:-1]
        report = {
            "conversation": "resumed" if common else "new",
            "rounds": int(forced is not None),
            "protected_length": 3,
        }
        return {"output": output, "prefilled": len(ids) - common, "cached": common, "ttft_ms": 10.0,
                "report": report, "held": agent.given + agent.carried + SIZES.budget}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return Characters()


@pytest.fixture(scope="module")
def works(tokenizer):
    def count(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    return [made(seed, TURNS, RESULTS, THOUGHTS, count) for seed in range(SIZES.agents)]


def test_answers_stand_where_they_should(works):
    """Prevents questions that have no answer, have two, or have it somewhere else than they are counted for."""
    for work in works:
        assert Counter(ask.kind for ask in work.asks) == {"identifier": 11, "state": 4, "instruction": 3, "own": 6}
        for ask in work.asks:
            turn = work.turns[ask.turn - 1]
            stated, later = (turn.thinking, "") if ask.kind == "own" else (turn.input, "")
            stem = ask.text.rpartition("\n")[2]
            if ask.kind == "own":
                assert f"{stem}{ask.answer}." in stated
            elif ask.kind == "state":
                tank = re.search(r'"(\w+)":$', stem)[1]
                assert f'"{tank}":{ask.answer}' in stated
                later = "".join(one.input for one in work.turns[ask.turn :])
                assert f'"{tank}"' not in later
            else:
                assert re.search(rf"{ask.answer}\b", stated)
        whole = "".join(turn.input + turn.thinking + turn.reply for turn in work.turns)
        for ask in work.asks:
            assert ask.kind == "instruction" or len(re.findall(rf"(?<=[ :]){ask.answer.strip()}\b", whole)) == 1


def test_sizes_of_turns(works, tokenizer):
    """Prevents comparing first tokens of turns that bring different amounts, and a first turn without a round."""
    for work in works:
        given = [len(tokenizer(turn.input)["input_ids"]) for turn in work.turns]
        for turn in (7, 12):
            # Up to a sentence.
            assert abs(given[turn - 1] - given[1]) < 40
        assert max(given[1:]) > 1.4 * min(given[1:])
        thought = [len(tokenizer(turn.thinking)["input_ids"]) for turn in work.turns]
        assert thought[0] > SIZES.budget + SIZES.interval


@pytest.mark.parametrize("wrong", [(), ("compact", "newest")])
def test_what_is_counted(works, tokenizer, wrong):
    """Prevents counting a number's beginning as right, or another policy's answers, and goals that are not judged."""
    agents = [
        Agent(number, policy, work, tokenizer)
        for number, work in enumerate(works)
        for policy in tool_loop.policies(SIZES)
    ]
    Oracle(agents, wrong).run(lambda _: None)
    turns, answers = tool_loop.turn_rows(agents, SIZES), tool_loop.answer_rows(agents)
    assert [row["turn"] for row in turns] == [*range(1, TURNS + 1)] * 8
    for row in answers:
        assert row["questions"] == SIZES.agents * {"inputs": 18, "identifier": 11, "state": 4, "instruction": 3}.get(
            row["kind"], 6
        )
        assert row["right"] == (0 if row["policy"] in wrong else row["questions"])
        assert row["lost"] == row["questions"] - row["right"]
    distances = tool_loop.distance_rows(agents)
    for name in ("dense", "compact"):
        own = [row for row in distances if row["policy"] == name and row["history"] == "kept"]
        assert sum(row["questions"] for row in own) == SIZES.agents * 24
    judged = tool_loop.goals(turns, answers, agents)
    assert all(goal["met"] for goal in judged if goal["at_most"] is not None)
    for row in turns:
        if row["turn"] > 1 and row["history"] == "kept":
            assert row["prefilled"] == row["new"] + 2
            assert row["over_bound"] == -SIZES.interval


def test_turns_that_are_not_resumed(works, tokenizer):
    """Prevents a run whose figures are lost at its end, or taken for those of rows that were resumed."""
    agents = [Agent(0, policy, works[0], tokenizer) for policy in tool_loop.policies(SIZES)[:3]]
    Oracle(agents, ()).run(lambda _: None)
    turns, answers = tool_loop.turn_rows(agents, SIZES), tool_loop.answer_rows(agents)
    for row in turns:
        row["starts"] = ["lost"]
    judged = {goal["goal"]: goal for goal in tool_loop.goals(turns, answers, agents)}
    found = judged["keep, thinking kept: turns after the first that some agent did not resume"]
    assert (found["value"], found["met"]) == (TURNS - 1, False)


def test_stripped_thinking(works, tokenizer):
    """Prevents a stripped history that repeats thinking, or a kept one that does not."""
    stripped, kept = (
        Agent(0, policy, works[0], tokenizer)
        for policy in (tool_loop.policies(SIZES)[-1], tool_loop.policies(SIZES)[0])
    )
    for agent in (stripped, kept):
        Oracle([agent], ()).run(lambda _: None)
        text = tokenizer.decode(agent.history())
        assert ("<think>" in text) == (agent is kept)
        assert all(turn.reply in text and turn.input in text for turn in works[0].turns)


def test_policies_on_a_command_line(capsys):
    """Prevents policies that are left out and run, and differences from a dense run that there is not."""
    assert len(set(tool_loop.POLICIES)) == len(tool_loop.policies(SIZES)) == 8
    options, flags = tool_loop.parse(["--policies", "keep", "dense", "--first-agent", "2", "--", "--page-size", "16"])
    chosen = [policy for policy in tool_loop.policies(SIZES) if tool_loop.label(policy) in options.policies]
    assert [(policy.name, policy.stripped) for policy in chosen] == [("dense", False), ("keep", False)]
    assert (options.first_agent, flags) == (2, ["--page-size", "16"])
    with pytest.raises(SystemExit):
        tool_loop.parse(["--policies", "dense", "auto-stripped"])
    assert "auto-stripped is measured against dense-stripped: add dense-stripped" in capsys.readouterr().err
