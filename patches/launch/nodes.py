"""Several nodes of one server: what one of them refuses, all refuse.

SGLang parts: the settings `nnodes`, `node_rank` and `dist_init_addr`; the store of torch.distributed that the first
rank of the first node has at that address (sglang/srt/distributed/bootstrap.py), where ranks wait for those of the
other nodes.

A node that refuses before its ranks start leaves its sentence in that store, where the main processes of the others
look for it while their ranks start. A first node that refuses has no rank that could have the store: it opens one
itself, for as long as others may take to come. What ranks find out once they have met is in `same_launch`.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sglang_triattn.errors import TriAttentionError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

REFUSAL, ACKNOWLEDGED = "triattention/refusal", "triattention/heard"
JOIN_TIMEOUT_S = 60.0
"""How long a node that refused tries to reach the others."""
READ_TIMEOUT_S = 5.0
"""How long a first node that refused keeps the store for nodes that have heard it."""
ACKNOWLEDGE_TIMEOUT_S = 15.0
"""How long the node that has the store keeps it once it knows that the launch is refused."""
_STORE_S = 3.0
_LONGEST = 2000


@dataclass(frozen=True)
class Nodes:
    """The place of this node among `count`, which meet at `address` (host:port)."""

    count: int
    rank: int
    address: str


def nodes_of(settings: Any) -> Nodes | None:
    """The nodes of a launch; None if there is one, or if they meet elsewhere than at --dist-init-addr.

    Args:
        settings: SGLang's settings record, or the parsed command line.
    """
    count, address = getattr(settings, "nnodes", None) or 1, getattr(settings, "dist_init_addr", None)
    if count == 1 or not address or os.environ.get("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"):
        return None
    return Nodes(count, getattr(settings, "node_rank", 0), address)


def notify_others(nodes: Nodes, refusal: str) -> None:
    """Sends the other nodes why this one refuses, before it starts a rank; takes up to JOIN_TIMEOUT_S seconds."""
    sentence = f"Node {nodes.rank} of this launch refused to start: {refusal}"[:_LONGEST]
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    with suppress(OSError, ValueError, RuntimeError):
        if nodes.rank == 0:
            store = _open_store(nodes)
            store.set(REFUSAL, sentence)
            _wait_for_acknowledgements(store, nodes, deadline)
            # Ranks that lose the store end their nodes with SGLang's error: nodes that acknowledged must end first.
            time.sleep(READ_TIMEOUT_S)
            return
        while (store := _join_store(nodes)) is None:
            if time.monotonic() > deadline:
                return
            time.sleep(0.2)
        # The first refusal counts; nodes that refuse later keep their own.
        if not store.check([REFUSAL]):
            store.set(REFUSAL, sentence)
        store.add(ACKNOWLEDGED, 1)


def _wait_for_acknowledgements(store: TCPStore, nodes: Nodes, deadline: float) -> None:
    while store.add(ACKNOWLEDGED, 0) < nodes.count - 1 and time.monotonic() < deadline:
        time.sleep(0.1)


def _place(nodes: Nodes) -> tuple[str, int]:
    from sglang.srt.utils.network import NetworkAddress

    address = NetworkAddress.parse(nodes.address)
    return address.host, address.port


def _open_store(nodes: Nodes) -> TCPStore:
    return _store(*_place(nodes), opens=True)


def _join_store(nodes: Nodes) -> TCPStore | None:
    """The nodes' store; None as long as no process has it."""
    host, port = _place(nodes)
    try:
        # torch would log an error with its whole stack.
        socket.create_connection((host, port), timeout=_STORE_S).close()
    except OSError:
        return None
    return _store(host, port, opens=False)


def _store(host: str, port: int, opens: bool) -> TCPStore:
    # Imported late: a refusal on the command line comes before torch is needed.
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, is_master=opens, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S))


class Listener:
    """Looks for a refusal of another node while the ranks of this one start."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._store: TCPStore | None = None

    def look(self) -> None:
        """Raises TriAttentionError if another node has refused; the ranks say what is wrong with the store."""
        try:
            self._store = self._store or _join_store(self._nodes)
            if self._store is None or not self._store.check([REFUSAL]):
                return
            sentence = self._store.get(REFUSAL).decode(errors="replace")
            self._store.add(ACKNOWLEDGED, 1)
            if self._nodes.rank == 0:
                # The store ends with the rank that has it.
                _wait_for_acknowledgements(self._store, self._nodes, time.monotonic() + ACKNOWLEDGE_TIMEOUT_S)
        except (OSError, ValueError, RuntimeError):
            self._store = None
            return
        raise TriAttentionError(" ".join(sentence.split()))


class ListeningReader:
    """The pipe from a rank, which SGLang polls, as one that listens to the other nodes between two looks."""

    def __init__(self, reader: Any, listener: Listener) -> None:
        self._reader, self._listener = reader, listener

    def poll(self, timeout: float = 0.0) -> bool:
        if self._reader.poll(timeout):
            return True
        self._listener.look()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)
