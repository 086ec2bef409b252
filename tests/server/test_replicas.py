"""The replicas of one server (--dp-size) behind SGLang's router, which tells them apart (--dp-aware)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from harness import BUDGET, INTERVAL, Client, assert_pool_is_whole, compression, prompt, two_cores
from run_router import SPREAD, running_router

REPLICAS = 2


@pytest.fixture(scope="module")
def replicas(serve):
    return serve("--dp-size", str(REPLICAS), "--page-size", "1", "--enable-cache-report", env=two_cores())


def rounds_of_replicas(client: Client) -> list[int]:
    states = requests.get(client.url + "/server_info", timeout=60).json()["internal_states"]
    return [state["triattention"]["rounds"] for state in states]


def test_prefixes_are_found(replicas, tmp_path):
    """Prevents a router that sends a prompt to the replica that does not have its prefix, replicas of which one does
    not compress, and rows that outgrow their bound in either."""
    before = rounds_of_replicas(replicas)
    targets = [f"{replicas.url}@{rank}" for rank in range(REPLICAS)]
    with running_router(targets, tmp_path / "router.log", "--dp-aware", *SPREAD, servers=[replicas.url]) as router:
        client = Client(router)
        stems = [prompt(10 + number, 200) for number in range(4)]
        with ThreadPoolExecutor(len(stems)) as pool:
            list(pool.map(lambda ids: client.generate(ids, 200), stems))
        assert all(now > then for now, then in zip(rounds_of_replicas(replicas), before, strict=True))
        for number, stem in enumerate(stems):
            answer = client.generate([*stem, *prompt(30 + number, 10)], 110)
            assert 200 <= answer["meta_info"]["cached_tokens"] < 210
            report = compression(answer)
            assert report["rounds"] > 0
            assert report["physical_length"] <= 210 + BUDGET + INTERVAL
    assert_pool_is_whole(replicas)
