"""Words that the code does not use, because the field has a plainer one or the sentence wants another subject."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkout import ROOT

WORDS = re.compile(
    r"(?<![a-z])(behind|besides?|apart|told|tells?|said|whatever|nobody|alike|foretells?|foretold)(?![a-z])",
    re.IGNORECASE,
)
FOLDERS = ("kernels", "patches", "sglang_triattn", "tools", "benchmarks", "tests")

# Texts that a model reads, and this list.
QUOTED = (
    *(f"benchmarks/quality/streams/{name}.py" for name in ("code", "logs", "prose", "text", "words")),
    *("tools/demo.py", "tests/unit/tools/test_words.py"),
)
# Inside compiled functions, which are compiled again when their source changes: take a line out when one changes.
LATER = (
    *(f"kernels/score/{name}.py" for name in ("latent_kernel", "parts", "score_kernel", "value_size_kernel")),
    *("kernels/compact/list_moves_kernel.py", "kernels/select/importance_kernel.py"),
)


def found_in(text: str) -> list[tuple[int, str]]:
    """The words of a source text, each with its line; names are split at underscores and capitals."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        found += [(number, match[0]) for match in WORDS.finditer(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", line))]
    return found


def sources(folder: str) -> Iterator[Path]:
    """The folder's sources, relative to the checkout; a linked folder's are those of its own name."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path.resolve().is_relative_to((ROOT / folder).resolve()):
            yield path.relative_to(ROOT)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_code_speaks_plainly(folder):
    """Prevents the words from coming back."""
    files = list(sources(folder))
    assert len(files) > 10
    found = [
        f"{path}:{line}: {word}"
        for path in files
        if not any(path.is_relative_to(excepted) for excepted in (*QUOTED, *LATER))
        for line, word in found_in((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "def slots_behind(row): ...",
        "# Besides, the row is read.",
        '"""What nobody reads.',
        'raise ValueError("whatever it tells")',
        "class KeptApart: ...",
        "TOLD = 1",
        "x.foretold()",
    ],
)
def test_the_words_are_found(text):
    """Prevents a list of words that matches nothing: in names, comments, docstrings and strings."""
    assert found_in(text)


@pytest.mark.parametrize("text", ["beforehand", "department", "intellect", "bedside"])
def test_other_words_are_not_found(text):
    """Prevents a rule against words that merely contain one of these."""
    assert not found_in(text)
