"""A server that encodes images for others, which have the language model alone, on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import server
from forked_servers import Forkserver, running_server
from harness import STRICT, only_models, plain_args
from vision_families import VisionModel

# Where the servers reach one another; by itself, SGLang takes an address that other machines have for this one.
ADDRESS = {"SGLANG_HOST_IP": "127.0.0.1"}


@contextmanager
def running_encoder(
    forkserver: Forkserver, model: VisionModel, log_path: Path, backend: str
) -> Iterator[server.Server]:
    """A server that encodes images.

    Args:
        backend: by which of SGLang's backends it sends what it has encoded.
    """
    flags = ("--encoder-only", "--encoder-transfer-backend", backend)
    env = {**STRICT, **only_models(*model.modules), **ADDRESS}
    with running_server(forkserver, model.path, [*plain_args(), *flags], env, log_path) as running:
        yield running


def encoded_by(encoder: server.Server, backend: str) -> tuple[str, ...]:
    """The flags of a server that has its images encoded by another."""
    return (
        *("--language-only", "--encoder-urls", encoder.url, "--encoder-transfer-backend", backend),
        # Where encoders may register themselves.
        *("--encoder-bootstrap-port", str(server.free_port())),
        # Without images, SGLang warms up with a text of which the tests' tokenizer of Qwen3.5 knows no word.
        "--skip-server-warmup",
    )
