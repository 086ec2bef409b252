"""Drafted tokens on a decode server, to which a prefill server sends the draft model's K/V and first draft, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disaggregated_servers import RETRACT, storm
from draft_heads import build_eagle, llama_config
from draft_pairs import MODES, Pair, drafts_with_account
from family_servers import prepared
from harness import INTERVAL, KEYS_ALONE, STEPS, assert_pool_is_whole, compression
from oracle import oracle_of
from repeating_model import build_repeating_model
from sets import wide


@pytest.fixture
def drafting(tmp_path) -> Callable[[str], Pair]:
    """`drafting(name)` builds a model and one that drafts for it, some of whose drafts hold."""

    def build(name: str) -> Pair:
        if name == "NEXTN latent":
            return Pair(name, *prepared(tmp_path, "deepseek-v3-mtp"), None)
        if name == "EAGLE3 windows":
            target, account = prepared(tmp_path, "gpt-oss", repeating=True)
            (tmp_path / "head").mkdir()
            head = build_eagle(tmp_path / "head", target, third=True, noise=0.45, config=llama_config())
            return Pair(name, target, account, head)
        target, third = build_repeating_model(tmp_path), name == "EAGLE3"
        return Pair(
            name, target, oracle_of(target), build_eagle(tmp_path, target, third=third, noise=0.25 if third else 0.9)
        )

    return build


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        wide("EAGLE", "moved"),
        wide("EAGLE", "pages"),
        wide("EAGLE", "overlap off"),
        wide("EAGLE3", "pages"),
        wide("EAGLE3 windows", "pages"),
        wide("NEXTN latent", "pages"),
    ],
)
def test_logits_and_drafts(serve_pairs, probed_pairs, drafting, name, mode):
    """Prevents K/V of a draft model that arrives elsewhere than in the row, or that a round takes for other tokens':
    each of its drafts is that of an account."""
    pair = drafting(name)
    flags = (*pair.args, *MODES[mode], *pair.settings, *KEYS_ALONE)
    client, steps = probed_pairs(*flags, model=pair.target, env=pair.env)
    page_size = client.setting("page_size")
    steps()
    (ids,) = pair.texts()
    response = client.generate(ids, 300 + 100 * pair.has_windows, logprobs=True)
    found = drafts_with_account(pair, mode, ids, response, steps(), len(ids) - len(ids) % page_size)
    assert compression(response)["rounds"] >= 6
    assert len(found) > 60
    assert 0.02 * STEPS * len(found) < sum(found) < 0.96 * STEPS * len(found)
    assert_pool_is_whole(client)
    serve_pairs.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "page_size"), [("EAGLE", 1), ("EAGLE", 16), ("EAGLE3 windows", 16)])
def test_storm(serve_pairs, drafting, name, page_size):
    """Prevents leaks of reserves where requests are aborted, and retracted while a step of drafts is queued."""
    pair = drafting(name)
    flags = (*pair.args, *pair.settings, "--page-size", str(page_size), "--max-total-tokens", "2048")
    client = serve_pairs(*flags, model=pair.target, env={**pair.env, **RETRACT})
    storm(client, pair.account.budget + INTERVAL + 2 * (STEPS + 1) + page_size, requests=15)
    serve_pairs.stop(client)
