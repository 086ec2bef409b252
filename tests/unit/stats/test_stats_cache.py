"""The per-user folder of measured statistics: looked up by fingerprint, checked before use, never fatal."""

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from sample_stats import partial_shape, partial_stats, shape, stats
from sglang_triattn.model.fingerprint import with_look_ups
from sglang_triattn.stats.cache import cached_path, keep_stats, load_cached, measuring_alone, why_not_kept
from sglang_triattn.stats.file import save_stats


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sglang-triattn" / "statistics"


def test_kept_statistics_are_found_again(cache):
    """Prevents measuring at every launch."""
    assert load_cached(shape()) is None
    path = keep_stats(stats())
    assert path == cached_path("f" * 32)
    assert path.parent == cache
    assert torch.equal(load_cached(shape()).mean, stats().mean)
    assert load_cached(shape(fingerprint="e" * 32)) is None


def test_files_that_do_not_fit_are_passed_over(caplog):
    """Prevents serving with a damaged file or another model's, and such a file from stopping every launch."""
    path = keep_stats(stats())
    for damage in (
        lambda: path.write_bytes(path.read_bytes()[:100]),
        lambda: save_stats(stats(fingerprint="e" * 32), path),
        lambda: save_stats(stats(num_kv_heads=3), path),
    ):
        damage()
        caplog.clear()
        assert load_cached(shape()) is None
        assert str(path) in caplog.text
        assert keep_stats(stats()) == path
        assert load_cached(shape()) is not None


def test_files_that_leave_dims_unscored_are_passed_over(caplog):
    """Prevents a file of an old version from keeping half of a model's dims unscored for good."""
    usual = {"layers": (0, 1, 2), "rotates": ()}
    path = keep_stats(partial_stats(**usual, unrotated_mean=None))
    with caplog.at_level(logging.INFO):
        assert load_cached(partial_shape(**usual)) is None
    assert str(path) in caplog.text
    keep_stats(partial_stats(**usual))
    assert load_cached(partial_shape(**usual)) is not None


def test_fine_tunes_and_their_base_have_statistics_of_their_own():
    """Prevents a model merged from LoRA, whose fingerprint is its base's, from being scored by the base's queries."""
    base, tuned, quantised = "w" + "a" * 8, "w" + "b" * 8, ""
    path = keep_stats(stats(token_count=1), base)
    assert path.name == f"{'f' * 32}-{base}.safetensors"
    assert load_cached(shape(variant=tuned)) is None
    keep_stats(stats(token_count=2, model="tuned"), tuned)
    os.utime(path, (1, 1))
    assert load_cached(shape(variant=base)).token_count == 1
    assert load_cached(shape(variant=tuned)).token_count == 2
    # Its query weights do not decide; the log names the model.
    found = load_cached(shape(variant=quantised))
    assert (found.token_count, found.model) == (2, "tuned")
    assert load_cached(shape(variant="o" + "a" * 8)) is None
    keep_stats(stats(token_count=4), with_look_ups(base))
    assert load_cached(shape(variant=quantised)).token_count == 2
    assert load_cached(shape(variant=with_look_ups(quantised))).token_count == 4
    keep_stats(stats(token_count=3), quantised)
    assert load_cached(shape(variant=quantised)).token_count == 3
    assert load_cached(shape(variant="w" + "c" * 8)) is None


def test_a_user_without_a_home_keeps_nothing(monkeypatch, caplog):
    """Prevents a launch that ends in a container whose user has neither HOME nor an entry in the password file."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert load_cached(shape()) is None
    with measuring_alone("f" * 32):
        assert why_not_kept("f" * 32) == "this user has no home folder"
        assert keep_stats(stats()) is None
    assert not caplog.records


def test_a_lock_that_is_never_released_is_waited_for_no_longer_than_its_bound(monkeypatch, caplog):
    """Prevents a paused server from keeping every other launch of its model waiting for ever."""
    monkeypatch.setattr("sglang_triattn.stats.cache.LOCK_WAIT_S", 0.2)
    monkeypatch.setattr("sglang_triattn.stats.cache._LOCK_POLL_S", 0.01)
    with measuring_alone("f" * 32), measuring_alone("f" * 32):
        assert "now measures by itself" in caplog.text
    caplog.clear()
    with measuring_alone("f" * 32):
        assert not caplog.records


def test_models_without_a_fingerprint_are_not_kept(caplog):
    """Prevents an unnamed model's statistics from serving another model."""
    assert keep_stats(stats(fingerprint=None)) is None
    assert "config.json" in caplog.text
    assert load_cached(shape(fingerprint=None)) is None


def test_a_folder_that_cannot_be_written_is_survived(cache, caplog):
    """Prevents a full or read-only home from stopping a launch that needs only memory."""
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    with measuring_alone("f" * 32):
        assert keep_stats(stats()) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert load_cached(shape()) is None


