"""The reference attention backend among SGLang's: its name, and the models for which the CPU platform chooses it.

SGLang parts: the choices of --attention-backend (sglang/srt/arg_groups/choices.py), two steps of the resolution of
settings (sglang/srt/arg_groups/resolution_hooks.py), `register_attention_backend`
(sglang/srt/layers/attention/attention_registry.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_triattn.patches.cpu import state_layers

if TYPE_CHECKING:
    import torch
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_triattn.patches.cpu.reference_backend import ReferenceBackend
    from sglang_triattn.patches.sglang_types import ModelRunner, ServerArgs

    Step = Callable[[ServerArgs], None]

NAME = "torch_reference"

# What SGLang would choose on a CPU, and replaces by torch_native where its CPU build is missing. Models that
# torch_native cannot serve accept it.
_STAND_IN = "intel_amx"
# Models that accept none of a CPU's; their windows, the reference backend knows.
_GPU_ONLY = ("Exaone4ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM")


def offer() -> None:
    """Makes the backend a choice of the launch. Imports nothing of SGLang that is not a leaf."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    if NAME in choices.ATTENTION_BACKEND_CHOICES:
        return
    choices.add_attention_backend_choices([NAME])
    choices.add_draft_attention_backend_choices([NAME])
    register_resolution_hook("handle_model_specific_adjustments")(_adjust_to_model)
    register_resolution_hook("handle_attention_backend_compatibility")(_choose)
    register_resolution_hook("handle_speculative_decoding")(_allow_trees)


def register() -> None:
    """Lets this process build the backend, and puts torch in the place of Triton kernels that its models run into."""
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache import allocation

    register_attention_backend(NAME)(_build)
    # SGLang takes the kernel for every backend but torch_native.
    allocation.get_last_loc_triton = allocation.get_last_loc_torch
    logits_processor.fused_softcap = _cap_logits


def _build(runner: ModelRunner) -> ReferenceBackend:
    from sglang_triattn.patches.cpu.reference_backend import ReferenceBackend

    return ReferenceBackend(runner)


def _cap_logits(logits: torch.Tensor, bound: float) -> None:
    """bound * tanh(logits / bound), in place."""
    logits.div_(bound).tanh_().mul_(bound)


def is_needed(model: ModelConfig, speculative: bool) -> bool:
    """Whether torch_native would fail with this model, or answer wrongly."""
    from sglang.srt.configs.model_config import AttentionArch

    return bool(
        speculative
        or model.attention_arch == AttentionArch.MLA
        or model.is_hybrid_swa
        or model.has_attention_sinks
        or getattr(model.hf_text_config, "attn_logit_softcapping", None)
    )


def _adjust_to_model(server_args: ServerArgs, previous: Step) -> None:
    """Around the step in which some models refuse every attention backend that they do not list."""
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    state_layers.announce(model_config_of(server_args))
    settings = resolving_view(server_args)
    gpu_only = not set(model_config_of(server_args).hf_config.architectures or ()).isdisjoint(_GPU_ONLY)
    if _asked(server_args) in (None, NAME):
        declare_resolution(server_args, NAME, attention_backend="triton" if gpu_only else _STAND_IN)
        previous(server_args)
        if gpu_only:
            declare_resolution(server_args, NAME, attention_backend=NAME)
    else:
        previous(server_args)
    # SGLang's choice for gpt-oss wherever the package is installed; it needs a GPU.
    if server_args.moe_runner_backend == "auto" and settings.moe_runner_backend == "triton_kernel":
        declare_resolution(server_args, NAME, moe_runner_backend="triton")


def _choose(server_args: ServerArgs, previous: Step) -> None:
    """Runs after the step that settles the attention backend."""
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    previous(server_args)
    settings, asked = resolving_view(server_args), _asked(server_args)
    is_default = asked is None and settings.attention_backend == "torch_native"
    speculative = settings.speculative_algorithm is not None
    if asked == NAME or (is_default and is_needed(model_config_of(server_args), speculative)):
        declare_resolution(server_args, NAME, attention_backend=NAME)


def _allow_trees(server_args: ServerArgs, previous: Step) -> None:
    """Around the step in which SGLang refuses drafts that branch, in pages, for every backend that it does not list."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    is_ours = resolving_view(server_args).attention_backend == NAME
    if is_ours:
        declare_resolution(server_args, NAME, attention_backend="triton")
    previous(server_args)
    if is_ours:
        declare_resolution(server_args, NAME, attention_backend=NAME)


def _asked(server_args: ServerArgs) -> str | None:
    """The user's choice; either of the two if prefill and decode have their own."""
    return (
        server_args.attention_backend or server_args.prefill_attention_backend or server_args.decode_attention_backend
    )
