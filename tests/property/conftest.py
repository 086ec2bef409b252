"""SGLang's process-wide settings, which its requests and caches read."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def published_settings():
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    settings = ServerArgs(model_path="dummy")
    settings.resolve_once()
    publish(settings, role="scheduler")
