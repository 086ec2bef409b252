"""The plain-CPU platform serves where nothing else can, and nowhere else."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.platforms import _load_platform_class

from sglang_triattn.patches.cpu import platform as cpu_platform


@pytest.fixture
def bare(monkeypatch):
    """A machine without accelerators, even if this one has some."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    return monkeypatch


def test_active_without_an_accelerator(bare):
    """Prevents CPU machines from failing in SGLang's own CPU engine, which needs a special build."""
    platform = _load_platform_class(cpu_platform.activate())()
    assert platform.get_default_attention_backend() == "torch_native"
    assert platform.get_compile_backend() == "eager"
    assert not platform.is_pin_memory_available()
    assert platform.is_out_of_tree()
    assert platform.get_device(None) == "cpu"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, cpu_platform.POOL_TOKENS),
        ({"max_total_tokens": 512}, 512),
        ({"mem_fraction_static": 0.5}, None),
    ],
)
def test_the_pool_leaves_the_machine_its_memory(bare, given, expected):
    """Prevents a server from taking most of the machine's memory because no limit was set, and a default from
    overriding a limit that was set."""
    settings = SimpleNamespace(**{"max_total_tokens": None, "mem_fraction_static": None} | given)
    _load_platform_class(cpu_platform.activate())().apply_server_args_defaults(settings)
    assert settings.max_total_tokens == expected


def test_out_of_the_way_of_a_gpu(bare):
    """Prevents a GPU server from running on the CPU because this package is installed."""
    bare.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu_platform.activate() is None


def test_out_of_the_way_of_sglangs_cpu_engine(bare):
    """Prevents overriding a user who chose SGLang's own CPU engine."""
    bare.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert cpu_platform.activate() is None