def test_what_cannot_be_kept_is_known_beforehand(cache, caplog, monkeypatch):
    """Prevents a launch that measures for minutes and only then finds that it must do so each time."""
    assert why_not_kept("f" * 32) is None
    assert list(cache.iterdir()) == []
    assert "no config.json" in why_not_kept(None)

    def read_only(**_):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryFile", read_only)
        assert why_not_kept("f" * 32) == f"{cache} cannot be written (Read-only file system)"
    assert not caplog.records
    open_to_everybody(cache)
    assert why_not_kept("f" * 32) == f"{cache} is not this user's alone"
    cache.rmdir()
    cache.write_text("a file where the folder should be")
    assert why_not_kept("f" * 32) == f"{cache} cannot be written (File exists)"


def test_a_full_disk_is_survived(monkeypatch, caplog):
    """Prevents half a file, or a failed launch, when the disk fills up while the file is written."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sglang_triattn.files.save_file", full)
    assert keep_stats(stats()) is None
    assert "No space left" in caplog.text
    assert list(cached_path("f" * 32).parent.iterdir()) == []


def test_only_one_measures_at_a_time():
    """Prevents servers that start at the same time from each measuring the same model."""
    entered, order = threading.Event(), []

    def second():
        entered.wait()
        with measuring_alone("f" * 32):
            order.append("second")

    other = threading.Thread(target=second)
    other.start()
    with measuring_alone("f" * 32):
        entered.set()
        other.join(0.5)
        order.append("first")
    other.join()
    assert order == ["first", "second"]


def open_to_everybody(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


def as_another_user(path: Path) -> None:
    """Root may give a file away; anybody else cannot make one that is not theirs, and is tested by the mode alone."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        open_to_everybody(path)


@pytest.mark.parametrize("spoil", [open_to_everybody, as_another_user])
@pytest.mark.parametrize("level", [0, 1, 2], ids=["file", "folder", "folder above"])
def test_a_cache_that_others_can_write_is_not_used(caplog, spoil, level):
    """Prevents another user of a shared machine from deciding what a server evicts."""
    path = keep_stats(stats())
    before = path.read_bytes()
    spoil([path, *path.parents][level])
    assert load_cached(shape()) is None
    assert keep_stats(stats(token_count=7)) is None
    with measuring_alone("f" * 32):
        pass
    assert path.read_bytes() == before
    assert all("does not use its cache" in record.message for record in caplog.records)
    assert caplog.records


def test_a_group_may_write_the_cache():
    """Prevents a cache that is never used on systems whose users have groups of their own."""
    path = keep_stats(stats())
    for place in (path, path.parent, path.parent.parent):
        place.chmod(place.stat().st_mode | 0o020)
    assert load_cached(shape()) is not None


def test_links_are_not_written_through(cache, tmp_path):
    """Prevents a planted link from turning a launch into the end of another file."""
    cache.mkdir(parents=True)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in (cached_path("f" * 32).name, "f" * 32 + ".lock"):
        (cache / name).symlink_to(precious)
    with measuring_alone("f" * 32):
        assert keep_stats(stats()) is not None
    assert precious.read_text() == "mine"
    assert load_cached(shape()) is not None


def test_files_follow_the_umask():
    """Prevents files that a group cannot read though it may, and files that everybody can write."""
    before = os.umask(0o027)
    try:
        path = keep_stats(stats())
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


KEEPER = """
import os, resource, signal, sys
sys.path[:0] = sys.argv[2:]
from sample_stats import stats
from sglang_triattn.stats import cache
import sglang_triattn.files as files
how = sys.argv[1]
if how == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
if how == "killed":
    files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with cache.measuring_alone("f" * 32):
    print("kept" if cache.keep_stats(stats()) else "not kept")
"""


def keep_in_a_process(cache, how: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "XDG_CACHE_HOME": str(cache.parents[1])}
    command = [sys.executable, "-P", "-c", KEEPER, how, *(path for path in sys.path if "tests" in path)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_a_write_that_finds_no_room_leaves_nothing(cache):
    """Prevents a full disk from ending a launch, or from leaving a part of a file."""
    done = keep_in_a_process(cache, "full")
    assert (done.returncode, done.stdout) == (0, "not kept\n"), done.stderr
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_a_server_killed_while_it_keeps_statistics(cache):
    """Prevents a killed server from blocking the next launch by its lock, or by half a file."""
    assert keep_in_a_process(cache, "killed").returncode == -signal.SIGKILL
    assert load_cached(shape()) is None
    done = keep_in_a_process(cache, "well")
    assert (done.returncode, done.stdout) == (0, "kept\n"), done.stderr
    assert load_cached(shape()) is not None
    assert [path.suffix for path in sorted(cache.iterdir())] == [".lock", ".safetensors"]
