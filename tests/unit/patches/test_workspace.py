"""Device memory for scoring is reserved before SGLang sizes its KV pool, and is as large as the plan says."""

from types import SimpleNamespace

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_triattn.config import Config
from sglang_triattn.patches.model.workspace import Workspace
from sglang_triattn.rounds.rules import complete


def configurator(device: str, layers: int = 3) -> SimpleNamespace:
    """The parts of a KVCacheConfigurator that are read; the meta device has sizes but no memory."""
    model = torch.nn.ModuleList()
    for number in range(layers):
        layer = torch.nn.Module()
        layer.attn = RadixAttention(num_heads=8, head_dim=32, scaling=1.0, num_kv_heads=2, layer_id=number)
        model.append(layer)
    return SimpleNamespace(device=device, model=model, model_config=SimpleNamespace(context_len=4096))


def test_reserved_once_and_as_planned():
    """Prevents a workspace that comes on top of the pool's share, or grows when SGLang measures again."""
    workspace = Workspace(complete(Config("s", budget=500, interval=12)))
    (hook,) = workspace.hooks()
    hook.function(configurator("meta"), 1.0)
    memory, plan = workspace.memory, workspace.plan
    assert (plan.layers, plan.q_heads, plan.kv_heads, plan.num_tokens, plan.longest) == (3, 8, 2, 512, 4096)
    assert memory.numel() * memory.element_size() == plan.bytes()
    hook.function(configurator("meta"), 1.0)
    assert workspace.memory is memory


def test_what_decides_has_room():
    """Prevents sizing a pool without the memory for values, or with memory for scores that are not computed."""
    needs = []
    for share in (0.0, 0.5, 1.0):
        workspace = Workspace(complete(Config("s", selection="per-layer-head", value_share=share)))
        workspace.hooks()[0].function(configurator("meta"), 1.0)
        plan = workspace.plan
        needs.append({name: start for name, (start, _) in plan.parts(1, 2176, 3).items()})
        assert plan.bytes() >= plan.needs(1, 2176, 3, 2048, 128)
    assert "sizes" not in needs[0]
    assert needs[1]["sizes"] == needs[1]["scores"]
    assert "scores" not in needs[2]


def test_nothing_where_no_kernel_runs():
    """Prevents holding memory for nothing on a CPU, and a crash instead of the refusal of an unsupported model."""
    for other in (configurator("cpu"), configurator("meta", layers=0)):
        workspace = Workspace(complete(Config("s")))
        workspace.hooks()[0].function(other, 1.0)
        assert workspace.memory is None
