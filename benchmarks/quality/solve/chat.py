"""A model's chats in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from benchmarks.quality.solve.format import Problem, ProblemError


@dataclass
class Chat:
    """How a model's tokenizer writes chats; models without a template get plain lines.

    Attributes:
        tokenizer: from transformers.
        ends: tokens that end an answer.
    """

    tokenizer: Any
    ends: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        known = self.tokenizer.get_vocab()
        names = (self.tokenizer.eos_token, "<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<|eot_id|>")
        self.ends = frozenset(known[name] for name in names if name in known)

    def prompt(self, problem: Problem) -> list[int]:
        """Token ids of everything before the answer.

        Raises:
            ProblemError: the chat template refuses the messages.
        """
        if getattr(self.tokenizer, "chat_template", None):
            messages = [dict(message) for message in problem.messages]
            try:
                text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except TemplateError as error:
                raise ProblemError(f"The model's chat template refuses problem {problem.id!r}: {error}.") from None
            return self.ids(text)
        lines = [f"{message['role']}: {message['content']}\n" for message in problem.messages]
        return self.tokenizer("".join([*lines, "assistant: "]), verbose=False)["input_ids"]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)
