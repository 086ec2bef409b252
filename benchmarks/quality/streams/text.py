"""Streams of text that was not made for the benchmark (task `text`): manuals and sources that come with Python.

They change with Python's version, so figures compare only between equal versions. None of the topics shares a paragraph
with the text on which `tools/prepare_model.py` calibrates, nor do the two forms share one.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

from benchmarks.quality.streams.draft import Draft, Order
from benchmarks.quality.streams.format import StreamError

TOPICS = {
    "bench": ("assignment", "customization", "formatstrings", "typesmapping", "typesseq"),
    "held-out": ("attribute-access", "comparisons", "debugger", "string-methods", "types"),
}
SOURCES = {
    "bench": ("argparse", "configparser", "fractions", "mailbox", "statistics"),
    "held-out": ("calendar", "difflib", "imaplib", "smtplib", "tarfile"),
}
PROMPTS = {
    "bench": {
        "prose": """\
What follows is a part of the reference manual of the Python language, as its help() shows it. The manual describes \
the syntax and what it means, one topic after another, in full sentences and with short examples. Headings are \
underlined, code is indented by three spaces, and names of functions, classes and exceptions stand between quotation \
marks. Some topics refer to others, which are not printed here. The text is complete from its first line on and ends \
in the middle of a paragraph; go on with it as the manual does, in the same style and with the same terms.
""",
        "code": """\
# What follows is a module of the Python standard library, printed from its first line on: comment, docstring, imports,
# then classes and functions, in the order in which they stand in the file. Lines are indented by four spaces a level
# and are at most 79 characters long. Public names have docstrings; names that begin with an underscore are private to
# the module. The listing ends in the middle of the file; go on with it as its authors did, in the same style and with
# the same names.
""",
    },
    "held-out": {
        "prose": """\
Copy of a chapter on Python for people who know other languages already. It goes into every rule with its exceptions, \
gives examples that can be typed into the interpreter, and marks what has changed between versions. Where two rules \
meet, the text says which of them wins and why. Lists, tables and literal blocks are kept as they were. The copy \
breaks off where the page was full, and the task is to write the next words exactly as the author would have written \
them.
""",
        "code": """\
# Source code of a well-known Python package, for study. The file is shown as it was released, with its comments and
# tests left in. Read it from the top: what the later functions call is defined above or imported in the first lines.
# Nothing has been left out, renamed or reformatted. The excerpt stops somewhere in the middle, and whatever comes next
# follows the conventions of what has been shown so far.
""",
    },
}


def text(rng: Random, order: Order) -> Draft:
    """A stream of `order.units` lines, alternating prose and code; the second half of its tokens is scored."""
    kind = ("prose", "code")[order.number % 2]
    found = _topics(order.form) if kind == "prose" else _sources(order.form)
    lines = "\n\n".join(rng.sample(found, len(found))).splitlines(keepends=True)
    return Draft(PROMPTS[order.form][kind], "".join(lines[: order.units]), score_last=order.tokens // 2)


def _topics(form: str) -> list[str]:
    from pydoc_data.topics import topics

    found = [topics[name] for name in TOPICS[form] if name in topics]
    if not found:
        raise StreamError("This Python has none of the manual's topics: use the python.org or pyenv build of it.")
    return found


def _sources(form: str) -> list[str]:
    paths = [Path(os.__file__).with_name(f"{name}.py") for name in SOURCES[form]]
    found = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    if not found:
        raise StreamError("This Python comes without its sources: use a build that installs them.")
    return found
