"""What a launch warms up before the first request, and what its user reads if that fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_triattn.config import AUTO, Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.kernels.score.tables import build_tables
from sglang_triattn.kernels.scorer import Scorer
from sglang_triattn.kernels.workspace import WorkspacePlan
from sglang_triattn.patches import compression as scheduler_patch
from sglang_triattn.patches.model.eager_batch import EagerBatch
from sglang_triattn.patches.rounds import rehearsal
from sglang_triattn.rounds.rules import complete

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

BLOCK = 4096
"""Tokens that one program of the selection reads at once."""


class Device:
    """A fake CUDA device: records what is asked of it and its streams."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def current_stream(self) -> str:
        return "default"

    def stream(self, stream: Stream) -> Stream:
        return stream

    def synchronize(self) -> None:
        self.log.append("wait for the device")


class Stream:
    def __init__(self, name: str, device: Device) -> None:
        self.name, self._log = name, device.log

    def wait_stream(self, other: str) -> None:
        self._log.append(f"{self.name} waits for {other}")

    def __enter__(self) -> None:
        self._log.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        self._log.append(f"leave {self.name}")


def pretended(overlap: bool = True, kind: str = "cuda", world_size: int = 1) -> SimpleNamespace:
    """What is read of a scheduler on a CUDA device."""
    device = Device()
    return SimpleNamespace(
        device=kind,
        device_module=device,
        enable_overlap=overlap,
        max_total_num_tokens=1 << 20,
        server_args=SimpleNamespace(load_format="auto", enable_dp_attention=False),
        forward_stream=Stream("forward", device),
        schedule_stream=Stream("schedule", device),
        tp_group=SimpleNamespace(world_size=world_size, rank_in_group=0),
        spec_algorithm=SimpleNamespace(is_none=lambda: True, is_dflash=lambda: False),
        dp_tp_group=SimpleNamespace(world_size=world_size, rank_in_group=0),
        pp_group=SimpleNamespace(world_size=1),
        metrics_collector=None,
        token_to_kv_pool_allocator=None,
    )


