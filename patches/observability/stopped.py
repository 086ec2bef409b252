"""How the outside learns that compression has stopped: health checks and metrics.

SGLang parts: the FastAPI application of its server (sglang/srt/entrypoints/http_server.py), to which a middleware is
added; prometheus_client.

A stopped server still answers right, but serves fewer requests at once than its operator counts on. So the checks by
which a load balancer chooses servers, /health_generate and /ready, answer 503, and /health, by which the process is
found alive, stays 200. The schedulers say it with every output: a health check of an idle server generates one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sglang_triattn.patches.observability.metrics import PREFIX, STOPPED

CHECKS = ("/health_generate", "/ready")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

# The reason, in the main process. A list, because it is there before the application is.
_reasons: list[str] = []


def record_stop(reason: str) -> None:
    """Records in the main process why a scheduler has stopped compressing; the first reason stays."""
    if not _reasons:
        _reasons.append(reason)


def reason() -> str | None:
    """Why compression has stopped, in the main process; None if it has not."""
    return _reasons[0] if _reasons else None


def route_of(scope: Message) -> str:
    """The path that the application's routes are compared with, for a scope of type http.

    With --fastapi-root-path, uvicorn puts the root path in front of the path that the client asked for; other ASGI
    servers leave that to the proxy.
    """
    path, root = scope["path"], scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


class HealthOfStopped:
    """ASGI middleware that answers health checks with status 503 and one sentence once compression has stopped."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Callable, send: Send) -> None:
        if scope["type"] != "http" or route_of(scope) not in CHECKS:
            await self._app(scope, receive, send)
            return
        replaced = False

        async def send_unless_stopped(message: Message) -> None:
            nonlocal replaced
            stopped = reason()
            if message["type"] == "http.response.start" and stopped is not None and message["status"] == 200:
                from starlette.responses import JSONResponse

                replaced = True
                await JSONResponse({"error": {"message": stopped}}, status_code=503)(scope, receive, send)
            elif not replaced:
                await send(message)

        await self._app(scope, receive, send_unless_stopped)


def watch_health() -> None:
    """Adds the middleware to SGLang's application, once."""
    from sglang.srt.entrypoints.http_server import app

    if all(added.cls is not HealthOfStopped for added in app.user_middleware):
        app.add_middleware(HealthOfStopped)


class StoppedGauge:
    """The metric that says whether compression has stopped.

    Args:
        labels: the scheduler's own metric labels.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        # Imported late, as in `metrics`.
        from prometheus_client import Gauge

        text = "1 once rounds have failed so often that compression has stopped, else 0."
        gauge = Gauge(PREFIX + STOPPED, text, labelnames=list(labels), multiprocess_mode="mostrecent")
        self._gauge = gauge.labels(**labels)
        self._gauge.set(0)

    def stop(self) -> None:
        self._gauge.set(1)
