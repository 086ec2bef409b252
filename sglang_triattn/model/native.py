"""The architectures that SGLang implements, without importing it."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_ENTRY = re.compile(r"^EntryClass\s*(?::[^=\n]*)?=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)


@cache
def native_architectures() -> frozenset[str]:
    """The names in SGLang's own files, for importing all of them takes many seconds; empty without SGLang."""
    found = find_spec("sglang")
    names: set[str] = set()
    for root in (found.submodule_search_locations or ()) if found else ():
        for file in (Path(root) / "srt" / "models").glob("*.py"):
            for entry in _ENTRY.findall(file.read_text(encoding="utf-8")):
                names.update(re.findall(r"\w+", entry))
    # SGLang's configuration of OLMo 3 gives it the name of its implementation.
    return frozenset({*names, "Olmo3ForCausalLM"} if names else ())
