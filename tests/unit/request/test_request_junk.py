"""Ten thousand request settings, right and wrong: each is within the ceilings, or refused with one sentence."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from junk_params import CUSTOM_PARAMS
from request_cases import CONFIG
from sglang_triattn.config import PROMPTS, TURN_INPUTS
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.request.options import LONGEST_NAME, read_request

LONGEST_MESSAGE = 500
CASES, TOGETHER = 1000, 10


def check(given_params: object) -> bool:
    """Whether the settings were accepted; raises what no client may cause."""
    try:
        options = read_request(CONFIG, given_params)
    except TriAttentionError as error:
        text = str(error)
        assert len(text) <= LONGEST_MESSAGE, text
        assert text.isascii()
        assert "\n" not in text
        assert text.endswith(".")
        json.dumps(text)
        return False
    name, asked = options.conversation, options.settings
    assert name is None or (0 < len(name) <= LONGEST_NAME and name.encode())
    assert type(options.release) is bool
    assert name is not None or not options.release
    if asked is not None:
        assert type(asked.budget) is type(asked.interval) is type(asked.recent) is int
        assert 1 <= asked.budget <= CONFIG.budget
        assert 1 <= asked.interval <= CONFIG.interval
        assert 0 <= asked.recent <= asked.budget
        assert asked.prompt in PROMPTS
        assert asked.turn_inputs in (None, *TURN_INPUTS)
    return True


def test_ten_thousand_settings():
    """Prevents a client from getting status 500, a budget above the operator's, or its own megabytes back."""
    accepted = 0

    @settings(
        max_examples=CASES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(CUSTOM_PARAMS, min_size=TOGETHER, max_size=TOGETHER))
    def run(cases):
        nonlocal accepted
        accepted += sum(map(check, cases))

    run()
    assert CASES < accepted < CASES * TOGETHER * 0.8, "settings are all right or all wrong"
