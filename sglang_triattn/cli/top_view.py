"""How `sglang-triattn top` looks. Frames come from `sglang_triattn.cli.top.frame_of`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

# (heading, field, least width of the terminal at which it is shown)
COLUMNS = (
    ("logical", "logical", 0),
    ("physical", "physical", 0),
    ("held", "held", 62),
    ("frozen", "frozen", 72),
    ("rounds", "rounds", 54),
    ("tokens/s", "tokens_per_second", 0),
)
REPLICA_WIDTH = 10
# Of a request's id: in a terminal of at least 54 characters, and in a narrower one.
LONGEST_ID, SHORTEST_ID = 12, 8


def render(
    url: str,
    frame: Sequence[dict[str, Any]],
    width: int,
    height: int | None = None,
    fault: str | None = None,
    *,
    plain: bool = False,
) -> RenderableType:
    """One frame.

    Args:
        width, height: of the terminal in characters; without a height, all requests are shown.
        fault: why the frame is an old one.
        plain: whether to draw with ASCII alone.
    """
    title = f"sglang-triattn top  {url}"
    parts: list[RenderableType] = [Text(title, style="bold", no_wrap=True, overflow=_overflow(plain))]
    if fault is not None:
        parts.append(Text(_ascii(fault) if plain else fault, style="bold red"))
    heads = [_head(replica, width, len(frame) > 1, plain) for replica in frame]
    # The title, a fault of at most three lines, the table's heading and rule, and the line of those left out.
    free = None if height is None else max(height - 5 - 3 * (fault is not None) - sum(map(len, heads)), 1)
    for head in heads:
        parts.extend(head)
    requests = [{"replica": one["replica"], **request} for one in frame for request in one["requests"]]
    requests.sort(key=lambda request: -request["logical"])
    total = sum(one["running_requests"] for one in frame)
    chosen = requests[:free]
    if chosen:
        parts.append(_table(chosen, width, len(frame) > 1, plain))
    if total > len(chosen):
        parts.append(Text(f"and {total - len(chosen):,} more", style="dim"))
    return Group(*parts)


def _overflow(plain: bool) -> OverflowMethod:
    """How a line that is too long ends."""
    return "crop" if plain else "ellipsis"


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()


def _head(replica: dict[str, Any], width: int, several: bool, plain: bool) -> list[RenderableType]:
    """The lines of one replica, each cut at the terminal's width."""
    pool, totals, conversations = replica["pool"], replica["totals"], replica["conversations"]
    speed = replica["tokens_per_second"]
    logical, physical = replica["logical_tokens"], replica["physical_tokens"]
    held = f" ({physical / logical:.0%})" if logical else ""
    lines = [
        f"running {replica['running_requests']:,}, waiting {replica['waiting_requests']:,}"
        + ("" if speed is None else f", {speed:,.0f} tokens/s"),
        f"held    {physical:,} of {logical:,} logical tokens{held}",
        f"rounds  {totals['rounds']:,}, early {totals['pressure_rounds']:,}",
        f"freed   {totals['freed_slots']:,} slots, moved {totals['moved_bytes'] / 1e6:,.0f} MB",
        f"conversations {conversations['parked']:,} parked, {conversations['resumed']:,} resumed",
    ]
    shown = [Text(line, no_wrap=True, overflow=_overflow(plain)) for line in lines]
    if several:
        shown.insert(0, Text(f"replica {replica['replica']}", style="bold"))
    return [*shown, _pool(pool, width, plain)]


def _pool(pool: dict[str, int], width: int, plain: bool) -> Text:
    """The pool as a bar: in use, held by the tree alone, free."""
    slots, free, evictable = max(pool["slots"], 1), pool["free_slots"], pool["evictable_slots"]
    used = max(slots - free - evictable, 0)
    words = f" {used / slots:.0%} of {slots:,} slots"
    columns = max(min(width - 8 - len(words), 60), 8)
    full = round(columns * used / slots)
    tree = min(round(columns * evictable / slots), columns - full)
    used_mark, tree_mark, free_mark = "#=." if plain else "█▒·"
    return Text.assemble(
        "pool    ", (used_mark * full, "green"), (tree_mark * tree, "cyan"),
        (free_mark * (columns - full - tree), "dim"), words,
        no_wrap=True, overflow=_overflow(plain),
    )  # fmt: skip


def _table(requests: Sequence[dict[str, Any]], width: int, several: bool, plain: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("request", no_wrap=True)
    if several:
        table.add_column("replica", justify="right")
        width -= REPLICA_WIDTH
    longest = LONGEST_ID if width >= 54 else SHORTEST_ID
    columns = [column for column in COLUMNS if width >= column[2]]
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for request in requests:
        cells = [
            _short(_ascii(request["id"]) if plain else request["id"], longest, "~" if plain else "…"),
            *([str(request["replica"])] if several else []),
        ]
        table.add_row(*cells, *(_cell(request, field) for _, field, _ in columns))
    return table


def _short(name: str, longest: int, cut: str) -> Text:
    """Both ends of a request's id, with `cut` between them, as plain text: it comes from a client."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in name)
    half = longest // 2
    return Text(printable if len(name) <= longest else f"{printable[: half - 1]}{cut}{printable[-half:]}")


def _cell(request: dict[str, Any], field: str) -> str:
    if field == "held":
        return f"{request['physical'] / request['logical']:.0%}" if request["logical"] else "-"
    value = request[field]
    return "-" if value is None else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
