"""What a scheduler has room for while it calibrates."""

from types import SimpleNamespace

import pytest

from sglang_triattn.calibration.job import CalibrationError, CalibrationJob
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.calibration import stats_source
from sglang_triattn.patches.calibration.measure import _check_room, _traces_at_once
from word_tokenizer import word_tokenizer


def scheduler(**changes) -> SimpleNamespace:
    fields = {"max_total_num_tokens": 1000, "page_size": 16, "chunked_prefill_size": 500, "max_prefill_tokens": 16384}
    fields |= {"max_running_requests": 4, "model_config": SimpleNamespace(context_len=800)}
    return SimpleNamespace(**fields | changes)


@pytest.mark.parametrize(
    ("job", "changes", "message"),
    [
        (
            {"windows": ((1,) * 501,)},
            {},
            "Windows of 501 tokens exceed a prefill chunk of 500 .*: use --window 500.",
        ),
        ({"windows": ((1,) * 801,)}, {"chunked_prefill_size": None}, "exceed the context length of 800"),
        ({"windows": ((1,) * 500,)}, {"max_total_num_tokens": 500}, "exceed the KV pool of 484"),
        ({"prompts": ((1,) * 9,), "trace_tokens": 792}, {}, "use --self-tokens 791."),
    ],
)
def test_what_does_not_fit_is_refused(job, changes, message):
    """Prevents a crash of the engine when a smaller number would do."""
    with pytest.raises(CalibrationError, match=message):
        _check_room(scheduler(**changes), CalibrationJob(**job))


def test_what_fits_exactly_is_taken():
    """Prevents a refusal whose own advice is refused too."""
    _check_room(scheduler(), CalibrationJob(windows=((1,) * 500,), prompts=((1,) * 9,), trace_tokens=791))


@pytest.mark.parametrize(
    ("changes", "trace_tokens", "count"),
    [
        ({}, 10, 4),
        ({"max_running_requests": 100}, 10, 8),
        ({}, 400, 2),
        ({"chunked_prefill_size": 25}, 10, 2),
        ({}, 900, 1),
    ],
)
def test_traces_run_together_as_far_as_there_is_room(changes, trace_tokens, count):
    """Prevents a pool that runs out while traces grow, and traces that needlessly run one by one."""
    job = CalibrationJob(prompts=((1,) * 10,) * 9, trace_tokens=trace_tokens)
    assert _traces_at_once(scheduler(**changes), job, 0) == count
    assert _traces_at_once(scheduler(**changes), job, 8) == 1


@pytest.mark.parametrize("tokens", [8, 20, 64 + 15])
def test_a_pool_without_room_is_refused_at_launch(monkeypatch, tokens):
    """Prevents a traceback, or statistics of a handful of tokens, when the pool is hardly larger than a page."""
    monkeypatch.setattr(stats_source, "_tokenizer", lambda _: None)
    with pytest.raises(TriAttentionError, match=r"room for .* tokens .* larger KV pool, or name a file"):
        stats_source.launch_job(scheduler(max_total_num_tokens=tokens))


def test_a_tokenizer_without_words_is_refused_at_launch(monkeypatch):
    """Prevents a refusal that names a flag of another command."""
    monkeypatch.setattr(stats_source, "_tokenizer", lambda _: word_tokenizer())
    assert stats_source.launch_job(scheduler()).lookup_texts == ()
    with pytest.raises(TriAttentionError, match="too few different words: set --triattention-stats to auto"):
        stats_source.launch_job(scheduler(), weighed=True)
