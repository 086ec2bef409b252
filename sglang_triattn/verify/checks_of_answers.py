"""Checks of what a server answers: exact where it must be, and right after rounds. Each returns a `Finding`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sglang_triattn.request.lifecycle import RESUMED
from sglang_triattn.verify.client import Answer
from sglang_triattn.verify.expected_outcome import first_round
from sglang_triattn.verify.finding import Finding, difference, failed, largest_gap, not_tested, passed
from sglang_triattn.verify.traffic import Evidence, copied

NO_TREE = "the server was started with --disable-radix-cache"


def exact(found: Evidence) -> Finding:
    """Finds requests that compression changes before they have outgrown their budget."""
    steps = _steps_before(found)
    gap = difference(found.dense, found.small, 0, steps)
    if gap > found.noise:
        return failed(
            f"log-probabilities differ by up to {gap:.2g} before the first round, from those without a budget"
        )
    return passed(f"{steps} tokens {_closeness(gap)} those of the request with enabled false")


def effect(found: Evidence) -> Finding:
    """Finds rounds that are reported and not done: tokens that count as evicted and are still attended to."""
    steps, tokens = _steps_before(found), len(found.small.output)
    before, after = difference(found.dense, found.small, 0, steps), difference(found.dense, found.small, steps, tokens)
    if found.small.output[:steps] != found.dense.output[:steps]:
        return not_tested("the two requests part before the first round")
    if after > 4 * before:
        return passed(f"log-probabilities move by up to {after:.2g} once tokens are evicted")
    if before:
        return not_tested(f"equal requests differ by {before:.2g}, which hides what rounds do: ask an idle server")
    return failed("log-probabilities after rounds are those of the request that evicts nothing")


def prefix_cache(found: Evidence) -> Finding:
    """Finds prompts that are computed again although the tree could serve them."""
    if not found.tree:
        return not_tested(NO_TREE)
    least = len(found.prefix) - found.page_size
    followers = [found.dense, found.small, *found.crowd]
    # Replicas other than the first have not seen it before.
    followers = followers[: 2 + len(found.crowd) // len(found.after.replicas)]
    fewest = min(answer.cached for answer in followers)
    if fewest < least:
        return failed(f"a prompt that starts with {len(found.prefix)} computed tokens found {fewest} of them")
    return passed(f"{len(followers)} requests each found at least {fewest} of {len(found.prefix)} shared tokens")


def tree(found: Evidence) -> Finding:
    """Finds compacted K/V in the tree, from where it would be served as if it were exact."""
    if not found.tree:
        return not_tested(NO_TREE)
    first = found.crowd[0]
    frozen, settings = found.frozen_of(first), found.settings_of(first)
    most = frozen + settings.budget_for(frozen, settings.trigger(frozen)) - settings.recent
    if found.again.cached > most:
        return failed(
            f"{found.again.cached} tokens of a compacted request came from the tree, which can have {most} exact ones"
        )
    return passed(f"{found.again.cached} tokens of a compacted request came from the tree, all before its first hole")


def frozen_prefix(found: Evidence) -> Finding:
    """Finds shared K/V that rounds of other requests have overwritten, moved or freed."""
    if not found.tree:
        return not_tested(NO_TREE)
    first, again, *later = (answer.prompt_logprobs + answer.logprobs for answer in found.probes)
    rounds = sum(answer.report.get("rounds", 0) for answer in found.crowd)
    gap, noise = min(largest_gap(first, values) for values in later), largest_gap(first, again)
    if gap > max(found.noise, 2 * noise):
        return failed(
            f"log-probabilities after a shared prefix moved by {gap:.2g} during {rounds} rounds of its readers"
        )
    return passed(
        f"{len(first)} log-probabilities after it {_closeness(gap)} those before {rounds} rounds of its readers"
    )


def positions(found: Evidence) -> Finding:
    """Finds tokens that are computed at the wrong positions once a row is shorter than its text."""
    tries = _copying(found, found.dense_copies)
    if not tries:
        return not_tested(_no_copy(found))
    tokens = len(found.copies[0].output)
    most = max(_right(found, found.copies, place) for place in tries)
    # Losing old repetitions may cost a small model the thread; wrong positions cost any model the thread at once.
    if most < tokens // 3:
        return failed(f"loses a passage in its kept window after {most} tokens; without a budget, it copies {tokens}")
    kept, evicted = found.copies[0].ask.control["recent"], found.copies[0].report.get("evicted_tokens", 0)
    return passed(f"copies a passage for {most} tokens from the newest {kept}, while {evicted} others are evicted")


def conversation(found: Evidence) -> Finding:
    """Finds conversations that start over, and rows that come back with other content."""
    if not found.passages:
        return not_tested(_no_copy(found))
    history = len(found.copies[0].ask.ids) + len(found.copies[0].output)
    prefilled = len(found.resumed[0].ask.ids) - min(answer.cached for answer in found.resumed)
    for start in (answer.report.get("conversation") for answer in found.resumed):
        if start != RESUMED:
            return failed(f"the second turn is {start or 'not reported'} instead of {RESUMED}")
    # The new tokens, the last one of the turn before, and what fills its last page.
    most = len(found.resumed[0].ask.ids) - history + 1 + found.page_size
    if prefilled > most:
        return failed(f"the second turn prefilled {prefilled} tokens, where {most} were to be expected")
    found_row = f"resumed after {history} tokens, prefilled {prefilled}"
    tries = _copying(found, found.copies)
    if not tries:
        return passed(f"{found_row}; its content was not tested, because no first turn copied to its end")
    most, tokens = max(_right(found, found.resumed, place) for place in tries), len(found.resumed[0].output)
    if most < tokens // 3:
        return failed(f"{found_row}, and then loses after {most} tokens the passage that the first turn copied")
    return passed(f"{found_row}, and goes on copying")


def _steps_before(found: Evidence) -> int:
    settings, frozen = found.settings_of(found.small), found.frozen_of(found.small)
    return min(first_round(settings, prompt=len(found.small.ask.ids), frozen=frozen), len(found.small.output))


def _no_copy(found: Evidence) -> str:
    """Why copying proves nothing."""
    if not found.passages:
        return f"no passage fits the server's budget of {found.config.budget} and the words of its tokenizer"
    most = max(_right(found, found.dense_copies, place) for place in range(len(found.passages)))
    return f"even without a budget, this model copies only {most} of {len(found.dense_copies[0].output)} tokens"


def _copying(found: Evidence, answers: Sequence[Answer]) -> list[int]:
    """Which of the passages were copied to the end."""
    return [place for place, answer in enumerate(answers) if _right(found, answers, place) == len(answer.output)]


def _right(found: Evidence, answers: Sequence[Answer], place: int) -> int:
    """How many tokens of an answer repeat its passage before the first that does not."""
    answer, first = answers[place], found.copies[place].ask.ids
    expected = copied(found.passages[place], len(answer.ask.ids) - len(first), len(answer.output))
    pairs = zip(answer.output, expected, strict=True)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _closeness(gap: float) -> str:
    return "equal" if gap == 0 else f"are within {gap:.1g} of"
