"""Nodes of one launch, by the stores in which they meet; tests/server/test_nodes.py launches two."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from server import free_port
from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.launch import nodes, same_launch
from sglang_triattn.patches.launch.nodes import Listener, ListeningReader, Nodes, nodes_of, notify_others
from sglang_triattn.rounds.rules import complete

REASON = "a reason."


@pytest.fixture
def places(monkeypatch):
    """Two nodes, which wait for each other less long than real ones."""
    monkeypatch.setattr(nodes, "JOIN_TIMEOUT_S", 30.0)
    monkeypatch.setattr(nodes, "READ_TIMEOUT_S", 0.1)
    address = f"127.0.0.1:{free_port()}"
    return Nodes(2, 0, address), Nodes(2, 1, address)


def heard(listener: Listener) -> str:
    """What the listener hears within some seconds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            listener.look()
        except TriAttentionError as error:
            return str(error)
        time.sleep(0.05)
    return "nothing"


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_refusal_reaches_the_other_node(places, refusing):
    """Prevents a node from waiting for one that has ended: the first, which has no store of ranks yet, or the second,
    which must find the first one's."""
    other = places[1 - refusing]
    store = nodes._open_store(other) if refusing else None
    listener = Listener(other)
    listener.look()
    notifier = threading.Thread(target=notify_others, args=(places[refusing], REASON))
    start = time.monotonic()
    notifier.start()
    assert heard(listener) == f"Node {refusing} of this launch refused to start: {REASON}"
    notifier.join()
    assert time.monotonic() - start < 20, "it does not wait longer than the other needs"
    del store


def test_both_refuse(places):
    """Prevents nodes that refuse for the same mistake from holding each other up."""
    start = time.monotonic()
    notifiers = [threading.Thread(target=notify_others, args=(place, REASON)) for place in places]
    for notifier in notifiers:
        notifier.start()
    for notifier in notifiers:
        notifier.join()
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("refusing", [0, 1])
def test_no_other_node_comes(places, monkeypatch, refusing):
    """Prevents a launch from hanging in its own refusal."""
    monkeypatch.setattr(nodes, "JOIN_TIMEOUT_S", 0.5)
    start = time.monotonic()
    notify_others(places[refusing], REASON)
    assert 0.4 < time.monotonic() - start < 5


def test_an_address_that_is_none(monkeypatch):
    """Prevents a traceback in place of the refusal."""
    monkeypatch.setattr(nodes, "JOIN_TIMEOUT_S", 0.5)
    for place in (Nodes(2, 0, "nowhere"), Nodes(2, 1, "nowhere"), Nodes(2, 1, "host.invalid:1")):
        notify_others(place, REASON)


def test_a_store_that_goes_away(places):
    """Prevents a traceback where SGLang's own message about the ranks is on its way."""
    store = nodes._open_store(places[0])
    listener = Listener(places[1])
    listener.look()
    del store
    listener.look()
    listener.look()


def test_a_reader_listens_while_it_waits(places):
    """Prevents a rank's answer from being missed, and a launch from listening only once."""

    class Pipe:
        ready = False

        def poll(self, timeout):
            return self.ready

        def recv(self):
            return "answer"

    looks = []
    pipe = Pipe()
    reader = ListeningReader(pipe, SimpleNamespace(look=lambda: looks.append(1)))
    assert not reader.poll(timeout=0.0)
    pipe.ready = True
    assert reader.poll(0.0)
    assert (reader.recv(), looks) == ("answer", [1])


def test_one_node_has_no_others(monkeypatch):
    """Prevents a store, or a wait for other nodes, in a launch on one node."""
    settings = SimpleNamespace(nnodes=2, node_rank=1, dist_init_addr="h:1")
    assert nodes_of(settings) == Nodes(2, 1, "h:1")
    for changed in ({"nnodes": 1}, {"dist_init_addr": None}):
        assert nodes_of(SimpleNamespace(**{**vars(settings), **changed})) is None
    monkeypatch.setenv("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "env://")
    assert nodes_of(settings) is None


@pytest.fixture
def compared(monkeypatch):
    """`compared(*configs)` returns the refusal of each rank, or None, with one rank for each Config or None."""
    store = HashStore()
    local = threading.local()
    monkeypatch.setattr(same_launch, "RANKS_ANSWER_S", 5.0)
    monkeypatch.setattr(same_launch, "PLAIN_RANKS_WAIT_S", 1.0)
    monkeypatch.setattr(same_launch, "RANKS_COMPARE_S", 1.0)
    monkeypatch.setattr(same_launch, "_get_default_store", lambda: store)

    def compare(*configs) -> list[str | None]:
        found: list[str | None] = [None] * len(configs)
        monkeypatch.setattr(same_launch, "_ranks", lambda: (local.rank, len(configs)))

        def run(rank):
            local.rank = rank
            try:
                same_launch.check_same_launch(configs[rank])
            except TriAttentionError as error:
                found[rank] = str(error)

        threads = [
            threading.Thread(target=run, args=(rank,)) for rank, config in enumerate(configs) if config != "absent"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    return compare


def test_equal_launches(compared):
    """Prevents a launch from being refused without a difference, plain ones among them."""
    assert compared(complete(Config()), complete(Config())) == [None, None]


@pytest.mark.parametrize("other", [None, "absent"])
def test_plain_launches(compared, other):
    """Prevents the package from changing a launch that it was not asked for, also where another node lacks it."""
    assert compared(None, other) == [None, None]


def test_one_that_never_answers(compared):
    """Prevents a wait for a node that does not have the package."""
    first, _ = compared(complete(Config()), "absent")
    assert first.startswith("Rank 1, on another node, did not say within 5 s whether it compresses, as rank 0 does: ")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (None, "Rank 0 compresses and rank 1, on another node, does not: give --enable-triattention and its other"),
        (
            complete(Config(budget=65)),
            "--triattention-budget is 2048 for rank 0 and 65 for rank 1, on another node: give all",
        ),
        (
            complete(Config(), images=False),
            "What follows from its model, images, is True for rank 0 and False for rank 1",
        ),
    ],
)
def test_launches_that_differ(compared, other, words):
    """Prevents ranks that keep different tokens, or wait for one that does not compress; every rank must refuse."""
    first, second = compared(complete(Config()), other)
    assert words in first
    assert second


@pytest.mark.parametrize("contents", [("a", "a"), ("a", "b")])
def test_statistics(compared, tmp_path, contents):
    """Prevents ranks that score by different statistics, and a refusal of copies of the same file."""
    files = [tmp_path / name for name in ("first", "second")]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content)
    found = compared(*(complete(Config(stats=str(file))) for file in files))
    if contents == ("a", "a"):
        assert found == [None, None]
    else:
        assert all(
            "differ: give every node a copy of the same file with --triattention-stats." in each for each in found
        )
