"""Shared by the tests of a compressed request: settings, a report, and which transitions may follow which."""

from __future__ import annotations

import dataclasses

from sglang_triattn.config import Config
from sglang_triattn.request.lifecycle import CompressedRequest, Stage
from sglang_triattn.request.options import CompressionOptions
from sglang_triattn.rounds.plan import Report
from sglang_triattn.rounds.rules import complete

CONFIG = complete(Config("s", budget=100, interval=30, recent=10))
COMPACT = dataclasses.replace(CONFIG, prompt="compact")
REPORT = Report(0, 0, 0, 0, 0, 0)
PROMPT = 20


def request(config: Config | None = CONFIG, *, withheld: bool = False, conversation: str | None = None):
    return CompressedRequest(CompressionOptions(config, conversation), withheld=withheld)


LEGAL = {
    Stage.ARRIVED: {"compact_prompt": Stage.ARRIVED, "acquire": Stage.ACQUIRED, "admit": Stage.ADMITTED},
    Stage.ACQUIRED: {"rollback": Stage.ARRIVED, "admit": Stage.ADMITTED},
    Stage.ADMITTED: {
        "round": Stage.ADMITTED,
        "fail": Stage.ADMITTED,
        "park": Stage.PARKED,
        "publish": Stage.PUBLISHED,
        "retract": Stage.ARRIVED,
        "suspend": Stage.SUSPENDED,
    },
    Stage.SUSPENDED: {"resume": Stage.ADMITTED},
    Stage.PARKED: {},
    Stage.PUBLISHED: {},
}
