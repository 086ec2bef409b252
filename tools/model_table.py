"""Write the table of known models into docs/compatibility.md: what `sglang-triattn check` says of each.

python tools/model_table.py            writes it
python tools/model_table.py --check    fails if what stands there is stale
"""

import json
from collections.abc import Iterator

from checkout import ROOT
from documents import DOCS, generated, write_generated
from sglang_triattn.compatibility.verdict import Verdict, attention_words, judge, scored_words
from sglang_triattn.config import Config

FILE = DOCS / "compatibility.md"
NAME = "model_table"
CONFIGS = ROOT / "tests" / "support" / "configs"


def verdicts() -> list[Verdict]:
    """The verdict on each known model with default flags, but a budget that its window, if it has one, fits in."""
    found = []
    for file in sorted(CONFIGS.glob("*.json"), key=lambda file: file.stem):
        content = json.loads(file.read_text())
        name = content["_name_or_path"].split("/")[-1]
        verdict = judge(content, name, Config(), {})
        if verdict.layout is not None and verdict.layout.window > Config.budget:
            verdict = judge(content, name, Config(budget=verdict.layout.window), {})
        found.append(verdict)
    return found


def lines() -> Iterator[str]:
    """The table in Markdown, and how many models are compressed."""
    found = verdicts()
    yield "\n| model | layers | scored | page sizes and selections, or why it is refused |\n|---|---|---|---|\n"
    for verdict in found:
        assert verdict.layout is not None
        scored = "" if verdict.reason else scored_words(verdict.layout)
        yield f"| {verdict.name.split()[0]} | {attention_words(verdict.layout)} | {scored} | {_last(verdict)} |\n"
    accepted = sum(verdict.refusal is None for verdict in found)
    yield f"\n{accepted} of these {len(found)} models are compressed.\n\n"


def _last(verdict: Verdict) -> str:
    if verdict.reason:
        return f"refused: {verdict.reason}"
    if verdict.refusal:
        return verdict.refusal
    window = verdict.layout.window if verdict.layout else 0
    return "all" + (f", with a budget of at least {window:,}" if window > Config.budget else "")


def is_stale() -> bool:
    return generated(FILE, NAME)[1] != "".join(lines())


def main() -> None:
    write_generated(FILE, NAME, "".join(lines()), "known models")


if __name__ == "__main__":
    main()