def compressor(
    device: Device, *, num_tokens: int = 96, longest: int = 8192, limit: int = 1 << 26, moves: bool = False, **settings
):
    """A compressor that records what it is made to warm up."""
    launches = []

    def score_and_move(launch) -> None:
        device.log.append("rehearse")
        launches.append(launch)

    return SimpleNamespace(
        device=torch.device("cpu"),
        config=complete(
            Config("s", **{"budget": 64, "interval": 32, "recent": 16, "selection": "shared-mean", **settings})
        ),
        strategies=("slide", "fill") if moves else ("remap",),
        windows=None,
        workspace_plan=WorkspacePlan(4, 8, 2, num_tokens, longest, limit),
        score_and_move=score_and_move,
        launches=launches,
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_rehearsed_where_rounds_run(overlap):
    """Prevents memory cached for another stream, and requests that arrive before the kernels are ready."""
    scheduler = pretended(overlap)
    rehearsal.rehearse(scheduler, compressor(scheduler.device_module))
    name = "forward" if overlap else "schedule"
    steps = [f"{name} waits for default", f"enter {name}", "rehearse", "rehearse", f"leave {name}"]
    assert scheduler.device_module.log == [*steps, "wait for the device"]


def test_copies_are_rehearsed_with_rounds():
    """Prevents the kernel that copies rows from compiling when the first turn of a conversation resumes one."""
    scheduler = pretended()
    log = scheduler.device_module.log
    rehearsal.rehearse(
        scheduler, compressor(scheduler.device_module), SimpleNamespace(rehearse=lambda: log.append("c"))
    )
    assert log[-3:] == ["c", "leave forward", "wait for the device"]


def test_nothing_is_rehearsed_without_kernels():
    """Prevents a launch on a CPU from scoring rows that no kernel reads."""
    scheduler = pretended(kind="cpu")
    rehearsal.rehearse(scheduler, compressor(scheduler.device_module))
    assert scheduler.device_module.log == []


@pytest.mark.parametrize(
    ("num_tokens", "longest", "widths"),
    [(96, 512, [96, 512]), (96, 8192, [96, BLOCK + 1]), (5000, 8192, [BLOCK, BLOCK + 1]), (96, 96, [96])],
)
@pytest.mark.parametrize("moves", [False, True])
def test_every_kind_of_launch(num_tokens, longest, widths, moves):
    """Prevents a kernel from compiling in a round: for long rows, or for requests with settings of their own."""
    scheduler = pretended()
    found = compressor(scheduler.device_module, num_tokens=num_tokens, longest=longest, moves=moves)
    rehearsal.rehearse(scheduler, found)
    strategies = ["slide", "fill"] if moves else ["remap"]
    seen = [(launch.slots.shape[1], launch.shape.strategy) for launch in found.launches]
    assert seen == [(width, strategy) for width in widths for strategy in strategies]
    for launch in found.launches:
        assert not launch.slots.any(), "only the padding slot may be touched"
        assert launch.row_info[2].tolist() == [launch.slots.shape[1]]
        assert launch.shape.num_kept == launch.shape.cut < launch.slots.shape[1]


@pytest.mark.parametrize(("recent", "rehearsed"), [(16, [0, 16]), (64, [0, 64]), (0, [0])])
def test_every_criterion_gets_a_place(recent, rehearsed):
    """Prevents the first request with a smaller `recent` of its own from compiling what its other tokens need."""
    settings = {"selection": "per-layer-head", "value_share": 0.5, "recent": recent}
    scheduler = pretended()
    found = compressor(scheduler.device_module, longest=96, moves=True, **settings)
    rehearsal.rehearse(scheduler, found)
    seen = [(launch.shape.strategy, launch.shape.recent) for launch in found.launches]
    assert seen == [(strategy, recent) for strategy in ("slide", "fill") for recent in rehearsed]


def test_rows_for_which_the_layers_are_cut():
    """Prevents the first long row from being the first to merge layers over several launches."""
    scheduler = pretended()
    found = compressor(scheduler.device_module, longest=50_000, limit=1 << 20)
    assert found.workspace_plan.launch(50_000)[1] < 4
    rehearsal.rehearse(scheduler, found)
    assert [launch.slots.shape[1] for launch in found.launches] == [96, 50_000]


def start(monkeypatch, build, scheduler=None) -> str:
    """Why a launch refuses if its compressor comes from `build`."""
    monkeypatch.setattr(scheduler_patch, "check_in_place", lambda hooks: None)
    monkeypatch.setattr(scheduler_patch, "served_stats", lambda *_: None)
    monkeypatch.setattr(scheduler_patch, "build_compressor", build)
    monkeypatch.setattr(scheduler_patch, "make_copier", lambda *_, **__: None)
    # With one kept set for all heads, which ranks have to merge.
    compression = scheduler_patch.Compression(complete(Config("s", selection="shared-mean")))
    compression._on_built(None, scheduler or pretended())
    assert compression.compressor is None
    return compression.refusal


def assert_one_sentence(refusal: str) -> None:
    assert "\n" not in refusal
    assert refusal.endswith(".")
    assert "start without --enable-triattention" in refusal or "--mem-fraction-static" in refusal


def unreadable(*_) -> Scorer:
    """Builds what the kernels cannot read: layers whose keys differ in type."""
    pools = [torch.zeros(4, 2, 8), torch.zeros(4, 2, 8, dtype=torch.bfloat16)]
    mean = torch.ones(2, 4, 4, dtype=torch.complex64)
    tables = build_tables(mean, mean.abs(), torch.ones(4), 1.0, "half", 2, "cpu")
    return Scorer(pools, tables, num_tokens=8, longest=8, kernels=True)


def test_what_goes_wrong_while_measuring_is_refused_too(monkeypatch):
    """Prevents a traceback if the model, measured at launch, fails or needs more memory than there is."""
    monkeypatch.setattr(scheduler_patch, "check_in_place", lambda hooks: None)
    monkeypatch.setattr(scheduler_patch, "served_stats", out_of_memory)
    compression = scheduler_patch.Compression(complete(Config(AUTO)))
    compression._on_built(None, pretended())
    assert_one_sentence(compression.refusal)
    with pytest.raises(torch.OutOfMemoryError):
        # The other ranks are in the middle of the same pass: only the end of this process ends theirs.
        scheduler_patch.Compression(complete(Config(AUTO)))._on_built(None, pretended(world_size=2))


def out_of_memory(*_) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.\nGPU 0 has 1 MiB free.")


def unforeseen(*_) -> None:
    raise RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE_CUDA_DSA.")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (unreadable, "KV pools of all layers must have one dtype"),
        (out_of_memory, "Tried to allocate 64.00 MiB): lower --mem-fraction-static"),
        (unforeseen, "RuntimeError: CUDA error: no kernel image is available)"),
    ],
)
def test_what_cannot_be_built_is_refused(monkeypatch, build, words):
    """Prevents a traceback, and a dying scheduler, when a launch should say why it cannot continue."""
    refusal = start(monkeypatch, build)
    assert_one_sentence(refusal)
    assert words in refusal


