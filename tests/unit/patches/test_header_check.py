"""Headers on servers that keep no conversations; tests/server/test_request_names.py asks one that keeps them."""

from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints import http_server
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from sglang_triattn.config import Config
from sglang_triattn.patches import request_validation
from sglang_triattn.request.names import CONVERSATION, SWITCH
from sglang_triattn.rounds.rules import complete


@pytest.fixture(params=["off", "pipeline", "decode"])
def client(request, monkeypatch):
    """A client of an application in front of which headers are checked."""
    server_args = SimpleNamespace(
        pp_size=2 if request.param == "pipeline" else 1,
        disaggregation_mode="decode" if request.param == "decode" else "null",
    )
    rules = complete(Config("s", conversations="off" if request.param == "off" else "named"))
    state = SimpleNamespace(tokenizer_manager=SimpleNamespace(server_args=server_args))
    monkeypatch.setattr(http_server, "get_global_state", lambda: state)
    monkeypatch.setattr(request_validation, "rules_of", lambda _: rules)
    counted = []
    monkeypatch.setattr(request_validation._refusals, "count", counted.append)
    routes = [Route("/generate", lambda _: Response(), methods=["GET", "POST"])]
    client = TestClient(Starlette(routes=routes, middleware=[Middleware(request_validation.HeaderCheck)]))
    client.counted = counted
    return client


def test_names_are_refused(client):
    """Prevents a client from believing that its turns resume a row where no server keeps one."""
    response = client.post("/generate", headers={CONVERSATION: "c"})
    message = response.json()["error"]["message"]
    assert response.status_code == 400
    assert message.startswith(f"In the header {CONVERSATION}, custom_params.triattention.conversation ")
    assert message.endswith(".")
    assert client.counted == ["conflict"]


def test_all_else_passes(client):
    """Prevents the opt-out, and questions about the server, from being refused with the names."""
    assert client.post("/generate").status_code == 200
    assert client.post("/generate", headers={SWITCH: "off"}).status_code == 200
    assert client.get("/generate", headers={CONVERSATION: "c"}).status_code == 200
    assert client.counted == []
