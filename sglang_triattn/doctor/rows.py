"""One thing that `sglang-triattn doctor` has looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sglang_triattn.errors import TriAttentionError, first_line

OK, NOTE, WRONG = "ok", "note", "wrong"
"""`NOTE` is worth a look and no fault. Faults are WRONG, or say in one word what is wrong."""


@dataclass(frozen=True)
class Row:
    """One line of the answer.

    Attributes:
        status: OK, NOTE, WRONG, "missing" or "changed".
        found: what is there.
        consequence: what does not work because of it; empty unless it is a fault.
    """

    name: str
    status: str
    found: str
    consequence: str = ""

    @property
    def is_fault(self) -> bool:
        return self.status not in (OK, NOTE)


def collect(name: str, look: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of one part; what goes wrong while looking is a row too.

    Raises:
        TriAttentionError: a mistake of the user.
    """
    try:
        yield from look()
    except TriAttentionError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {first_line(error)}"
        yield Row(name, WRONG, found, "the rest of this part could not be looked at")
