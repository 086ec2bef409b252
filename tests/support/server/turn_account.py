"""The last turn of a conversation, compared with an account of what its row holds."""

from __future__ import annotations

from harness import served_logprobs
from oracle import TOLERANCE


def hold_to_account(account, responses, prompts, inputs) -> None:
    """Compares the last turn's log-probabilities with the account; an account that compacts inputs must differ.

    Args:
        account: an Oracle; the first prompt is frozen.
        responses, prompts: of all turns.
        inputs: half-open ranges of the tokens that later turns brought.
    """
    prompt_length, everything = len(prompts[0]), prompts[-1] + responses[-1]["output_ids"][:-1]
    values, tokens = served_logprobs(responses[-1])
    # A message is prefilled in one piece, and rounds wait until its turn decodes.
    pauses = [(first, end + 1) for first, end in inputs]
    for stays, close in ((inputs, True), ((), False)):
        expected, _ = account.logprobs(everything, prompt_length, prompt_length, pauses=pauses, inputs=stays)
        error = (expected[-len(tokens) :].gather(1, tokens) - values).abs().max()
        assert (error < TOLERANCE) if close else (error > 50 * TOLERANCE), f"inputs {stays}: {error}"
