"""What follows from an update of the weights: a warning, or a measurement once there is room for it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.calibration.weight_updates import WeightUpdates
from sglang_triattn.rounds.plan import Totals
from sglang_triattn.rounds.rules import complete

CONFIG = complete(Config("s"))


class Server:
    """The three places of SGLang's updater that are hooked, and what followed."""

    def __init__(self, wanted: bool, built: bool = True, fails: bool = False) -> None:
        self.totals, self.did, self._fails = Totals(), [], fails
        self.manager = SimpleNamespace(offload_tags=set(), is_fully_idle=lambda: True)
        read = (lambda: (CONFIG, self.totals)) if built else (lambda: None)
        updates = WeightUpdates(read, lambda: wanted, self._measure, lambda: self.did.append("dropped"))
        self._record, self._flush, self._resume = (hook.function for hook in updates.hooks())

    def _measure(self) -> None:
        if self._fails:
            raise TriAttentionError("no room.")
        self.did.append("measured")

    def update(self, flush: bool, flushed: bool = True) -> tuple[bool, str]:
        self._record(None, self.manager, "v2")
        asked = SimpleNamespace(flush_cache=flush)
        return self._flush((flushed, "message"), self.manager, asked, True, "message")

    def resume(self) -> object:
        return self._resume("output", self.manager, SimpleNamespace())


def test_the_last_part_of_an_update_is_measured_once():
    """Prevents a measurement for each of an update's many parts, and one while requests run."""
    server = Server(wanted=True)
    assert server.update(flush=False) == (True, "message")
    assert server.update(flush=True, flushed=False) == (False, "message")
    assert "measured" not in server.did
    server.update(flush=True)
    assert server.did.count("measured") == 1
    assert server.resume() == "output"
    assert server.did.count("measured") == 1
    # Rows of the old weights go with each part.
    assert server.did.count("dropped") == 3


def test_a_pool_that_was_given_back_is_awaited():
    """Prevents a measurement in memory that release_memory_occupation has unmapped."""
    server = Server(wanted=True)
    server.manager.offload_tags = {"kv_cache"}
    server.update(flush=True)
    server.resume()
    assert "measured" not in server.did
    server.manager.offload_tags = set()
    server.resume()
    assert server.did[-1] == "measured"


def test_a_measurement_that_fails_is_logged(caplog):
    """Prevents an update from ending a server that could go on."""
    server = Server(wanted=True, fails=True)
    assert server.update(flush=True) == (True, "message")
    assert "statistics of the weights before: no room." in caplog.text


def test_without_a_measurement_one_line_for_each_update(caplog):
    """Prevents silence about statistics of other weights, and one line for each of an update's many parts."""
    server = Server(wanted=False)
    with caplog.at_level(logging.WARNING):
        for rounds in (0, 0, 0, 3, 3):
            server.totals.rounds = rounds
            server.update(flush=True)
    assert [record.message.count("weights before, from s") for record in caplog.records] == [1, 1]
    assert "measured" not in server.did


@pytest.mark.parametrize("wanted", [True, False])
def test_nothing_happens_before_there_is_a_compressor(caplog, wanted):
    """Prevents an update from crashing while nothing is compressed yet."""
    server = Server(wanted, built=False)
    server.update(flush=True)
    assert server.did == []
    assert caplog.records == []
