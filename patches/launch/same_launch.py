"""Ranks on several nodes compare what their nodes were asked to do, before any of them waits for another.

SGLang parts: `Scheduler` (sglang/srt/managers/scheduler.py); the store of torch.distributed in which its ranks met.

Each node has a command line and files of its own. A rank that compresses where another does not, or by other
settings, would wait for it for ever, or keep other tokens than it does. So every rank of a launch on several nodes
answers, one that does not compress too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.distributed.distributed_c10d import _get_default_store

from sglang_triattn import __version__
from sglang_triattn.config import OPTIONS, Config, flag
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.launch.handshake import answer_hook

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from sglang_triattn.patches.sglang_types import Scheduler

RANKS_ANSWER_S = 60.0
"""How long a rank waits for another's answer: they have met before, and answer once their models are loaded."""
PLAIN_RANKS_WAIT_S = 15.0
"""The same for a rank that does not compress, and serves without the answer of a node that lacks this package."""
RANKS_COMPARE_S = 10.0
"""How long the first rank, if it refuses, stays for the others to read the answers."""
_COMPARED = "triattention/compared"


def check_same_launch(config: Config | None) -> None:
    """Compares what the nodes of a launch were asked to do; every rank of every node calls this once it is built.

    Does nothing on a single node.

    Args:
        config: as the launch resolved it; None for a rank that does not compress.

    Raises:
        TriAttentionError: a rank compresses and another does not, or does so by other settings or statistics. A rank
            that does not compress asks only those that answer.
    """
    ranks = _ranks()
    if ranks is None:
        return
    store = _get_default_store()
    own = _asked(config)
    store.set(_key(ranks[0]), json.dumps(own))
    refusal = _first_difference(store, own, ranks)
    store.add(_COMPARED, 1)
    if refusal is None:
        return
    # The store ends with the first rank, which has it.
    deadline = time.monotonic() + RANKS_COMPARE_S
    while ranks[0] == 0 and store.add(_COMPARED, 0) < ranks[1] and time.monotonic() < deadline:
        time.sleep(0.05)
    raise TriAttentionError(refusal)


def _ranks() -> tuple[int, int] | None:
    """This rank among all of the launch, and their number; None on a single node."""
    from sglang.srt.runtime_context import get_parallel

    if not torch.distributed.is_initialized() or get_parallel().nnodes == 1:
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _key(rank: int) -> str:
    return f"triattention/rank/{rank}"


def _first_difference(store: Store, own: dict[str, Any], ranks: tuple[int, int]) -> str | None:
    """A sentence on the first rank that differs from this one; None if all are equal."""
    deadline = time.monotonic() + (RANKS_ANSWER_S if own["compresses"] else PLAIN_RANKS_WAIT_S)
    for other in range(ranks[1]):
        answer = _answer_of(store, other, deadline)
        if answer is None and not own["compresses"]:
            continue
        found = None if answer is None else json.loads(answer)
        if found != own:
            return _difference(own, found, ranks[0], other)
    return None


def _asked(config: Config | None) -> dict[str, Any]:
    if config is None:
        return {"version": __version__, "compresses": False}
    settings = dataclasses.asdict(config)
    if not config.measures:
        # Where the file is may differ.
        with suppress(OSError):
            settings["stats"] = hashlib.sha256(Path(config.stats).read_bytes()).hexdigest()
    return {"version": __version__, "compresses": True, **settings}


def _answer_of(store: Store, rank: int, deadline: float) -> bytes | None:
    while not store.check([_key(rank)]):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return store.get(_key(rank))


def _difference(own: dict[str, Any], found: dict[str, Any] | None, rank: int, other: int) -> str:
    if found is None:
        return (
            f"Rank {other}, on another node, did not say within {RANKS_ANSWER_S:.0f} s whether it compresses, as rank "
            f"{rank} does: install sglang-triattn {__version__} on every node, and give all nodes the same flags."
        )
    if own["version"] != found["version"]:
        return (
            f"Rank {rank} has sglang-triattn {own['version']}, and rank {other}, on another node, {found['version']}: "
            "install one version on every node."
        )
    if own["compresses"] != found["compresses"]:
        compressing, plain = (rank, other) if own["compresses"] else (other, rank)
        return (
            f"Rank {compressing} compresses and rank {plain}, on another node, does not: give --enable-triattention "
            "and its other flags to every node, or to none."
        )
    name = next(name for name in own if own[name] != found.get(name))
    if name == "stats":
        return (
            f"The statistics of rank {rank} and of rank {other}, on another node, differ: give every node a copy of "
            f"the same file with {flag(name)}."
        )
    what = flag(name) if name in {option.name for option in OPTIONS} else f"What follows from its model, {name},"
    return (
        f"{what} is {own[name]} for rank {rank} and {found.get(name)} for rank {other}, on another node: give all "
        "nodes the same model and the same flags."
    )


class PlainRank:
    """A rank that does not compress, on one of several nodes: it answers those that do."""

    def __init__(self) -> None:
        self.refusal: str | None = None

    def hooks(self) -> list[Hook]:
        return [
            Hook(
                "sglang.srt.managers.scheduler.Scheduler.__init__",
                "after",
                self._on_built,
                "self server_args port_args",
                why="compares what this node was asked for with the other nodes",
            ),
            answer_hook(lambda: self.refusal, "answers another node that compresses: the launches agree, or not"),
            serving_hook(lambda: self.refusal),
        ]

    def _on_built(self, *_: object, **__: object) -> None:
        try:
            check_same_launch(None)
        except TriAttentionError as error:
            self.refusal = str(error)


def serving_hook(refusal: Callable[[], str | None]) -> Hook:
    """Lets a rank that has refused wait for its end; `refusal` returns why, or None.

    If it served, or ended at once, ranks of other nodes would lose their connections to it, and SGLang would end those
    nodes before they could say why.
    """

    def serve(original: Callable, scheduler: Scheduler) -> None:
        if refusal() is None:
            original(scheduler)
            return
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.5)
        sys.exit(1)

    return Hook(
        "sglang.srt.managers.scheduler.Scheduler.run_event_loop",
        "around",
        serve,
        "self",
        why="lets a rank that has refused wait for its end",
    )
