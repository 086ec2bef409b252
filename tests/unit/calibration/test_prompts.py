"""The prompts that a model answers for its own calibration."""

from __future__ import annotations

from sglang_triattn.calibration.prompts import PROMPTS, trace_prompts


class Tokenizer:
    """Numbers letters; its chat template raises, or puts a mark before the text."""

    chat_template = "{{ a template }}"

    def __init__(self, raises: bool) -> None:
        self._raises = raises

    def apply_chat_template(self, messages: list[dict], **_: object) -> str:
        if self._raises:
            raise ValueError("roles must alternate")
        return "\n" + messages[0]["content"]

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def test_a_template_that_raises_is_left_out(caplog):
    """Prevents a launch that ends because the model's own chat template does not take a plain question."""
    plain = [tuple(map(ord, PROMPTS[number])) for number in range(2)]
    assert list(trace_prompts(Tokenizer(raises=True), 2)) == plain
    assert "without the model's chat template, which says 'roles must alternate'" in caplog.text
    caplog.clear()
    assert list(trace_prompts(Tokenizer(raises=False), 2)) == [(ord("\n"), *ids) for ids in plain]
    assert not caplog.records
