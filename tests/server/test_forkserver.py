"""Which servers of the tests may share what has been imported for another."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import environment_reads
import forked_servers
import forkserver as server_of_forks

READING = """
import os, sys
sys.path.insert(0, sys.argv[1])
import environment_reads
environment_reads.record()
os.getenv("BY_GETENV"), os.environ.get("BY_GET", "1"), "BY_IN" in os.environ, os.environ.setdefault("BY_DEFAULT", "1")
os.environ.pop("BY_POP", None), os.path.expanduser("~")
search = {"__name__": "tqdm.utils", "os": os}
exec("def envwrap(name):\\n    return [key for key, value in os.environ.items() if key.startswith('TQDM_')]", search)
search["envwrap"]("tqdm")
assert "PRESENT" not in environment_reads.read
found = set(environment_reads.read)
dict(os.environ)
assert "PRESENT" in environment_reads.read
environment_reads.stop()
os.getenv("LATER")
assert "LATER" not in environment_reads.read
print(*sorted(found))
"""


def test_what_is_read_is_recorded():
    """Prevents a variable that an import has read from counting as one that later processes may still set."""
    folder = Path(environment_reads.__file__).parent
    command = [sys.executable, "-c", READING, str(folder)]
    env = {**os.environ, "PRESENT": "1", "TQDM_NCOLS": "80"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == sorted(
        ["BY_DEFAULT", "BY_GET", "BY_GETENV", "BY_IN", "BY_POP", "HOME", "TQDM_NCOLS"]
    ), done.stderr


@pytest.mark.parametrize(
    ("one", "other", "late"),
    [
        ({"READ": "1", "NOT_READ": "1"}, {"READ": "1", "NOT_READ": "2"}, []),
        ({"READ": "1"}, {"READ": "2"}, ["READ"]),
        ({}, {"READ": "1"}, ["READ"]),
        ({"READ": "1"}, {}, ["READ"]),
        ({}, {"OMP_NUM_THREADS": "1", "SGL_OLD_NAME": "1"}, ["OMP_NUM_THREADS", "SGL_OLD_NAME"]),
        ({}, {"XDG_CACHE_HOME": "elsewhere", "PYTHONPATH": "elsewhere"}, []),
    ],
)
def test_environments_that_agree(one, other, late):
    """Prevents a server from what was imported under another value of a variable that counts, set, unset or read by
    compiled code."""
    assert environment_reads.disagreeing(one, other, {"READ", "XDG_CACHE_HOME"}) == late


def test_an_image_is_found_by_what_it_has_read():
    """Prevents an image for each environment, and the least recently used one from being kept."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        retracting, other = (
            server_of_forks.Image(ours, {"RETRACT": value}, frozenset({"RETRACT"})) for value in ("1", "0")
        )
        images = [retracting, other]
        assert server_of_forks.image_of({"RETRACT": "1", "SGLANG_DISABLED_MODEL_ARCHS": "llama"}, images) is retracting
        assert images == [other, retracting]


def test_what_comes_too_late_is_refused(forkserver, tmp_path):
    """Prevents a command from starting with a variable that has been read for it, with another value."""
    with pytest.raises(ValueError, match=r"^HF_MODULES_CACHE would come too late: "):
        forked_servers.run_module(forkserver, ["this"], {"HF_MODULES_CACHE": str(tmp_path)}, tmp_path / "log")
    (tmp_path / "torch.py").write_text("")
    ended = forked_servers.run_module(forkserver, ["this"], {"PYTHONPATH": str(tmp_path)}, tmp_path / "log")
    assert ended.code == 1
    assert "has other modules than those imported as ['torch']" in ended.output


LONELY = """
import sys
sys.path.insert(0, sys.argv[2])
import forkserver
sys.path.pop(0)
forkserver.PACKAGES = ()
forkserver.main()
"""


def test_servers_end_with_their_test_process(tmp_path):
    """Prevents servers of a test run that was killed or interrupted from keeping their memory and their cores."""
    (tmp_path / "sleeper.py").write_text("import time\nprint('asleep', flush=True)\ntime.sleep(600)\n")
    log = tmp_path / "log"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = str(Path(server_of_forks.__file__).parent)
    command = [sys.executable, "-P", "-c", LONELY, str(theirs.fileno()), folder]
    with ours, log.open("w") as output:
        lonely = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        request = {"command": ["sleeper"], "env": env, "folder": str(tmp_path)}
        socket.send_fds(ours, [json.dumps(request).encode()], [output.fileno()])
        sleeper = psutil.Process(json.loads(ours.recv(1 << 12)))
        deadline = time.monotonic() + 60
        while "asleep" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert lonely.wait(60) == 0
    assert not sleeper.is_running() or sleeper.status() == psutil.STATUS_ZOMBIE
