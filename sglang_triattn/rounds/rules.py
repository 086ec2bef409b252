"""The rules of rounds: a server's settings, completed by what follows from its model and from how it decodes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from sglang_triattn.config import AUTO, LOOK_UPS, Config, flag
from sglang_triattn.errors import TriAttentionError


@dataclass(frozen=True)
class RoundRules(Config):
    """A Config without open defaults; lengths are in tokens of one request. `complete` makes one.

    Attributes:
        window: most tokens that a query of a window layer sees; 0 without such layers.
        round_to: the tokens that a round evicts are a multiple of this.
        images: whether requests with images may be compressed.
        keeps_rows: whether a row may wait for its conversation's next turn.
    """

    recent: int = 0
    value_share: float = 0.0
    window: int = 0
    round_to: int = 1
    images: bool = True
    keeps_rows: bool = True

    @property
    def most_rounds(self) -> int | None:
        """Rounds of one step, as far as the requests allow it; None for a number that follows from theirs."""
        return None if isinstance(self.rounds_per_step, str) else self.rounds_per_step

    def budget_for(self, frozen: int, private: int = 0) -> int:
        """Private tokens that a round keeps for a request with `frozen` frozen ones: at least `recent`, never 0.

        Up to `round_to` - 1 more stay if the private tokens do not divide evenly.

        Args:
            private: private tokens so far, evicted ones included, of which at least `keep_share` stay.
        """
        budget = self.budget if self.budget_scope == "private" else max(self.budget - frozen, self.recent, 1)
        # The page in which the newest tokens begin is never emptied.
        return max(budget, self.recent + self.round_to - 1, self._share_of(private))

    def trigger(self, frozen: int, evicted: int = 0) -> int:
        """Private tokens at which a round is due for a request with `frozen` frozen ones and `evicted` evicted ones."""
        due = self.budget_for(frozen) + self._least_evicted
        if not self.keep_share:
            return due
        # With each further token, what a round would evict grows by 1 or stays.
        due = max(due, int((self._least_evicted + self.keep_share * evicted) / (1 - self.keep_share)) - 1)
        while due - self._share_of(due + evicted) < self._least_evicted:
            due += 1
        return due

    def most_private(self, frozen: int, private: int) -> int:
        """Most private tokens that a request ever holds that will have had `private` of them, evicted ones included."""
        return self.budget_for(frozen, private) + self._least_evicted

    def longest_private(self, frozen: int, room: int) -> int | None:
        """Most private tokens, evicted ones included, of a request that never holds more than `room`; None if any."""
        kept = room - self._least_evicted
        if self.budget_for(frozen) > kept:
            return 0
        if not self.keep_share:
            return None
        longest = int(kept / self.keep_share) + 1
        while self._share_of(longest) > kept:
            longest -= 1
        return longest

    @property
    def _least_evicted(self) -> int:
        """Tokens that make a round worth its cost."""
        return max(self.interval, self.round_to)

    def _share_of(self, private: int) -> int:
        return math.ceil(self.keep_share * private)

    def under_pressure(self) -> RoundRules:
        """Rules for a round that runs because memory is short."""
        if self.pressure_budget is None:
            return self
        return dataclasses.replace(self, budget=self.pressure_budget, pressure_budget=None, keep_share=0.0)


def complete(
    config: Config,
    *,
    window: int = 0,
    latent: bool = False,
    images: bool = True,
    page_size: int = 1,
    whole_pages: bool = False,
    level: bool = True,
    keeps_rows: bool = True,
    weighed: bool = False,
) -> RoundRules:
    """The rules of rounds for a model and its server.

    A window layer counts its tokens along the row, so the newest `window` tokens must stay, in order. Rounds keep at
    least as many and, at page sizes above 1, evict whole pages, so that they never have to copy those tokens.

    Of latent KV, no token is chosen by its value: what a head reads as a value is a projection of the latent, and what
    lengths of latents say about it has not been measured.

    Args:
        window: most tokens that a query of a window layer sees; 0 without such layers.
        latent: whether the scored layers have latent KV (MLA).
        images: whether requests with images may be compressed.
        page_size: slots per page.
        whole_pages: whether rounds evict whole pages before the newest tokens: queued steps of speculative decoding
            write to pages of which a round does not know how many tokens will hold.
        level: whether `auto` levels rounds, so that what a request keeps depends on those that run with it.
        keeps_rows: whether a row may wait for its conversation's next turn.
        weighed: whether the statistics hold look-up weights.

    Raises:
        TriAttentionError: the budget or the newest tokens are fewer than the window, there are no values to choose by,
            or look-up weights would be lost at an update of the model's.
    """
    recent = max(config.default_recent, window) if config.recent is None else config.recent
    for name, value in (("budget", config.budget), ("recent", recent)):
        if value < window:
            raise TriAttentionError(
                f"{flag(name)} is {value}, but some layers of this model attend to a sliding window of {window} "
                f"tokens, and a round must keep that many of the newest: use at least {window}."
            )
    if latent and config.value_share:
        raise TriAttentionError(
            f"{flag('value_share')} is {config.value_share}, but this model has latent KV, in which key and value are "
            f"one: leave {flag('value_share')} out, or set it to 0."
        )
    if latent and config.recency:
        raise TriAttentionError(
            f"{flag('recency')} is {config.recency}, but this model has latent KV, of which no token is chosen by its "
            f"value: leave {flag('recency')} out."
        )
    if latent and config.fits_lookups:
        raise TriAttentionError(
            f"{flag('stats')} is {LOOK_UPS}, but this model has latent KV, whose look-ups cannot be predicted: set it "
            f"to {AUTO}."
        )
    if weighed and not config.measures and config.stats_after_update == "measure":
        raise TriAttentionError(
            f"{flag('stats_after_update')} is measure, but {config.stats} holds look-up weights, which would be lost: "
            f"set it to keep, or {flag('stats')} to {LOOK_UPS}, with which a server fits them itself."
        )
    share = config.default_value_share(weighed) if config.value_share is None else config.value_share
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(Config)}
    facts = {"window": window, "round_to": page_size if window or whole_pages else 1, "images": images}
    facts["keeps_rows"] = keeps_rows
    if not level and config.rounds_per_step == AUTO:
        facts["rounds_per_step"] = 0
    return RoundRules(**{**settings, **facts, "recent": recent, "value_share": 0.0 if latent else share})
