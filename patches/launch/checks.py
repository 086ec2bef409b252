"""Checks before a launch starts any process. SGLang part: sglang/srt/arg_groups/resolution_hooks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_triattn.compatibility.draft_rules import CHAIN, check_draft_numbers
from sglang_triattn.compatibility.resolve import resolve
from sglang_triattn.compatibility.rules import ENVIRONMENT, SETTING_FIELDS
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.fingerprint import local_folder
from sglang_triattn.patches.launch import server_args as args_patch
from sglang_triattn.patches.launch.census_switch import is_wanted
from sglang_triattn.patches.launch.model_config import check_model_file, read_config
from sglang_triattn.patches.launch.preferred import check_preferred
from sglang_triattn.patches.launch.traits import traits_of
from sglang_triattn.patches.launch.workers import hook_workers
from sglang_triattn.rounds.rules import complete
from sglang_triattn.stats.early import check_against_config
from sglang_triattn.stats.file import load_stats

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# A late step, so the settings that it sees are final; and the one that completes the numbers of drafts.
_STEP, _DRAFTS = "handle_other_validations", "handle_speculative_decoding"

_registered = False


def check_files(server_args: ServerArgs) -> None:
    """Raises TriAttentionError if the statistics file, the model's config.json or what is preferred rules it out.

    This is the first check: SGLang has neither read the model's configuration nor imported its server yet.
    """
    config = args_patch.config_of(server_args)
    stats = load_stats(config.stats) if config is not None and not config.measures else None
    # SGLang assembles the fields of the record at run time.
    settings: Any = server_args
    if config is not None:
        check_preferred(settings, complete(config))
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
    _check_environment()
    values = values_of(settings)
    hook_workers(settings.tokenizer_worker_num)
    check_model_file(settings)
    weighed = config.fits_lookups if config.measures else load_stats(config.stats).lookups is not None
    rules = resolve(config, values, traits_of(model_config_of(server_args)), weighed=weighed)
    check_preferred(settings, rules)
    args_patch.attach_rules(server_args, rules)


def values_of(settings: Any) -> dict[str, Any]:
    """The resolved settings that matter, by field.

    Raises:
        TriAttentionError: this SGLang has no such setting.
    """
    missing = sorted(field for field in SETTING_FIELDS if not hasattr(settings, field))
    if missing:
        raise TriAttentionError(
            f"This SGLang has no setting {missing[0]}, which sglang-triattn must check: reinstall the SGLang version "
            "that it requires."
        )
    return {field: getattr(settings, field) for field in SETTING_FIELDS}


def _check_environment() -> None:
    """Raises TriAttentionError for an environment variable that compression cannot work with."""
    from sglang.srt.environ import envs

    for name, reason in ENVIRONMENT.items():
        if getattr(envs, name).get():
            raise TriAttentionError(
                f"The environment variable {name} does not work with --enable-triattention, because {reason}: unset it."
            )
