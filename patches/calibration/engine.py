"""`sglang-triattn calibrate --engine sglang`: an engine that measures instead of serving.

The main process starts `sglang.Engine` with a request attached to its settings. Each scheduler runs the request as soon
as it is built, and answers with the handshake of a compressing server (`handshake`); before that, the first rank writes
the statistics. Then the engine is shut down. SGLang parts: `Engine` and `_wait_for_scheduler_ready`
(sglang/srt/entrypoints/engine.py), `Scheduler`.
"""

from __future__ import annotations

import pickle
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from sglang_triattn.calibration.job import CalibrationError, CalibrationJob
from sglang_triattn.compatibility.rules import ENVIRONMENT
from sglang_triattn.compatibility.uncovered import LONG_ROPE, why_uncovered
from sglang_triattn.config import SWITCH
from sglang_triattn.errors import TriAttentionError, first_line
from sglang_triattn.patches.hooks.hook import Hook, check_version
from sglang_triattn.patches.hooks.registry import install
from sglang_triattn.patches.launch import handshake
from sglang_triattn.patches.launch import server_args as args_patch
from sglang_triattn.patches.launch.model_config import reason_in_file
from sglang_triattn.patches.launch.server_args import CalibrationRequest
from sglang_triattn.patches.launch.traits import traits_of
from sglang_triattn.patches.model import late_norm
from sglang_triattn.variable import unset

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    from sglang_triattn.patches.sglang_types import Scheduler

# Settings under which private forward passes, or the split of heads over ranks, do not work as assumed here.
_REFUSED = {
    "pp_size": lambda value: value > 1,
    "dp_size": lambda value: value > 1,
    "attn_cp_size": lambda value: value > 1,
    "dcp_size": lambda value: value > 1,
    "nnodes": lambda value: value > 1,
    "speculative_algorithm": bool,
    "disaggregation_mode": lambda value: value not in (None, "null"),
    "enable_two_batch_overlap": bool,
    "enable_pdmux": bool,
    "dllm_algorithm": bool,
    "is_embedding": bool,
    "use_ray": bool,
}

_NO_PLACE = f"{SWITCH} has no place in a calibration: leave it out."


@dataclass(frozen=True)
class Made:
    """Figures of the statistics that were written."""

    layers: int
    heads: int
    tokens: int | None


