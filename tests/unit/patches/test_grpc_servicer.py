"""Parts of SMG's gRPC server that need no server: pipes to schedulers, and the operator's settings."""

from __future__ import annotations

import importlib.metadata
import multiprocessing

import pytest

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches import grpc_servicer
from sglang_triattn.patches.hooks.hook import SERVICER_VERSION, Hook, check_target
from sglang_triattn.patches.launch import handshake
from sglang_triattn.patches.launch.preferred import with_preferred

COMPRESSES = {"status": "ready", "triattention": handshake.answer(None)}
PREFERRED = {"temperature": 0.5, "custom_params": {"triattention": {"budget": 40}}}


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (COMPRESSES, None),
        # SMG's own sentence follows.
        ({"status": "error", "error": "no weights"}, None),
        ({"status": "ready"}, "did not confirm"),
        ({"status": "ready", "triattention": handshake.answer("the reason.")}, "the reason."),
    ],
)
def test_the_answer_of_each_scheduler_is_checked(info, words):
    """Prevents a launch from going on where one of its ranks, of which SMG's server looks at the first alone, is
    dense."""
    checked = handshake.CheckedPipes(multiprocessing)
    assert checked.Process is multiprocessing.Process
    reader, writer = checked.Pipe(duplex=False)
    writer.send(info)
    assert reader.poll(1.0)
    if words is None:
        assert reader.recv() == info
    else:
        with pytest.raises(TriAttentionError, match=words):
            reader.recv()


@pytest.mark.parametrize(
    ("custom_params", "expected"),
    [
        (None, {"triattention": {"budget": 40}}),
        ({"a": 1}, {"a": 1, "triattention": {"budget": 40}}),
        ({"triattention": None}, {"triattention": {"budget": 40}}),
        ({"triattention": {}}, {"triattention": {}}),
        ([7], [7]),
    ],
)
def test_preferred_settings(custom_params, expected):
    """Prevents the operator's settings from replacing those of a client, or a mistake of its from being hidden."""
    assert with_preferred(PREFERRED, custom_params) == expected
    for none in (None, {}, {"custom_params": None}, {"custom_params": {"triattention": None}}):
        assert with_preferred(none, custom_params) is custom_params


def test_another_version_of_the_server_is_named():
    """Prevents advice to reinstall SGLang where the package of the gRPC server has changed, or to install a version
    that is not the tested one."""
    assert importlib.metadata.version("smg-grpc-servicer") == SERVICER_VERSION
    hook = Hook("smg_grpc_servicer.sglang.gone.function", "after", lambda: None, "self", why="")
    with pytest.raises(TriAttentionError, match=rf"reinstall smg-grpc-servicer=={SERVICER_VERSION}\.$"):
        check_target(hook)


def test_the_server_in_rust_is_refused(monkeypatch):
    """Prevents a server whose requests were never tested with settings."""
    grpc_servicer.check_implementation()
    monkeypatch.setenv(grpc_servicer.IMPLEMENTATION, "python")
    grpc_servicer.check_implementation()
    monkeypatch.setenv(grpc_servicer.IMPLEMENTATION, "rust")
    with pytest.raises(TriAttentionError, match="use --servicer-impl python"):
        grpc_servicer.check_implementation()
