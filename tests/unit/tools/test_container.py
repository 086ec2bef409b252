"""The files in docker/, as far as they can be judged without a Docker daemon.

tests/server/test_wheel.py runs the steps of the Dockerfile, and a server by its entry point.
"""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dockerfile
from checkout import ROOT
from sglang_triattn import config
from sglang_triattn.patches.hooks.hook import SGLANG_VERSION

COMPOSE = ROOT / "docker" / "compose.yaml"
IMAGE = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+")


@pytest.fixture(scope="module")
def services() -> dict[str, dict]:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def test_the_dockerfile_is_clean():
    """Prevents known mistakes: unpinned images and packages, caches left in layers, a shell that hides failures."""
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, dockerfile.DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_image_is_that_of_the_supported_sglang():
    """Prevents an image of an SGLang that the hooks were not written for."""
    assert dockerfile.find("ARG").rest == f"SGLANG_IMAGE=lmsysorg/sglang:v{SGLANG_VERSION}"
    bases = [one.rest.partition(" AS ")[0] for one in dockerfile.instructions() if one.name == "FROM"]
    assert bases == ["${SGLANG_IMAGE}"] * 2


def test_only_what_is_copied_reaches_the_builder():
    """Prevents a build that lacks a file, and one that takes in keys or models that lie in a checkout."""
    wanted = [source for sources, _ in dockerfile.copies() for source in sources]
    assert sorted(dockerfile.context()) == sorted(wanted)
    assert all((ROOT / source).exists() for source in wanted)


def test_no_layer_has_root_or_a_secret():
    """Prevents a server that runs as root, and a token that everybody who pulls the image can read."""
    assert int(dockerfile.find("USER").rest) > 0
    for one in dockerfile.instructions():
        if one.name in ("ARG", "ENV"):
            assert not re.search("token|key|secret|password", one.rest, re.IGNORECASE), one


def test_the_entry_point_compresses():
    """Prevents an image that serves dense, and a probe of another port than the server's."""
    words = dockerfile.find("ENTRYPOINT").words
    assert config.SWITCH in words
    port = words[words.index("--port") + 1]
    assert dockerfile.find("EXPOSE").rest == port
    assert f":{port}/health" in dockerfile.find("HEALTHCHECK").rest


def test_the_probe_fails_where_nothing_listens():
    """Prevents a probe that calls any container healthy."""
    probe = [word.replace(":30000", ":1") for word in dockerfile.find("HEALTHCHECK").words]
    assert subprocess.run([sys.executable, *probe[1:]], capture_output=True, timeout=60).returncode == 1


def test_what_the_image_lacks_is_installed():
    """Prevents an image without a package that is no dependency of SGLang's, and so is missing in SGLang's image.

    The image brings the extra `plot`.
    """
    brought, waiting = set(), ["sglang"]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in brought:
            brought.add(name)
            waiting += _needs(name)
    (step,) = (one.rest for one in dockerfile.instructions() if one.name == "RUN" and "held.txt" in one.rest)
    installed = set(step.partition("--constraint held.txt ")[2].partition("&&")[0].split())
    assert set(_needs("sglang-triattn", "plot")) - brought == installed


def _needs(name: str, extra: str = "") -> list[str]:
    try:
        found = map(Requirement, importlib.metadata.requires(name) or ())
    except importlib.metadata.PackageNotFoundError:
        return []
    needed = (one for one in found if one.marker is None or one.marker.evaluate({"extra": extra}))
    return [canonicalize_name(one.name) for one in needed]


def verify():
    spec = importlib.util.spec_from_file_location("verify", ROOT / "docker" / "verify.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("needs", "sentence"),
    [("sglang==0.0.1", "this image has 0.5.23"), ("no-such-package", "this image has no no-such-package")],
)
def test_an_image_of_another_sglang_is_not_built(monkeypatch, needs, sentence):
    """Prevents an image that is built and tagged, and then cannot start."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: [needs])
    with pytest.raises(SystemExit, match=sentence):
        verify().check_requirements()


def test_an_image_whose_torch_was_replaced_is_not_built():
    """Prevents kernels compiled for one torch from running with another."""
    now = importlib.metadata.version("torch")
    verify().check_unchanged(f"torch=={now}\n")
    with pytest.raises(SystemExit, match=f"replaced torch 2.0.0 by {now}"):
        verify().check_unchanged("torch==2.0.0\n")


def test_the_composition_names_what_exists(services):
    """Prevents mounts of files that were moved, undeclared volumes, and services that are not there."""
    volumes = yaml.safe_load(COMPOSE.read_text())["volumes"]
    for name, service in services.items():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert source in volumes or (COMPOSE.parent / source).exists(), (name, source)
        mode, _, other = service.get("network_mode", "").partition(":")
        assert not mode or (mode == "service" and other in services), name
    assert (COMPOSE.parent / services["server"]["build"]["context"]).resolve() == ROOT
    assert services["server"]["build"]["dockerfile"] == "docker/Dockerfile"


def test_the_composition_is_closed(services):
    """Prevents containers that gain privileges, change their configuration, or listen to other machines."""
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert all(mount.endswith(":ro") for mount in service["volumes"] if mount.startswith(".")), name
        assert "build" in service or IMAGE.fullmatch(service["image"]), name
        assert all("=$" in one or "=" not in one for one in service.get("environment", ())), name


def test_the_composition_measures(services):
    """Prevents a dashboard without figures."""
    assert "--enable-metrics" in services["server"]["command"]