@unset()
def calibrate_with_engine(model_path: str, job: CalibrationJob, out: Path, server_args: Sequence[str]) -> Made:
    """Runs `job` in its own engine and writes the statistics to `out`.

    Args:
        server_args: flags of SGLang's own command line. One that SGLang does not know ends the process with status 2.

    Raises:
        TriAttentionError: with one sentence, if the model, its settings or a text cannot be used, or the engine does
            not start.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    # Checked before the other flags, because what they name need not exist.
    if any(word.split("=")[0] == SWITCH for word in server_args):
        raise CalibrationError(_NO_PLACE)
    check_version()
    load_plugins()
    # Prompts are token ids, so no tokenizer is needed; graphs would only be captured, never replayed.
    fixed = ["--model-path", model_path, "--skip-tokenizer-init", "--log-level", "error"]
    for phase in ("decode", "prefill"):
        fixed += [f"--cuda-graph-backend-{phase}", "disabled"]
    record = prepare_server_args([*fixed, *server_args])
    if args_patch.config_of(record) is not None:
        raise CalibrationError(_NO_PLACE)
    _check(record)
    install(main_hooks())
    engine = None
    with tempfile.NamedTemporaryFile(prefix="sglang-triattn-") as job_file, _children_without_interrupts():
        job_file.write(pickle.dumps(job))
        job_file.flush()
        args_patch.ask_for_calibration(record, CalibrationRequest(job_file.name, str(out.absolute())))
        try:
            engine = _engine_class()(server_args=record)
        except (ValueError, RuntimeError, OSError, AssertionError) as error:
            if isinstance(error, TriAttentionError):
                raise
            raise CalibrationError(_sentence(error)) from error
    try:
        return Made(**_answer(engine))
    finally:
        engine.shutdown()


def scheduler_hooks(request: CalibrationRequest) -> list[Hook]:
    """Hooks for a scheduler process that calibrates."""
    state = _Scheduler(request)
    target = "sglang.srt.managers.scheduler.Scheduler"
    return [
        Hook(
            f"{target}.__init__",
            "after",
            state.on_built,
            "self server_args port_args",
            why="measures as soon as the scheduler is built",
        ),
        Hook(
            f"{target}.get_init_info",
            "after",
            state.on_init_info,
            "self",
            why="answers what was measured, or why nothing was",
        ),
        *late_norm.hooks(),
    ]


class _Scheduler:
    def __init__(self, request: CalibrationRequest) -> None:
        self._request = request
        self._refusal: str | None = (
            "A scheduler process was not built through the hooks of sglang-triattn, so nothing was measured: start "
            "without other SGLang plugins."
        )
        self._made: dict[str, int | None] = {}

    def on_built(self, _: object, scheduler: Scheduler, *__: object, **___: object) -> None:
        try:
            self._calibrate(scheduler)
            self._refusal = None
        except TriAttentionError as error:
            self._refusal = str(error)
        except torch.OutOfMemoryError:
            self._refusal = (
                "The device ran out of memory while calibrating: use a smaller --window or fewer --self-tokens, or "
                "leave the engine's pool less with -- --mem-fraction-static 0.7."
            )

    def on_init_info(self, info: dict, _: object) -> dict:
        return {**info, handshake.KEY: handshake.answer(self._refusal) | {"calibrated": self._made}}

    def _calibrate(self, scheduler: Scheduler) -> None:
        from sglang_triattn.patches.calibration.measure import calibrate_scheduler
        from sglang_triattn.stats.file import save_stats

        job = pickle.loads(Path(self._request.job_file).read_bytes())
        first = scheduler.tp_group.rank_in_group == 0
        with tqdm(total=job.tokens + job.lookup_tokens, unit="token", desc="calibrate", disable=not first) as bar:

            def show(done: int, most: int) -> None:
                bar.update(done - bar.n)

            stats = calibrate_scheduler(scheduler, job, show)
        if first:
            save_stats(stats, self._request.out)
        layers, heads, _ = stats.mean.shape
        self._made = {"layers": layers, "heads": heads, "tokens": stats.token_count}


def _check(record: ServerArgs) -> None:
    """Raises TriAttentionError for settings and models that cannot be calibrated."""
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
    from sglang.srt.environ import envs

    try:
        record.resolve_once()
        settings = resolving_view(record)
        model = model_config_of(record)
    except (ValueError, OSError, RuntimeError, KeyError, AssertionError) as error:
        raise CalibrationError(_sentence(error)) from error
    for field, refused in _REFUSED.items():
        value = getattr(settings, field)
        if value is not None and refused(value):
            name = "--" + field.replace("_", "-")
            raise CalibrationError(
                f"{name} {value} does not work with calibrate: leave it out; of several devices, --tp-size uses all."
            )
    for name, reason in ENVIRONMENT.items():
        if getattr(envs, name).get():
            raise CalibrationError(f"{name} does not work with calibrate, because {reason}: unset it.")
    traits = traits_of(model)
    reason = why_uncovered(traits.uncovered)
    found = reason_in_file(settings) if reason is None else (traits.name, reason)
    if found is not None:
        name, reason = found
        raise CalibrationError(
            f"The model {name} cannot be calibrated, because {reason}: use a decoder-only model with ordinary "
            "multi-head or grouped-query attention."
        )
    if traits.changes_frequencies(traits.context):
        raise CalibrationError(
            f"{traits.name} cannot be calibrated in a context of more than {traits.rope_limit:,} tokens, because "
            f"{LONG_ROPE}: add -- --context-length {traits.rope_limit}."
        )


def _engine_class() -> type:
    """An Engine without a tokenizer manager: it receives no requests, and Ctrl-C takes effect sooner."""
    from sglang.srt.entrypoints.engine import Engine

    class CalibrationEngine(Engine):
        init_tokenizer_manager_func = staticmethod(lambda server_args, port_args: (_NoTokenizer(), None))

    return CalibrationEngine


class _NoTokenizer:
    """The attributes that Engine sets on a tokenizer manager while it starts."""

    _subprocess_watchdog: object = None
    max_req_input_len: int = 0

    def set_startup_time(self, startup_time: float) -> None:
        pass


def main_hooks() -> list[Hook]:
    """Hooks for the main process."""
    target = "sglang.srt.entrypoints.engine._wait_for_scheduler_ready"
    return [
        Hook(
            target,
            "around",
            _wait,
            "scheduler_pipe_readers scheduler_procs",
            why="collects the ranks' answers, any refusal first",
        )
    ]


def _wait(original: Callable, readers: list, processes: list) -> list[dict]:
    """Waits for the answers of all ranks at once, so that any refusal ends the launch while other ranks still run."""
    from sglang.srt.runtime_context import get_server_args

    if args_patch.calibration_of(get_server_args()) is None:
        return original(readers, processes)
    infos: dict[int, dict] = {}
    try:
        signal.signal(signal.SIGQUIT, _on_child_failure)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while len(infos) < len(readers):
            waiting = [reader for index, reader in enumerate(readers) if index not in infos]
            # If none is ready, SGLang's own function finds out whether a process has died.
            for reader in connection.wait(waiting, timeout=5) or ([] if _all_alive(processes) else waiting[:1]):
                info = original([reader], processes)[0]
                handshake.check_answers([info])
                infos[readers.index(reader)] = info
    except BaseException:
        handshake.stop_launch(processes)
        raise
    return [infos[index] for index in range(len(readers))]


def _all_alive(processes: list) -> bool:
    return all(process.is_alive() for process in processes)


def _on_child_failure(*_: object) -> None:
    """Handles SIGQUIT, which SGLang's schedulers send when they fail; SGLang's handler would kill this process too."""
    raise CalibrationError("SGLang failed while it loaded or ran the model: see its error above.")


def _answer(engine: Engine) -> dict[str, int]:
    return engine._scheduler_init_result.scheduler_infos[0][handshake.KEY]["calibrated"]


@contextmanager
def _children_without_interrupts() -> Iterator[None]:
    """While open, processes inherit a blocked SIGINT when they are started.

    Ctrl-C reaches the whole group, but only this process should react to it, by ending the others.
    """
    # Starting the tracker later would unblock the signal.
    resource_tracker.ensure_running()
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _sentence(error: BaseException) -> str:
    reason = first_line(error)
    return f"SGLang cannot start the model: it says {reason!r}; correct the arguments after --."
