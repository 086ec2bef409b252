"""Calls that change SGLang's books: if one fails, either nothing has changed, or the books no longer balance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_triattn.census import IntegrityError
from sglang_triattn.errors import type_and_line


@contextmanager
def all_or_nothing(size: Callable[[], int]) -> Iterator[None]:
    """For a call to SGLang that frees slots: if it raises, nothing has been freed.

    Args:
        size: the number of free slots.

    Raises:
        IntegrityError: it raised after it had freed something, so the owners of the others are unknown.
    """
    before = size()
    try:
        yield
    except Exception as error:
        freed = size() - before
        if freed:
            raise IntegrityError(
                f"Integrity: {freed} slots were freed by a call that failed ({type_and_line(error)})."
            ) from error
        raise


def give_back(what: str, free: Callable[..., object], *taken: object) -> None:
    """Gives back what was taken from SGLang, because what it was taken for has failed.

    Raises:
        IntegrityError: so has this.
    """
    with unbroken(what):
        free(*taken)


@contextmanager
def unbroken(what: str) -> Iterator[None]:
    """For calls to SGLang that change its books in several places: an exception of theirs becomes an IntegrityError.

    Args:
        what: the start of a sentence, "a row was freed".
    """
    try:
        yield
    except Exception as error:
        raise IntegrityError(f"Integrity: {what} only in part ({type_and_line(error)}).") from error
