"""Several tokenizer workers. SGLang part: the environment variable that names their app (sglang/srt/environ.py)."""

from __future__ import annotations

import os

from sglang_triattn.errors import TriAttentionError

VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
APP = "sglang_triattn.patches.worker_app:app"


def hook_workers(number: int) -> None:
    """Makes the tokenizer workers of this launch run `worker_app`, if there are more than one.

    Raises:
        TriAttentionError: the environment names another app for them.
    """
    if number == 1:
        return
    named = os.environ.setdefault(VARIABLE, APP)
    if named != APP:
        raise TriAttentionError(
            f"{VARIABLE} is {named}, an app whose --tokenizer-worker-num {number} workers would "
            f"not check requests for compression: unset {VARIABLE}, or use --tokenizer-worker-num 1."
        )
