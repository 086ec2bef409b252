"""Write what `sglang-triattn check` says of models into docs/compatibility.md.

python tools/model_table.py                        writes the table of known models
python tools/model_table.py --check                fails if what stands there is stale
python tools/model_table.py --registry [--check]   the same for every architecture of SGLang's registry
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import sglang_registry
from documents import DOCS, add_check, generated, put_generated
from sglang_registry import CONFIGS
from sglang_triattn.compatibility.verdict import Verdict, attention_words, judge, scored_words
from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.families import DIFFUSION, FAMILIES

FILE = DOCS / "compatibility.md"
NAME = "model_table"
REGISTRY = "model_table registry"

# No default of a configuration class shall be the reason: rounds need a longer context than some of these have.
_LONG = {"context_length": 131072}
# A plain decoder, in place of the file of an architecture that neither transformers nor SGLang has a class for.
_PLAIN = {
    "model_type": "plain",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "dtype": "bfloat16",
}

PLAIN = "all 128 dims of a head"
ACCEPTED, TEXT, REFUSED = "accepted", "accepted, requests with text alone", "refused"
# Of an architecture that neither transformers nor SGLang has a configuration for.
NO_CONFIG = "no configuration at hand, a plain one is "
STATES, ALONE, OTHERS = "keeps no KV per token", "does not generate alone", "stands for others"


@dataclass(frozen=True)
class Outcome:
    """What becomes of one architecture: `kind` is one of the above, `reason` completes "because ..."."""

    architecture: str
    kind: str
    reason: str = ""


def verdicts() -> list[Verdict]:
    """The verdict on each known model with default flags, but a budget that its window, if it has one, fits in."""
    found = []
    for file in sorted(CONFIGS.glob("*.json"), key=lambda file: file.stem):
        content = json.loads(file.read_text())
        found.append(_judged(content, content["_name_or_path"].split("/")[-1], {}))
    return found


def lines() -> Iterator[str]:
    """The table in Markdown, with one row for all plain models, and how many are compressed."""
    found = verdicts()
    plain, rows = [], []
    for verdict in found:
        assert verdict.layout is not None
        name, layers = verdict.name.split()[0], attention_words(verdict.layout)
        scored, last = "" if verdict.reason else scored_words(verdict.layout), _last(verdict)
        count = layers.removesuffix(" full")
        if (scored, last) == (f"{count} layers, {PLAIN}", "all"):
            plain.append(f"{name} ({count})")
        else:
            rows.append(f"| {name} | {layers} | {scored} | {last} |\n")
    yield "\n| model | layers | scored | page sizes and selections, or why it is refused |\n|---|---|---|---|\n"
    yield f"| {', '.join(plain)} | this many, all full | all layers, {PLAIN} | all |\n"
    yield from rows
    accepted = sum(verdict.refusal is None for verdict in found)
    yield f"\n{accepted} of these {len(found)} models are compressed.\n\n"


def outcomes() -> list[Outcome]:
    """What becomes of each architecture of SGLang's registry."""
    return [_outcome(name, module) for name, module in sglang_registry.architectures().items()]


def registry_lines(found: Iterable[Outcome]) -> Iterator[str]:
    """The table of outcomes in Markdown, and the share that is accepted."""
    groups: dict[tuple[str, str], list[str]] = {}
    for outcome in found:
        groups.setdefault((outcome.kind, outcome.reason), []).append(outcome.architecture)
    answers = [ACCEPTED, TEXT, REFUSED]
    order = [*answers, *(NO_CONFIG + answer for answer in answers), STATES, ALONE, OTHERS]
    yield "\n| outcome | number | architectures |\n|---|---|---|\n"
    for (kind, reason), names in sorted(
        groups.items(), key=lambda item: (order.index(item[0][0]), -len(item[1]), item)
    ):
        words = f"{kind}: {reason}" if reason else kind
        yield f"| {words} | {len(names)} | {', '.join(sorted(names, key=str.lower))} |\n"
    accepted, all_ = share(found)
    yield f"\n{accepted} of the {all_} that generate and keep KV per token are accepted, {accepted / all_:.0%}.\n\n"


def share(found: Iterable[Outcome]) -> tuple[int, int]:
    """How many architectures are accepted, and how many generate and keep KV per token."""
    kinds = [outcome.kind.removeprefix(NO_CONFIG) for outcome in found]
    accepted = sum(kind in (ACCEPTED, TEXT) for kind in kinds)
    return accepted, accepted + kinds.count(REFUSED)


def _outcome(name: str, module: str) -> Outcome:
    if sglang_registry.stands_for_others(module):
        return Outcome(name, OTHERS)
    family = FAMILIES.get(name)
    if not sglang_registry.generates(name, module) or (family is not None and family.refused is DIFFUSION):
        return Outcome(name, ALONE)
    if not sglang_registry.keeps_kv(module):
        return Outcome(name, STATES)
    content = sglang_registry.configuration(name, module)
    if content is not None:
        try:
            return Outcome(name, *_answer(content, name))
        except TriAttentionError:
            # A class whose defaults are those of no model.
            pass
    answer, reason = _answer({**_PLAIN, "architectures": [name]}, name)
    return Outcome(name, NO_CONFIG + answer, reason)


def _answer(content: dict[str, Any], name: str) -> tuple[str, str]:
    """Whether the model is accepted, and why not."""
    verdict = _judged(content, name, _LONG)
    if verdict.reason:
        return REFUSED, verdict.reason
    assert verdict.refusal is None, verdict.refusal
    return ACCEPTED if verdict.rules.images else TEXT, ""


def _judged(content: dict[str, Any], name: str, settings: dict[str, Any]) -> Verdict:
    verdict = judge(content, name, Config(), settings)
    if verdict.layout is not None and verdict.layout.window > Config.budget:
        verdict = judge(content, name, Config(budget=verdict.layout.window), settings)
    return verdict


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
    parser = argparse.ArgumentParser(description=f"Write a table of models in {FILE.name}.", allow_abbrev=False)
    add_check(parser)
    parser.add_argument("--registry", action="store_true", help="the table of SGLang's registry")
    args = parser.parse_args()
    if args.registry:
        put_generated(FILE, REGISTRY, "".join(registry_lines(outcomes())), "SGLang's registry", check=args.check)
    else:
        put_generated(FILE, NAME, "".join(lines()), "known models", check=args.check)


if __name__ == "__main__":
    main()
