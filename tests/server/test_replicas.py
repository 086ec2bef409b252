"""The replicas of one server (--dp-size) with SGLang's router, which addresses each of them (--dp-aware)."""

from __future__ import annotations

import pytest

from forked_servers import running_router
from harness import BUDGET, INTERVAL, Client, assert_pool_is_whole, compression, two_cores
from router_replicas import cached_after_prefixes
from run_router import SPREAD

REPLICAS = 2


@pytest.fixture(scope="module")
def replicas(serve):
    return serve("--dp-size", str(REPLICAS), "--page-size", "1", "--enable-cache-report", env=two_cores())


def test_prefixes_are_found(forkserver, replicas, tmp_path):
    """Prevents a router that sends a prompt to the replica that does not have its prefix, replicas of which one does
    not compress, and rows that outgrow their bound in either."""
    targets = [f"{replicas.url}@{rank}" for rank in range(REPLICAS)]
    flags, log = ("--dp-aware", *SPREAD), tmp_path / "router.log"
    with running_router(forkserver, targets, log, *flags, servers=[replicas.url]) as router:
        answers = cached_after_prefixes(Client(router), replicas.rounds_by_rank, 200)
    for answer in answers:
        assert 200 <= answer["meta_info"]["cached_tokens"] < 210
        report = compression(answer)
        assert report["rounds"] > 0
        assert report["physical_length"] <= 210 + BUDGET + INTERVAL
    assert_pool_is_whole(replicas)
