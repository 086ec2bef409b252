"""Command-line flags and keywords of `sglang.Engine`. SGLang part: sglang/srt/server_args.py.

SGLang lets no plugin declare a setting, and its settings record takes only known fields. But it pickles
underscore-prefixed attributes along to every child process, so the Config travels in one of those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from sglang_triattn.config import SWITCH, Config, add_flags, read_settings
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.hooks import Hook

if TYPE_CHECKING:
    import argparse

    from sglang.srt.server_args import ServerArgs

    from sglang_triattn.patches.calibration.engine import Request

_CONFIG = "_triattention"
_FROM_CLI = "_triattention_from_cli"
_CALIBRATION = "_triattention_calibration"


def config_of(server_args: ServerArgs) -> Config | None:
    """The Config that this settings record carries, or None if compression is off."""
    return getattr(server_args, _CONFIG, None)


def replace_config(server_args: ServerArgs, config: Config) -> None:
    """Puts `config` in the place of the Config that this settings record carries."""
    setattr(server_args, _CONFIG, config)


def calibration_of(server_args: ServerArgs) -> Request | None:
    """The request of `calibration.engine` to the schedulers of this record, or None if they serve."""
    return getattr(server_args, _CALIBRATION, None)


def ask_for_calibration(server_args: ServerArgs, request: Request) -> None:
    setattr(server_args, _CALIBRATION, request)


def refuse(server_args: ServerArgs, error: TriAttentionError) -> None:
    """Ends the launch because of `error`: one line and exit status 2 on a command line, the exception in Python."""
    if not getattr(server_args, _FROM_CLI, False):
        raise error
    _exit(error)


def exit_if_asked_for(error: TriAttentionError) -> None:
    """Ends a command line that enables compression, because of `error`, when its flags cannot even be defined."""
    if any(word.split("=")[0] == SWITCH for word in sys.argv[1:]):
        _exit(error)


def hooks(enable: Callable[[ServerArgs], None]) -> list[Hook]:
    """Hooks on the command line; `enable(server_args)` is called once compression is enabled."""

    def from_cli_args(original: Callable, cls: type, args: argparse.Namespace) -> ServerArgs:
        try:
            config = read_settings(vars(args))
            record = original(cls, args)
            if config is not None:
                setattr(record, _FROM_CLI, True)
                _attach(record, config, enable)
        except TriAttentionError as error:
            _exit(error)
        return record

    target = "sglang.srt.server_args.ServerArgs"
    return [
        Hook(f"{target}.add_cli_args", "after", _add_cli_args, "parser"),
        Hook(f"{target}.from_cli_args", "around", from_cli_args, "cls args"),
    ]


def engine_arguments(server_args_class: type, enable: Callable[[ServerArgs], None]) -> type:
    """A stand-in for `Engine.server_args_class` that also takes the `triattention` keywords.

    It builds a record of the original class, because SGLang tests records with isinstance and pickles them by class.
    """

    class EngineArguments:
        def __new__(cls, **keywords: Any) -> ServerArgs:
            config = read_settings(keywords)
            plain = {name: value for name, value in keywords.items() if "triattention" not in name}
            record = server_args_class(**plain)
            if config is not None:
                _attach(record, config, enable)
            return record

    return EngineArguments


def _attach(record: ServerArgs, config: Config, enable: Callable[[ServerArgs], None]) -> None:
    setattr(record, _CONFIG, config)
    enable(record)


def _add_cli_args(_: object, parser: argparse.ArgumentParser) -> None:
    add_flags(parser)


def _exit(error: TriAttentionError) -> NoReturn:
    print(f"sglang-triattn: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)
