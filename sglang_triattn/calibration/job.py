"""One calibration job: token windows, prompts of traces, and the file for its progress.

Nothing here knows the command line or an engine, so a server can calibrate with it too.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from sglang_triattn.errors import TriAttentionError

MIN_TOKENS = 256
MIN_WINDOW = 16
DEFAULT_MAX_TOKENS = 32768
DEFAULT_WINDOW = 2048
DEFAULT_TRACE_TOKENS = 2048
# Windows and traces are small compared with this, so an interruption loses little, and saving costs little.
SAVE_EVERY_TOKENS = 8192


class CalibrationError(TriAttentionError):
    """Calibration is not possible; the message is one sentence for the user."""


@dataclass(frozen=True)
class CalibrationJob:
    """One calibration. Its units, in order, are the windows, then one trace per prompt.

    Attributes:
        windows: token ids of texts, each run in one forward pass as a separate text.
        prompts: token ids that the model itself continues, once each; prompt and continuation are measured.
        trace_tokens: most tokens generated after each prompt; a trace ends early where the model ends its text.
        temperature: sampling temperature of the traces; 0 is greedy.
        identity: what else the result depends on (model, dtype, engine); part of the key.
        lookup_texts: token ids of the texts that look-up weights are fitted on (`calibration.lookups`); none fits none.
        lookup_request: token ids that stand between the two readings of such a text.
        partial: file (.safetensors) for the sums of finished units, to resume from; None saves none.
    """

    windows: tuple[tuple[int, ...], ...] = ()
    prompts: tuple[tuple[int, ...], ...] = ()
    trace_tokens: int = DEFAULT_TRACE_TOKENS
    temperature: float = 0.6
    seed: int = 0
    identity: str = ""
    lookup_texts: tuple[tuple[int, ...], ...] = ()
    lookup_request: tuple[int, ...] = ()
    partial: str | None = None

    @property
    def key(self) -> str:
        """Hash of everything that determines the sums, which are only ever resumed under the same key."""
        others = ("lookup_texts", "lookup_request", "partial")
        fields = {name: value for name, value in asdict(self).items() if name not in others}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def units(self) -> int:
        return len(self.windows) + len(self.prompts)

    def tokens_of(self, unit: int) -> int:
        """Tokens measured in a unit; for a trace, the most there can be."""
        if unit < len(self.windows):
            return len(self.windows[unit])
        return len(self.prompts[unit - len(self.windows)]) + self.trace_tokens

    @property
    def tokens(self) -> int:
        """Tokens measured in all units, at most."""
        return sum(map(self.tokens_of, range(self.units)))

    def tokens_of_lookups(self, text: Sequence[int]) -> int:
        """Tokens of both readings of a text for look-ups, at most."""
        return 2 * len(text) + len(self.lookup_request)

    @property
    def lookup_tokens(self) -> int:
        """Tokens of both readings of all texts for look-ups, at most."""
        return sum(map(self.tokens_of_lookups, self.lookup_texts))


def check_lengths(max_tokens: int, window: int) -> None:
    """Raises CalibrationError if there are too few tokens, or too short windows, for a meaningful result."""
    if max_tokens < MIN_TOKENS or window < MIN_WINDOW:
        raise CalibrationError(
            f"A calibration on {max_tokens} tokens in windows of {window} means nothing: use at least "
            f"{MIN_TOKENS} tokens in windows of at least {MIN_WINDOW}."
        )


def check_texts(data: Sequence[str], traces: int, trace_tokens: int) -> None:
    """Raises CalibrationError if there is nothing to calibrate on, or a file cannot be read.

    Args:
        data: files.
        traces, trace_tokens: how many texts the model generates, and the most tokens of each.
    """
    if traces < 0 or (traces and trace_tokens < MIN_WINDOW):
        raise CalibrationError(
            f"{traces} traces of {trace_tokens} tokens mean nothing: use at least one trace of at least {MIN_WINDOW} "
            "tokens."
        )
    if not data and not traces:
        raise CalibrationError(
            "There is nothing to calibrate on: give --data FILE, or --self N with --engine sglang, or both."
        )
    for path in data:
        opened(path).close()


def opened(path: str) -> TextIO:
    """A calibration text, opened. Raises CalibrationError if it cannot be read."""
    try:
        return Path(path).open(encoding="utf-8")
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: OSError) -> CalibrationError:
    return CalibrationError(f"Calibration text {path} cannot be read ({error.strerror}): give a plain text file.")


def check_count(count: int) -> None:
    """Raises CalibrationError if too few tokens were measured: their means would be noise."""
    if count < MIN_TOKENS:
        raise CalibrationError(f"Calibration text is too short: {count} tokens, but at least {MIN_TOKENS} are needed.")
