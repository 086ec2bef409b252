"""Write the table of every SGLang function that this package hooks into docs/architecture.md, from the hook lists.

python tools/hook_table.py            writes it
python tools/hook_table.py --check    fails if what stands there is stale
"""

import inspect
from collections.abc import Iterator
from pathlib import Path

from documents import DOCS, generated, write_generated
from env import fail
from sglang_triattn.patches.doctor.hook_list import WHY, all_hooks, short
from sglang_triattn.patches.hooks.hook import Hook

FILE = DOCS / "architecture.md"
NAME = "hook_table"


def place(hook: Hook) -> str:
    """Our file, relative to the root of the repository."""
    path = Path(inspect.getfile(hook.function))
    return "/".join(path.parts[path.parts.index("patches") :])


def lines() -> Iterator[str]:
    """The tables in Markdown, one per process."""
    unused = set(WHY)
    for process, hooks in all_hooks().items():
        yield f"\n**{process}**\n\n| SGLang's function | when | our file | why |\n|---|---|---|---|\n"
        for hook in hooks:
            key = (process, short(hook.target))
            if key not in WHY:
                fail(f"{hook.target} is hooked: say in patches/doctor/hook_list.py why.")
            unused.discard(key)
            yield f"| `{hook.target.removeprefix('sglang.srt.')}` | {hook.kind} | `{place(hook)}` | {WHY[key]} |\n"
    if unused:
        fail(f"{' '.join(min(unused))} is not hooked any more: remove it from patches/doctor/hook_list.py.")
    yield "\n"


def is_stale() -> bool:
    return generated(FILE, NAME)[1] != "".join(lines())


def main() -> None:
    write_generated(FILE, NAME, "".join(lines()), "hooks")


if __name__ == "__main__":
    main()
