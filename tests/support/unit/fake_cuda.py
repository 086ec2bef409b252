"""A fake torch.cuda: streams, events, and graphs that record operations and replay them on the same tensors."""

from __future__ import annotations

import contextlib
import inspect
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Runs every operation and records it with its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.done.append((function, args, kwargs or {}, result))
        return result


class Graph:
    """Stands in for torch.cuda.CUDAGraph: a replay runs no Python of what was captured."""

    def __init__(self) -> None:
        self.recorder, self.replays = Recorder(), 0

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, result in self.recorder.done:
            again = function(*args, **kwargs)
            for held, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(held, torch.Tensor) and held.data_ptr() != new.data_ptr():
                    held.copy_(new)


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timed, self.at = enable_timing, None

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        assert self.timed
        assert other.timed
        return (other.at - self.at) * 1e3

    def synchronize(self) -> None:
        assert self.at is not None


class Stream:
    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


class Log:
    def __init__(self) -> None:
        self.graphs: list[Graph] = []


def pretend_cuda(monkeypatch) -> Log:
    """Replaces what the benchmarks call in torch.cuda; arguments must fit the real signatures."""
    log, real = Log(), torch.cuda.graph

    def graph():
        log.graphs.append(Graph())
        return log.graphs[-1]

    @contextlib.contextmanager
    def capture(*given, **options):
        bound = inspect.signature(real.__init__).bind(None, *given, **options).arguments
        with bound["cuda_graph"].recorder:
            yield

    current = Stream()
    for name, value in {
        "CUDAGraph": graph,
        "graph": capture,
        "Stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda: current,
        "synchronize": lambda: None,
        "Event": Event,
    }.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, value)
    return log
