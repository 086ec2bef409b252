"""Reports in the OpenAI endpoints' records and streams; tests/server/test_clients.py asks a server for them."""

import json
from types import SimpleNamespace

import pytest

from sglang_triattn.patches.observability.openai_reports import _add_to_completion, with_reports

REPORTS = {0: {"rounds": 1}, 1: {"rounds": 2}}


def event(*choices: dict) -> str:
    return f"data: {json.dumps({'id': 'é', 'choices': list(choices)})}\n\n"


def test_a_choice_that_ends_gets_its_own_report():
    """Prevents a report in every chunk, or that of another choice."""
    ended, goes_on = {"index": 1, "finish_reason": "length"}, {"index": 0, "finish_reason": None}
    found = with_reports(event(ended, goes_on), REPORTS)
    assert found.endswith("}\n\n")
    content = json.loads(found.removeprefix("data: "))
    assert content["id"] == "é"
    assert content["choices"] == [{**ended, "meta_info": {"triattention": {"rounds": 2}}}, goes_on]


@pytest.mark.parametrize("chunk", [event({"index": 0, "finish_reason": None}), event(), 'data: {"usage": {}}\n\n'])
def test_other_chunks_stay_as_they_are(chunk):
    """Prevents a stream that is written anew without need."""
    assert with_reports(chunk, REPORTS) == chunk


@pytest.mark.parametrize("asked", [{"triattention": {}}, {"other": 1}, None], ids=str)
def test_a_whole_completion(asked):
    """Prevents a field that pydantic drops when it writes the answer, and one for clients that did not ask."""
    from sglang.srt.entrypoints.openai.protocol import CompletionResponse, CompletionResponseChoice, UsageInfo

    choices = [CompletionResponseChoice(index=0, text="a"), CompletionResponseChoice(index=1, text="b")]
    response = CompletionResponse(id="1", model="m", choices=choices, usage=UsageInfo())
    plain = json.loads(response.model_dump_json())
    answers = [{"meta_info": {"triattention": report}} for report in REPORTS.values()]
    found = _add_to_completion(response, None, SimpleNamespace(custom_params=asked), answers, 0)
    written = json.loads(found.model_dump_json(by_alias=True))
    reports = [choice.pop("meta_info", None) for choice in written["choices"]]
    assert reports == ([None, None] if not asked or "triattention" not in asked else [a["meta_info"] for a in answers])
    assert written == plain
