"""Is a text right: its last line, its lines at their places, and what it looked up in itself?"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.quality.solve.format import Problem

REACHES = ((1, 2), (3, 5), (6, 10), (11, 20), (21, 50), (51, 10**9))
"""Distances of look-ups, in lines, that are counted together."""
# What may follow or surround a word without changing it.
_LOOSE = ".,;:*`"


@dataclass(frozen=True)
class Grade:
    """How right a text is.

    Attributes:
        right: whether the last line is.
        lines, of: lines that are right at their place, of those that a right text has.
        lookups: distance as one of REACHES -> (right ones, those that the text attempted).
    """

    right: bool
    lines: int
    of: int
    lookups: dict[tuple[int, int], tuple[int, int]]


def grade(problem: Problem, text: str) -> Grade:
    """Grades a text.

    A look-up is right if the word is the one that the text itself wrote earlier, even if that was wrong; it is not
    counted if the text has no such line or word.
    """
    lines = [_words(line) for line in text.splitlines() if line.strip()]
    wanted = [_words(line) for line in problem.lines]
    right = sum(own == line for own, line in zip(lines, wanted, strict=False))
    lookups = dict.fromkeys(REACHES, (0, 0))
    for one in problem.lookups:
        if one.line >= len(lines) or one.word >= len(lines[one.line]) or not lines[one.source][one.start :]:
            continue
        reach = next((low, high) for low, high in REACHES if low <= one.distance <= high)
        hits, tries = lookups[reach]
        hit = lines[one.line][one.word] == lines[one.source][one.start]
        lookups[reach] = (hits + hit, tries + 1)
    last = lines[-1] if lines else []
    return Grade(last == _words(problem.answer), right, len(wanted), lookups)


def reach_name(reach: tuple[int, int]) -> str:
    low, high = reach
    return f"{low}+" if high >= 10**9 else f"{low}-{high}"


def _words(line: str) -> list[str]:
    return [word.strip(_LOOSE) or word for word in line.split()]
