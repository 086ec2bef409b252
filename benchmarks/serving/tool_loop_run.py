"""Agents in a tool loop, in step with one another, and what each turn costs them on a live server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.serving.streamed import streamed
from benchmarks.serving.tool_loop_tasks import Ask, Work


@dataclass(frozen=True)
class Policy:
    """How an agent is served, and what of its history comes back.

    Attributes:
        settings: the fields of `custom_params["triattention"]`.
        named: whether it names a conversation too.
        stripped: whether the chat template leaves earlier thinking out of the history.
    """

    name: str
    settings: dict[str, Any]
    named: bool = False
    stripped: bool = False

    @property
    def history(self) -> str:
        return "stripped" if self.stripped else "kept"


def forcing() -> str:
    """A logit processor of SGLang that makes a request write the tokens that its `custom_params["forced"]` lists.

    The class is local, so that the server gets its code instead of the name of a module that it cannot import.
    """
    import dill
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class Forced(CustomLogitProcessor):
        def __call__(self, logits, custom_param_list=None):
            for row, params in enumerate(custom_param_list or ()):
                forced, done = params["forced"], len(params["__req__"].output_ids)
                if done < len(forced):
                    logits[row, :] = -float("inf")
                    logits[row, forced[done]] = 0.0
            return logits

    # As `to_str`, but without the names of this module, which it would have the server import.
    return json.dumps({"callable": dill.dumps(Forced, recurse=True).hex()})


@dataclass
class Agent:
    """One agent under one policy: its history, and what its turns and answers were.

    Attributes:
        parts: token ids of the history, and whether each part is thinking.
        given: tokens that it was given until now: first prompt and inputs.
        carried: tokens that were the last of a request, which count as input of the next.
        turns: one row a turn.
        answers: one row a question.
    """

    number: int
    policy: Policy
    work: Work
    tokenizer: Any
    parts: list[tuple[list[int], bool]] = field(default_factory=list)
    given: int = 0
    carried: int = 0
    turns: list[dict] = field(default_factory=list)
    answers: list[dict] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.policy.history} {self.policy.name} {self.number}"

    def ids_of(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def history(self) -> list[int]:
        return [token for ids, thinking in self.parts if not (thinking and self.policy.stripped) for token in ids]

    def settings(self) -> dict[str, Any]:
        return {**self.policy.settings, **({"conversation": self.name} if self.policy.named else {})}


class Loop:
    """Agents whose turns begin together.

    Attributes:
        asking: the interval of questions, within which none has a round.
    """

    def __init__(self, url: str, agents: Sequence[Agent], asking: int) -> None:
        self.url, self.agents, self.asking, self.processor = url, agents, asking, forcing()

    def run(self, progress: Callable[[str], None]) -> None:
        for number in range(len(self.agents[0].work.turns)):
            started = time.monotonic()
            for agent in self.agents:
                self._first(agent, number)
            middle = time.monotonic()
            self._together(lambda agent, number=number: self._rest(agent, number))
            progress(
                f"turn {number + 1}: first tokens {middle - started:.0f} s, rest {time.monotonic() - middle:.0f} s"
            )
        for number in range(len(self.agents[0].work.asks)):
            self._together(lambda agent, number=number: self._answer(agent, agent.work.asks[number]))
            progress(f"question {number + 1}")

    def _together(self, do: Callable[[Agent], None]) -> None:
        with ThreadPoolExecutor(len(self.agents)) as pool:
            list(pool.map(do, self.agents))

    def _first(self, agent: Agent, number: int) -> None:
        """A turn's input up to the first token, with nothing else running."""
        turn = agent.work.turns[number]
        new = agent.ids_of(turn.input)
        agent.parts.append((new, False))
        agent.given += len(new)
        agent.carried += number > 0
        written = agent.ids_of(turn.thinking)
        answer = self._ask(agent, agent.history(), written[:1], 1)
        agent.turns.append(
            {
                "turn": number + 1,
                "new": len(new),
                "prefilled": answer["prefilled"],
                "cached": answer["cached"],
                "ttft_ms": answer["ttft_ms"],
                "start": answer["report"].get("conversation", "none"),
            }
        )

    def _rest(self, agent: Agent, number: int) -> None:
        """The rest of the turn: what the agent is made to write."""
        turn, row = agent.work.turns[number], agent.turns[-1]
        thinking, reply = agent.ids_of(turn.thinking), agent.ids_of(turn.reply)
        forced = (thinking + reply)[1:]
        agent.carried += 1
        answer = self._ask(agent, agent.history() + thinking[:1], forced, len(forced))
        agent.parts += [(thinking, True), (reply, False)]
        row |= {
            "prefilled": row["prefilled"] + answer["prefilled"],
            "written": len(thinking) + len(reply),
            "rounds": answer["report"].get("rounds", 0),
            "inputs": agent.given + agent.carried,
            "held": answer["held"],
            "protected": answer["report"].get("protected_length", 0),
        }

    def _answer(self, agent: Agent, ask: Ask) -> None:
        """One question, which is no part of the next one's prompt."""
        wanted = agent.ids_of(ask.answer)
        # Without a round, what a row holds can be cut off at the question's beginning.
        settings = {} if agent.settings().get("enabled") is False else {"interval": self.asking}
        answer = self._ask(agent, agent.history() + agent.ids_of(ask.text), None, len(wanted) + 1, settings)
        text = agent.tokenizer.decode(answer["output"])
        ago = len(agent.work.turns) - ask.turn
        right = re.match(rf"\s*{re.escape(ask.answer.strip())}(?!\w)", text) is not None
        agent.answers.append(
            {
                "kind": ask.kind,
                "turns_ago": ago,
                "right": right,
                "wanted": ask.answer.strip(),
                "text": text,
                "start": answer["report"].get("conversation", "none"),
                "rounds": answer["report"].get("rounds", 0),
            }
        )

    def _ask(
        self, agent: Agent, ids: list[int], forced: list[int] | None, tokens: int, settings: dict | None = None
    ) -> dict:
        """One streamed request.

        Raises:
            SystemExit: the server wrote something else than it was made to.
        """
        params: dict[str, Any] = {"triattention": {**agent.settings(), **(settings or {})}}
        body: dict[str, Any] = {"input_ids": ids, "extra_key": agent.name}
        if forced is not None:
            params["forced"] = forced
            body["custom_logit_processor"] = self.processor
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, "custom_params": params}
        last, ttft_ms = streamed(self.url, {**body, "sampling_params": sampling})
        if forced is not None and last["output_ids"] != forced:
            raise SystemExit(f"Agent {agent.name} wrote other tokens than it was made to.")
        facts = last["meta_info"]
        report = facts["triattention"]
        return {
            "output": last["output_ids"],
            "prefilled": facts["prompt_tokens"] - facts["cached_tokens"],
            "cached": facts["cached_tokens"],
            "ttft_ms": ttft_ms,
            "report": report,
            "held": report.get("physical_length", len(ids) + tokens - 1),
        }
