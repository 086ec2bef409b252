"""Write the table of every SGLang function that this package hooks into docs/architecture.md, from the hook lists.

python tools/hook_table.py            writes it
python tools/hook_table.py --check    fails if what stands there is stale
"""

import inspect
from collections.abc import Iterator
from pathlib import Path

from documents import DOCS, generated, write_generated
from sglang_triattn.patches.doctor.hook_list import all_hooks
from sglang_triattn.patches.hooks.hook import Hook

FILE = DOCS / "architecture.md"
NAME = "hook_table"


def place(hook: Hook) -> str:
    """Our file, relative to the root of the repository."""
    path = Path(inspect.getfile(hook.function))
    return "/".join(path.parts[path.parts.index("patches") :])


def lines() -> Iterator[str]:
    """The tables in Markdown, one per process."""
    for process, hooks in all_hooks().items():
        yield f"\n**{process}**\n\n| SGLang's function | when | our file | why |\n|---|---|---|---|\n"
        for hook in hooks:
            yield f"| `{hook.target.removeprefix('sglang.srt.')}` | {hook.kind} | `{place(hook)}` | {hook.why} |\n"
    yield "\n"


def is_stale() -> bool:
    return generated(FILE, NAME)[1] != "".join(lines())


def main() -> None:
    write_generated(FILE, NAME, "".join(lines()), "hooks")


if __name__ == "__main__":
    main()
