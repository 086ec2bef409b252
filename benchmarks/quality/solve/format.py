"""Problems whose answers can be checked: one a line of JSON, and the reader that refuses bad ones.

    {"id": "a", "task": "programs", "messages": [{"role": "user", "content": "..."}], "answer": "Result: 42"}

Optional fields: `lines`, the lines that a right text has, in order; `lookups`, lists [LINE, WORD, SOURCE, FROM] that
say: word WORD of line LINE of the text is word FROM of its line SOURCE, all counted from 0, FROM also from the end as
-1; `trace`, a text that the model will probably write, which only saves time.

The answer is the last line that the model writes. White space, punctuation after words, and emphasis do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIELDS = ("id", "task", "messages", "answer", "lines", "lookups", "trace")
_NEEDED = FIELDS[:4]


class ProblemError(ValueError):
    """A file of problems cannot be used; the message is one sentence for the user."""


@dataclass(frozen=True)
class Lookup:
    """A word that a line takes from an earlier line of the model's own text."""

    line: int
    word: int
    source: int
    start: int = -1

    @property
    def distance(self) -> int:
        """How many lines back."""
        return self.line - self.source


@dataclass(frozen=True)
class Problem:
    """One problem. See the file format for what the attributes mean."""

    id: str
    task: str
    messages: tuple[dict[str, str], ...]
    answer: str
    lines: tuple[str, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    trace: str = ""


def to_line(problem: Problem) -> str:
    """One line of JSON, without its line break."""
    entry: dict[str, Any] = {name: getattr(problem, name) for name in FIELDS if getattr(problem, name)}
    if problem.lookups:
        entry["lookups"] = [[one.line, one.word, one.source, one.start] for one in problem.lookups]
    return json.dumps(entry, ensure_ascii=False)


def write_problems(path: str | Path, problems: Iterable[Problem]) -> None:
    Path(path).write_text("".join(to_line(problem) + "\n" for problem in problems), encoding="utf-8")


def read_problems(path: str | Path) -> list[Problem]:
    """Reads a file of problems.

    Raises:
        ProblemError: a line is not a problem, an id appears twice, or there is none.
        OSError: the file cannot be read.
    """
    problems: dict[str, Problem] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ProblemError(f"{path} is not UTF-8 ({error}): save it as UTF-8.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            problem = _problem(json.loads(line))
        except ValueError as error:
            raise ProblemError(f"Line {number} of {path} is not a problem: {error}") from None
        if problem.id in problems:
            raise ProblemError(f"Line {number} of {path} repeats the id {problem.id!r}: give each problem its own.")
        problems[problem.id] = problem
    if not problems:
        raise ProblemError(f"{path} holds no problem: write one JSON object a line, with {', '.join(_NEEDED)}.")
    return list(problems.values())


def _problem(entry: Any) -> Problem:
    """Raises ValueError with what is wrong, and ends it with a full stop."""
    if not isinstance(entry, dict):
        raise ValueError("it is not a JSON object.")
    if missing := [name for name in _NEEDED if name not in entry]:
        raise ValueError(f"it lacks {', '.join(missing)}.")
    if unknown := [name for name in entry if name not in FIELDS]:
        raise ValueError(f"it has {', '.join(unknown)}, but the fields are {', '.join(FIELDS)}.")
    for name in ("id", "task", "answer", "trace"):
        value = entry.get(name, "-")
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{name} is {value!r}, but it must be a text that is not empty.")
    if "\n" in entry["answer"].strip():
        raise ValueError("answer has several lines, but it is compared with the last line only.")
    messages, lines = entry["messages"], entry.get("lines", [])
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError('messages must be a list of {"role": TEXT, "content": TEXT}, with one at least.')
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError("lines must be a list of texts.")
    lookups = entry.get("lookups", [])
    if not isinstance(lookups, list):
        raise ValueError("lookups must be a list of [LINE, WORD, SOURCE, FROM].")
    given = [entry["id"], entry["task"], tuple(messages), entry["answer"]]
    return Problem(*given, tuple(lines), tuple(map(_lookup, lookups)), entry.get("trace", ""))


def _is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and set(entry) == {"role", "content"} and all(map(_is_text, entry.values()))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _lookup(entry: Any) -> Lookup:
    numbers = isinstance(entry, list) and len(entry) == 4 and all(type(number) is int for number in entry)
    if not numbers or not (0 <= entry[2] < entry[0] and entry[1] >= 0):
        raise ValueError(f"{entry!r} in lookups is not [LINE, WORD, SOURCE, FROM] with SOURCE before LINE.")
    return Lookup(*entry)
