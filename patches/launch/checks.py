"""Checks before a launch starts any process. SGLang part: sglang/srt/arg_groups/resolution_hooks.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_triattn.config import AUTO, Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.latents import for_latents
from sglang_triattn.launch_settings import CHAIN, check_draft_numbers
from sglang_triattn.model.fingerprint import local_folder
from sglang_triattn.model.vision import covers_images
from sglang_triattn.patches.launch import server_args as args_patch
from sglang_triattn.patches.launch.census_switch import is_wanted
from sglang_triattn.patches.launch.incompatible import (
    check_decode_server,
    check_latents,
    check_measuring,
    check_model,
    check_settings,
    check_speculation,
    check_stages,
    check_states,
    check_window_pool,
    has_latents,
    window_of,
)
from sglang_triattn.patches.launch.model_config import check_model_file, read_config
from sglang_triattn.patches.launch.preferred import check_preferred
from sglang_triattn.patches.launch.workers import hook_workers
from sglang_triattn.rounds.plan import check_reach, in_whole_pages
from sglang_triattn.stats.early import check_against_config
from sglang_triattn.stats.file import load_stats

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

# A late step, so the settings that it sees are final; and the one that completes the numbers of drafts.
_STEP, _DRAFTS = "handle_other_validations", "handle_speculative_decoding"

_registered = False


def check_files(server_args: ServerArgs) -> None:
    """Raises TriAttentionError if the statistics file, the model's config.json or what is preferred rules it out.

    This is the first check: SGLang has neither read the model's configuration nor imported its server yet.
    """
    config = args_patch.config_of(server_args)
    stats = load_stats(config.stats) if config is not None and config.stats != AUTO else None
    # SGLang assembles the fields of the record at run time.
    settings: Any = server_args
    if config is not None:
        check_preferred(settings, config)
    check_model_file(server_args)
    content = read_config(settings)
    if stats is not None and content is not None:
        check_against_config(stats, content, local_folder(settings.model_path, settings.revision))


def check_at_resolution() -> None:
    """Makes SGLang check every settings record that carries a Config, before it starts a process."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    global _registered
    if not _registered:
        register_resolution_hook(_STEP)(_check)
        register_resolution_hook(_DRAFTS)(_check_drafts)
        _registered = True


def _check_drafts(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Refuses in one sentence numbers for which SGLang only has an assertion."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    if args_patch.config_of(server_args) is not None:
        settings = resolving_view(server_args)
        try:
            check_draft_numbers(settings.speculative_algorithm, {field: getattr(settings, field) for field in CHAIN})
        except TriAttentionError as error:
            args_patch.refuse(server_args, error)
    previous(server_args)


def _check(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    previous(server_args)
    try:
        check_resolved(server_args)
    except TriAttentionError as error:
        args_patch.refuse(server_args, error)


def check_resolved(server_args: ServerArgs) -> None:
    """Completes the Config of a record from its resolved settings; does nothing if it carries none.

    Raises:
        TriAttentionError: a setting, or the model, does not work with compression.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view

    config = args_patch.config_of(server_args)
    if config is None:
        return
    is_wanted()
    settings = resolving_view(server_args)
    check_settings(settings)
    hook_workers(settings.tokenizer_worker_num)
    check_model_file(settings)
    config = rules_for(settings, model_config_of(server_args), config)
    check_preferred(settings, config)
    args_patch.replace_config(server_args, config)


def rules_for(settings: Any, model: ModelConfig, config: Config) -> Config:
    """The settings of rounds for a model, completed by what follows from it and from the server's settings.

    Raises:
        TriAttentionError: the model, or a setting with such a model, does not work with compression.
    """
    check_model(model)
    check_window_pool(settings, model)
    check_latents(settings, model)
    check_states(settings, model)
    check_speculation(settings, model)
    check_stages(settings, model)
    check_decode_server(settings, model)
    check_measuring(settings, config)
    if has_latents(model):
        config = for_latents(config)
    window = window_of(model)
    if window:
        config = config.for_windows(window, settings.page_size)
    if settings.speculative_algorithm is not None and not settings.disable_overlap_schedule:
        config = in_whole_pages(config, settings.page_size)
    check_reach(config, model.context_len, "the context limit is")
    return dataclasses.replace(config, images=covers_images(model.hf_config.architectures))
