"""What each tokenizer worker runs (--tokenizer-worker-num above 1): SGLang's app, with the main process's hooks.

SGLang part: `SGLANG_HTTP_SERVER_APP_PATH` (sglang/srt/environ.py) names the module that a worker process imports its
app from. Workers load no plugins, so this module is named there, and importing it hooks SGLang.
"""

from sglang.srt.entrypoints.http_server import app

from sglang_triattn.patches import request_validation
from sglang_triattn.patches.hooks import registry
from sglang_triattn.patches.observability import reporting, stopped

__all__ = ["app"]

registry.install([*reporting.main_hooks(), *request_validation.main_hooks()])
stopped.watch_health()
request_validation.check_headers()
