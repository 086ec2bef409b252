"""Where a calibration inside a server gets its memory, where it goes afterwards, and the message if there is none."""

import pickle
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from sample_stats import shape
from sglang_triattn.calibration.job import CalibrationJob
from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.calibration import engine as calibration_launch
from sglang_triattn.patches.calibration import measure as calibration
from sglang_triattn.patches.calibration import stats_source
from sglang_triattn.patches.launch import handshake
from sglang_triattn.patches.launch.server_args import CalibrationRequest

JOB = CalibrationJob(windows=((1, 2, 3),))


class Stream:
    def __init__(self, name: str, events: list) -> None:
        self._name, self._events = name, events

    def wait_stream(self, other: "Stream") -> None:
        self._events.append(f"{self._name} waits for {other._name}")


class Device:
    """Records what is done with its streams, used like `torch.cuda`."""

    def __init__(self) -> None:
        self.events = []
        self.current = Stream("default", self.events)

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream):
        outer, self.current = self.current, stream
        self.events.append(f"enter {stream._name}")
        try:
            yield
        finally:
            self.events.append(f"leave {stream._name}")
            self.current = outer

    def empty_cache(self) -> None:
        self.events.append(f"empty the cache, {self.current._name} current")


def scheduler_on(device: Device, overlap: bool = True) -> SimpleNamespace:
    """The parts of a Scheduler that a calibration touches before and after its passes."""
    runner = SimpleNamespace(model=None, model_config=SimpleNamespace(model_path="m"))
    runner.decode_cuda_graph_runner = runner.prefill_cuda_graph_runner = None
    pool = SimpleNamespace(available_size=lambda: 100)
    return SimpleNamespace(
        server_args=SimpleNamespace(load_format="auto", enable_dp_attention=False),
        device_module=device,
        enable_overlap=overlap,
        forward_stream=Stream("forward", device.events),
        schedule_stream=Stream("schedule", device.events),
        tp_worker=SimpleNamespace(model_runner=runner),
        tp_group=SimpleNamespace(world_size=1, rank_in_group=0, broadcast_object=lambda value: value),
        dp_tp_group=SimpleNamespace(world_size=1),
        dp_attn_adapter=SimpleNamespace(maybe_prepare_mlp_sync_batch=lambda batch: batch),
        pp_group=SimpleNamespace(
            world_size=1, rank_in_group=0, is_last_rank=True, broadcast_object=lambda value: value
        ),
        token_to_kv_pool_allocator=pool,
        req_to_token_pool=pool,
        model_config=SimpleNamespace(context_len=1000),
        max_total_num_tokens=1000,
        page_size=1,
        chunked_prefill_size=None,
        max_prefill_tokens=1000,
    )


@pytest.mark.parametrize(("overlap", "used"), [(True, "forward"), (False, "schedule")])
@pytest.mark.parametrize("fails", [False, True])
def test_passes_run_on_the_stream_that_serves(monkeypatch, overlap, used, fails):
    """Prevents memory from being cached for a stream that no forward pass uses, where the server then lacks it."""
    device = Device()

    def run(_) -> SimpleNamespace:
        device.events.append(f"run on {device.current._name}")
        if fails:
            raise calibration.CalibrationError("no.")
        return SimpleNamespace(count=10**6)

    monkeypatch.setattr(calibration, "served_shape", lambda _: shape())
    monkeypatch.setattr(calibration, "scored_layers", lambda _: [])
    monkeypatch.setattr(calibration, "attention_layers", lambda _: [])
    monkeypatch.setattr(calibration, "_statistics", lambda *_: "measured")
    monkeypatch.setattr(calibration._Run, "run", run)
    with pytest.raises(calibration.CalibrationError) if fails else nullcontext():
        assert calibration.calibrate_scheduler(scheduler_on(device, overlap), JOB) == "measured"
    assert device.events == [
        f"{used} waits for default",
        f"enter {used}",
        f"run on {used}",
        f"leave {used}",
        f"default waits for {used}",
        "empty the cache, default current",
    ]


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


def assert_helpful(text: str) -> None:
    assert text.startswith("The device ran out of memory")
    assert "--mem-fraction-static" in text
    assert "\n" not in text
    assert "GiB" not in text
    assert text.endswith(".")


def test_no_memory_for_the_measurement_at_launch(monkeypatch, tmp_path):
    """Prevents a traceback from PyTorch's allocator when a smaller pool, or a file, would do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(stats_source, "launch_job", lambda *_: JOB)
    monkeypatch.setattr(stats_source, "calibrate_scheduler", out_of_memory)
    with pytest.raises(TriAttentionError) as caught:
        stats_source.find_stats(scheduler_on(Device()), Config(), shape())
    assert_helpful(str(caught.value))
    assert "`sglang-triattn calibrate` with --triattention-stats" in str(caught.value)


def test_no_memory_for_a_calibrating_engine(monkeypatch, tmp_path):
    """Prevents the same when `calibrate --engine sglang` runs the model."""
    (tmp_path / "job").write_bytes(pickle.dumps(JOB))
    monkeypatch.setattr(calibration, "calibrate_scheduler", out_of_memory)
    built, confirm, *_ = calibration_launch.scheduler_hooks(CalibrationRequest(str(tmp_path / "job"), "out"))
    built.function(None, scheduler_on(Device()))
    info = confirm.function({"status": "ready"}, None)
    assert_helpful(info[handshake.KEY]["refusal"])
    assert "--window" in info[handshake.KEY]["refusal"]
