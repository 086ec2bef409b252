"""SGLang's own consistency stress: the same context, scored again among other requests, gives the same bits.

On a CUDA device SGLang also delays streams at random, which exposes races. Without one there are no streams, but the
workload is the same: shuffled requests in batches of changing size, a pool that is too small, requests retracted. There
logprobs may differ in their last bits, because a CPU's matrix products add up in an order that depends on the batch.
"""

import json

import pytest
import torch

import forked_servers
from harness import STRICT, VOCABULARY
from sets import wide
from sglang_triattn.profiles import PROFILES

# One process per engine, in SGLang's script form, because an Engine spawns its processes.
WORKLOAD = """
import functools, json, sys

def nearly_equal(tolerance, a, b):
    lowest = {token: min(other.values()) for one, other in ((a, b), (b, a)) for token in one.keys() - other.keys()}
    differences = [abs(a[token] - b[token]) for token in a.keys() & b.keys()]
    differences += [abs((a | b)[token] - lowest[token]) for token in lowest]
    return len(a) == len(b) and max(differences) <= tolerance

def main():
    from sglang.test import cache_consistency_jitter
    from sglang.test.cache_consistency_jitter import get_jitter_engine, run_jitter_test
    tolerance, jitter, engine_settings, workload = json.loads(sys.argv[1])
    if tolerance:
        cache_consistency_jitter._topk_equal = functools.partial(nearly_equal, tolerance)
    with get_jitter_engine(**jitter, **engine_settings) as engine:
        try:
            run_jitter_test(engine, **workload)
            failure = None
        except AssertionError as error:
            failure = str(error)
        state = engine.get_server_info()["internal_states"][0]["triattention"]
    print("RESULTS" + json.dumps({"failure": failure, "state": state}))

if __name__ == "__main__":
    main()
"""

# A request prefilled from `cut` tokens on has those in its frozen part, and a retracted one scores its whole output
# again: both rightly keep other tokens than their baselines do. So contexts are equal for all only if nothing is
# evicted, or if every request has the same prompt and none is retracted.
CASES = {
    "below-budget": {
        "budget": None, "interval": 128, "new_tokens": 112, "retract_interval": 30, "retracted": 3, "pool": 1280,
    },
    "rounds": {
        "budget": 24, "interval": 8, "new_tokens": 64, "retract_interval": 10**9, "retracted": 0, "pool": 4096,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", [wide(CASES["below-budget"]), CASES["rounds"]], ids=list(CASES))
def test_equal_contexts_give_equal_bits(forkserver, tiny, tmp_path, case):
    """Prevents K/V from depending on who shares the batch, or on whose slots were reused."""
    cuda = torch.cuda.is_available()
    tolerance = 0 if cuda else 1e-4
    # Without delays SGLang's engine starts normally and needs no device.
    jitter = {"jitter_probability": 0.1 if cuda else 0.0, "retract_interval": case["retract_interval"]}
    settings = {
        "model_path": str(tiny.path), "skip_tokenizer_init": True, "max_total_tokens": case["pool"],
        "chunked_prefill_size": 64, "random_seed": 1, "enable_triattention": True,
        "triattention_stats": str(tiny.stats), "triattention_profile": "aggressive",
        "triattention_budget": case["budget"], "triattention_interval": case["interval"], "triattention_recent": 8,
        # What leaves rounds where they are due: the first implies the second.
        **({"enable_deterministic_inference": True, "attention_backend": "triton"} if cuda else
           {"triattention_rounds_per_step": 0, "device": "cpu", "dtype": "float32"}),
    }  # fmt: skip
    workload = {
        "num_unique_prefixes": 3, "requests_per_prefix": 3, "prefix_len_min": 48, "prefix_len_max": 80, "topk": 5,
        "new_tokens": case["new_tokens"], "min_retracted_requests": case["retracted"], "vocab_size": VOCABULARY,
    }  # fmt: skip
    script = tmp_path / "workload.py"
    script.write_text(WORKLOAD)
    ended = forked_servers.run_script(forkserver, script, [json.dumps([tolerance, jitter, settings, workload])], STRICT)
    line = next((line for line in ended.output.splitlines() if line.startswith("RESULTS")), None)
    assert line is not None, ended.output[-3000:]
    results = json.loads(line.removeprefix("RESULTS"))
    assert results["failure"] is None
    state, budget = results["state"], case["budget"] or PROFILES["aggressive"]["budget"]
    # Keywords of the Engine: the profile's budget where none is given.
    assert (state["profile"], state["budget"], state["recent"]) == ("aggressive", budget, 8)
    # Each of the 12 requests of the second case has a round at 32 private tokens and at every 8 after that, up to 63.
    assert state["rounds"] == (0 if budget > case["new_tokens"] else 48)
