"""Checks of a model's config.json, before SGLang reads it. SGLang part: its loader.

If the file is not on this machine yet, the checks run once SGLang has fetched it.
"""

from __future__ import annotations

import json
from typing import Any

from sglang_triattn.compatibility.traits import uncovered_in_file
from sglang_triattn.compatibility.uncovered import refused_model, why_uncovered
from sglang_triattn.model.fingerprint import local_folder


def check_model_file(settings: Any) -> None:
    """Raises TriAttentionError if the model's config.json shows that compression does not cover it.

    Args:
        settings: SGLang's settings record, resolved or not. Its class gets its fields at run time, so there is no type
            to name.
    """
    found = reason_in_file(settings)
    if found is not None:
        raise refused_model(*found)


def reason_in_file(settings: Any) -> tuple[str, str] | None:
    """The model's name, and why compression does not cover it, to complete "because ..."; None without a reason.

    Args:
        settings: as for `check_model_file`.
    """
    config = read_config(settings)
    if config is None:
        return None
    reason = why_uncovered(uncovered_in_file(config))
    architectures = ", ".join(config.get("architectures") or ["unknown"])
    return None if reason is None else (f"{settings.model_path} ({architectures})", reason)


def read_config(settings: Any) -> dict[str, Any] | None:
    """The file's content with the user's overrides; None if there is no readable file.

    SGLang itself says what is wrong with a model that it cannot read.
    """
    folder = local_folder(settings.model_path, settings.revision)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
        overrides = json.loads(settings.json_model_override_args or "{}")
    except (OSError, ValueError):
        return None
    return {**config, **overrides} if isinstance(config, dict) and isinstance(overrides, dict) else None
