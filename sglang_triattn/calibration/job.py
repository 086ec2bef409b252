"""What one calibration runs: token windows, prompts of traces, and where it keeps its place.

Nothing here knows the command line or an engine, so that a server can calibrate with it too.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

from sglang_triattn.errors import TriAttentionError

MIN_TOKENS = 256
MIN_WINDOW = 16
DEFAULT_MAX_TOKENS = 32768
DEFAULT_WINDOW = 2048
DEFAULT_TRACE_TOKENS = 2048
# Windows and traces are small beside this, so that a stop loses little, and a save costs little.
SAVE_EVERY_TOKENS = 8192


class CalibrationError(TriAttentionError):
    """Calibration cannot be done; the message is one sentence for the user."""


@dataclass(frozen=True)
class CalibrationJob:
    """One calibration. Its units, in order, are the windows, then one trace for each prompt."""

    windows: tuple[tuple[int, ...], ...] = ()
    """Token ids of texts, each run in one forward pass and a text of its own."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """Token ids that the model itself continues, once each; prompt and continuation are measured."""
    trace_tokens: int = DEFAULT_TRACE_TOKENS
    """Tokens generated after each prompt, at most: a trace ends where the model ends its text."""
    temperature: float = 0.6
    """Of the sampling of traces; 0 is greedy."""
    seed: int = 0
    identity: str = ""
    """What else the result depends on (model, dtype, engine); part of the key."""
    partial: str | None = None
    """File (.safetensors) to keep the sums of finished units in and to go on from; None: none is kept."""

    @property
    def key(self) -> str:
        """Hash of all that decides the result: sums are only ever continued under the same key."""
        fields = {name: value for name, value in asdict(self).items() if name != "partial"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def units(self) -> int:
        return len(self.windows) + len(self.prompts)

    def tokens_of(self, unit: int) -> int:
        """Tokens measured in a unit, for a trace at most."""
        if unit < len(self.windows):
            return len(self.windows[unit])
        return len(self.prompts[unit - len(self.windows)]) + self.trace_tokens

    @property
    def tokens(self) -> int:
        """Tokens measured in all units, at most."""
        return sum(map(self.tokens_of, range(self.units)))


def check_lengths(max_tokens: int, window: int) -> None:
    """Raises CalibrationError unless so many tokens in such windows mean something."""
    if max_tokens < MIN_TOKENS or window < MIN_WINDOW:
        raise CalibrationError(
            f"A calibration on {max_tokens} tokens in windows of {window} means nothing: use at least "
            f"{MIN_TOKENS} tokens in windows of at least {MIN_WINDOW}."
        )


def check_count(count: int) -> None:
    """Raises CalibrationError if so few tokens were measured that their means are noise."""
    if count < MIN_TOKENS:
        raise CalibrationError(f"Calibration text is too short: {count} tokens, but at least {MIN_TOKENS} are needed.")
