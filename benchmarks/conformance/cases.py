"""What the kits of SGLang's wheel expect of the class that they are mixed into, and tests that call its functions.

The runner sets `base_url`, `model` (the model's folder), `api_key`, `process` and `reference`; see runner.py.
"""

from __future__ import annotations

import inspect
import json
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from unittest import mock
from urllib.parse import urlparse

import openai
import sglang
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
from sglang.test import kl_test_utils, test_deterministic, test_programs, test_utils
from sglang.test.kits import cache_hit_kit, radix_cache_server_kit
from sglang.test.server_fixtures import spec_eagle_fixture
from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase

from prepare_model import calibration_text

REQUEST_S = 600
"""Limit of one request, in place of the kits' own limits for GPUs."""


class OpenAIClient:
    @property
    def client(self) -> openai.Client:
        return openai.Client(api_key=self.api_key, base_url=f"{self.base_url}/v1", timeout=REQUEST_S)


class Tokenizer:
    @property
    def tokenizer(self):
        return get_tokenizer(self.model)


class KLPrompts:
    """Prose that comes with Python, in place of prompts from LongBench."""

    PROMPTS, LENGTH = 12, 200

    @classmethod
    def setUpClass(cls):
        ids = get_tokenizer(cls.model).encode(calibration_text())
        cls.input_ids = [ids[start * cls.LENGTH :][: cls.LENGTH] for start in range(cls.PROMPTS)]
        # Where kl_test_utils looks before it downloads.
        key = f"{cls.model}_{kl_test_utils.DEFAULT_PROMPT_TOKENS}_{kl_test_utils.DEFAULT_NUM_SAMPLES}"
        kl_test_utils._cached_input_ids[key] = cls.input_ids


class KLOfOneTurn(KLPrompts):
    NEW_TOKENS = 40

    def test_input_output_logprobs_match_helper(self):
        threshold = {self.model: {"kl_div": 0.003}}
        kl_test_utils.test_input_output_logprobs_match_helper(
            self.base_url, threshold, self.model, max_samples=4, max_new_tokens=self.NEW_TOKENS
        )


class KLOfOneTurnPastTheBudget(KLOfOneTurn):
    NEW_TOKENS = 96


class MultiTurnCacheHits:
    OUTPUT = 16

    def test_run_multiturn_cache_hit_test(self):
        # The form of ShareGPT, which the kit otherwise downloads.
        paragraphs = [text for text in calibration_text().split("\n\n") if len(text) > 200]
        turns = [{"conversations": [{"value": text}, {"value": ""}]} for text in paragraphs]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(turns, file)
            file.flush()
            cache_hit_kit.run_multiturn_cache_hit_test(
                self.base_url, self.model, num_clients=4, request_length=64, output_length=self.OUTPUT,
                dataset_path=file.name,
            )  # fmt: skip


class LongMultiTurnCacheHits(MultiTurnCacheHits):
    OUTPUT = 80


class RadixTraffic:
    """100 requests of up to 128 tokens more than their parents, and of as many new ones, in place of 400 of 256."""

    def test_run_radix_attention_test(self):
        random.seed(1)
        with mock.patch.object(radix_cache_server_kit.gen_radix_tree, "__defaults__", (100, 128)):
            radix_cache_server_kit.run_radix_attention_test(self.base_url)


class ParityWithPlain:
    """The kit's own set-up starts plain SGLang; here the plain server has run before, if it was asked for."""

    @classmethod
    def setUpClass(cls):
        cls.parity_ref_outputs = cls.reference(cls.parity_prompts)


class SpecRequests:
    """The requests of SGLang's fixture for speculative decoding, from two of its five prompts."""

    run_decode = SpecEagleServerBase.run_decode
    send_request = SpecEagleServerBase.send_request
    send_requests_abort = SpecEagleServerBase.send_requests_abort

    def setUp(self):
        self.enterContext(mock.patch.object(spec_eagle_fixture, "PROMPTS", spec_eagle_fixture.PROMPTS[:2]))


class LogprobChecks:
    def test_run_logprob_check(self):
        cases = [
            (length, tokens, 0, start, logprobs, top)
            for length in (50, 200)
            for tokens in (4, 64)
            for start in (0, 30)
            for logprobs, top in ((True, 0), (True, 5), (False, 0))
        ]
        with ThreadPoolExecutor(8) as pool:
            for done in pool.map(lambda case: test_utils.run_logprob_check(self, case), cases):
                assert done is None


class Deterministic:
    """The four modes; the first two as in `test_deterministic_utils.TestDeterministicBase`, with fewer trials."""

    def _run(self, mode: str, **settings) -> None:
        url = urlparse(self.base_url)
        args = test_deterministic.BenchArgs(host=url.hostname, port=url.port, test_mode=mode, n_trials=4, **settings)
        results = test_deterministic.test_deterministic(args)
        assert all(result == 1 for result in results), f"{mode}: {results}"

    def test_single(self):
        self._run("single")

    def test_prefix_with_logprobs(self):
        self._run("prefix", temperature=0.5, return_logprob=True)

    def test_radix_cache(self):
        self._run("radix_cache")

    def test_p_vs_d(self):
        self._run("p_vs_d", max_new_tokens=40)


def _program(function):
    def run(self):
        backend = sglang.RuntimeEndpoint(self.base_url)
        # Where a test looks for it, as in the backend that also starts the server.
        backend.endpoint = backend
        sglang.set_default_backend(backend)
        # A model of this size is not asked whether it is right.
        asked = {"check_answer": False} if "check_answer" in inspect.signature(function).parameters else {}
        function(**asked)

    return run


Programs = type(
    "Programs", (), {name: _program(value) for name, value in vars(test_programs).items() if name.startswith("test_")}
)
"""Each test of `test_programs`, in SGLang's frontend language."""
