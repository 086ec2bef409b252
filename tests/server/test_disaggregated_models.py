"""Models whose KV is of other kinds than keys and values of all tokens in one pool, on a decode server."""

from __future__ import annotations

import pytest

from family_servers import LATENTS, prepared, selecting, started
from harness import INTERVAL, KEYS_ALONE, prompt, two_cores
from separated import RETRACT, Pairs, Retractions, Separated, hold_to_account, storm
from sets import wide
from tiny_model import TinyModel

# No answer to these ends in the step of a round, whose queued step would count as one more.
PROMPTS = [prompt(40 + length, length) for length in (29, 33, 37)]
TWO_RANKS = ("--tp-size", "2")


@pytest.fixture
def pairs(forkserver, tmp_path):
    """`pairs(*args, model=..., **options)` starts servers of any model, see `Pairs.__call__`."""
    found = Pairs(forkserver, tmp_path)
    yield found
    found.stop_all()


def servers_of(
    pairs: Pairs, model: TinyModel, family: str, page_size: int, selection: str, *flags: str, env: dict[str, str]
) -> Separated:
    """A prefill and a decode server, of which the latter retracts requests now and then."""
    args = (*selecting(page_size, selection), *KEYS_ALONE, *flags)
    cores = two_cores() if {"--tp-size", "--dp-size"}.intersection(flags) else {}
    return started(pairs, model, family, *args, env={**cores, **RETRACT, **env})


@pytest.mark.parametrize(
    ("family", "page_size", "selection", "flags"),
    [
        ("deepseek-v3", 32, "per-layer-head", ()),
        wide("deepseek-v3", 1, "shared-mean", TWO_RANKS),
    ],
)
def test_logits(pairs, tmp_path, family, page_size, selection, flags):
    """Prevents K/V or latents that arrive, or come back from the host, elsewhere than in the row."""
    tiny, account = prepared(tmp_path, family)
    ranks = 2 if flags == TWO_RANKS else 1
    account.selection, account.value_share = selection, 0.0
    if family in LATENTS:
        account.num_kv_heads = ranks
    retractions = Retractions(tmp_path / "probe")
    client = servers_of(pairs, tiny, family, page_size, selection, *flags, env=retractions.env)
    hold_to_account(client, account, retractions, PROMPTS[:2], ranks)
    pairs.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "page_size", "flags"),
    [
        ("deepseek-v3", 32, ()),
    ],
)
def test_storm(pairs, tmp_path, family, page_size, flags):
    """Prevents leaks of what a model of this kind holds, where requests are aborted and retracted in any stage."""
    tiny, account = prepared(tmp_path, family)
    flags = ("--max-total-tokens", "1024", *flags)
    client = servers_of(pairs, tiny, family, page_size, "per-layer-head", *flags, env={})
    storm(client, account.budget + INTERVAL + page_size, requests=15, tokens=180)
    pairs.stop(client)
