"""Prefill and decode in servers of their own, on CPUs."""

from __future__ import annotations

import pytest

from harness import assert_pool_is_whole, prompt
from separated import running_separated


@pytest.fixture(scope="module")
def plain(forkserver, tiny, tmp_path_factory):
    """The client of a decode server of page size 1."""
    folder = tmp_path_factory.mktemp("plain")
    with running_separated(forkserver, tiny, folder, "--page-size", "1", compressed=(False,)) as (client,):
        yield client


def test_transfer(plain, serve):
    """Prevents K/V that arrives elsewhere, in another order or not at all: answers equal those of one server."""
    whole = serve("--page-size", "1", compressed=False)
    stem = prompt(1, 60)
    for ids in (stem, stem + prompt(2, 30), prompt(3, 300), prompt(4, 1)):
        ours, theirs = (client.generate(ids, 24) for client in (plain, whole))
        assert ours["output_ids"] == theirs["output_ids"]
    for client in (plain, plain.prefill):
        assert_pool_is_whole(client)