@pytest.mark.skipif(torch.cuda.is_available(), reason="its kernels compile")
def test_a_kernel_that_cannot_run_is_refused(monkeypatch):
    """Prevents a server that dies in its first round: here Triton finds no device at all."""
    from sglang_triattn.kernels.select.keep_kernel import keep_triton

    def build(*_):
        found = compressor(Device())
        found.score_and_move = lambda launch: keep_triton(torch.zeros(1, 1, 8), torch.tensor([8]), 4, 2)
        return found

    refusal = start(monkeypatch, build)
    assert_one_sentence(refusal)
    assert "keep_kernel.py, keep failed" in refusal
    assert "--log-level debug" in refusal


def test_a_model_that_cannot_run_is_not_blamed_on_kernels(monkeypatch):
    """Prevents advice to change Triton where SGLang has no kernel for the model's dtype."""

    def build(*_):
        batch = EagerBatch.__new__(EagerBatch)
        batch._batch = None
        batch._scheduler = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=None),
            dp_attn_adapter=SimpleNamespace(maybe_prepare_mlp_sync_batch=unforeseen),
        )
        batch._forward()

    refusal = start(monkeypatch, build)
    assert_one_sentence(refusal)
    assert "A pass through the model failed" in refusal
    assert "no kernel image is available" in refusal
    assert "triton" not in refusal


def test_triton_says_last_what_happened():
    """Prevents a message that quotes a line of a kernel's code."""
    error = type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})
    sentence = str(rehearsal.refusal_for(error("at 3:4:\n    x = tl.load(p)\n    ^\nunsupported type")))
    assert "(CompilationError: unsupported type)" in sentence


class Ranks(SimpleNamespace):
    """Two ranks, the other of which says `other`."""

    world_size, rank_in_group = 2, 0

    def all_gather_object(self, own):
        return [own, self.other]

    def all_gather(self, importance, dim):
        raise AssertionError("the other rank does not come")


def test_all_ranks_refuse_where_one_does(monkeypatch):
    """Prevents a hanging launch: a rank that fails on its own never joins the others' gather."""
    scheduler = pretended()
    scheduler.tp_group = scheduler.dp_tp_group = Ranks(other="The other rank is out of memory.")

    def build(*arguments):
        *_, merge, _ = arguments
        found = compressor(scheduler.device_module)
        # As the scorer does before it selects.
        found.score_and_move = lambda launch: merge(torch.zeros(1, 1, 8))
        return found

    assert start(monkeypatch, build, scheduler) == "The other rank is out of memory."
    scheduler.tp_group.other = None
    refusal = start(monkeypatch, build, scheduler)
    assert "the other rank does not come" in refusal, "once all can run, the ranks' gather is rehearsed too"
    scheduler.tp_group.other = None
    assert "out of memory" not in start(monkeypatch, unforeseen, scheduler)


def test_refusals_keep_their_own_words(monkeypatch):
    """Prevents a clear refusal from being wrapped into a vague one."""

    def build(*_):
        raise TriAttentionError("Its statistics are of another model: calibrate.")

    assert start(monkeypatch, build) == "Its statistics are of another model: calibrate."
