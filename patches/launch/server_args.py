"""Where a launch gets its settings: flags, keywords of `sglang.Engine`, the environment.

SGLang part: `ServerArgs` (sglang/srt/server_args.py). SGLang lets no plugin declare a setting, and its settings record
takes only known fields. But it pickles underscore-prefixed attributes along to every child process, so the Config
travels in one of those.

A record that a program built itself knows neither flags nor keywords of this package, and may be resolved before SGLang
loads plugins. The environment (`sglang_triattn.variable`) is then read in `check_server_args`, which each launch calls
right after it has loaded them.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from sglang_triattn.config import SWITCH, Config, add_flags
from sglang_triattn.errors import TriAttentionError, first_line
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.launch.nodes import nodes_of, notify_others
from sglang_triattn.rounds.rules import RoundRules
from sglang_triattn.variable import VARIABLE, from_environment, read_launch, words

if TYPE_CHECKING:
    import argparse

    from sglang.srt.server_args import ServerArgs

_TARGET = "sglang.srt.server_args.ServerArgs"
_CONFIG = "_triattention"
_FROM_CLI = "_triattention_from_cli"
_CALIBRATION = "_triattention_calibration"


@dataclass(frozen=True)
class CalibrationRequest:
    """What the schedulers of `calibrate --engine sglang` are to do.

    Attributes:
        job_file: the job, pickled. It is too long for a pipe: this process would wait for the last child to import
            SGLang.
        out: statistics file to write (.safetensors), absolute.
    """

    job_file: str
    out: str


def config_of(server_args: ServerArgs) -> Config | None:
    """The Config that this settings record carries, or None if compression is off."""
    return getattr(server_args, _CONFIG, None)


def attach_rules(server_args: ServerArgs, rules: RoundRules) -> None:
    """Puts `rules` in the place of the Config that this settings record carries."""
    setattr(server_args, _CONFIG, rules)


def rules_of(server_args: ServerArgs) -> RoundRules | None:
    """The rules of rounds that this record carries, or None if compression is off.

    Raises:
        TriAttentionError: SGLang has not resolved the record.
    """
    config = config_of(server_args)
    if config is None or isinstance(config, RoundRules):
        return config
    raise TriAttentionError(
        "SGLang started a process before it resolved its settings, so compression does not know its model: start the "
        "server by `python -m sglang.launch_server`."
    )


def calibration_of(server_args: ServerArgs) -> CalibrationRequest | None:
    """The request to the schedulers of this record, or None if they serve."""
    return getattr(server_args, _CALIBRATION, None)


def ask_for_calibration(server_args: ServerArgs, request: CalibrationRequest) -> None:
    setattr(server_args, _CALIBRATION, request)


def refuse(server_args: ServerArgs, error: TriAttentionError, others_know: bool = False) -> NoReturn:
    """Ends the launch because of `error`: one line and exit status 2 on a command line, the exception in Python.

    Args:
        others_know: whether the other nodes of the launch, if any, end by themselves.
    """
    if not getattr(server_args, _FROM_CLI, False):
        if not others_know:
            _notify_other_nodes(server_args, error)
        raise error
    _exit(error, None if others_know else server_args)


def exit_if_asked_for(error: Exception) -> None:
    """Ends a launch that asks for compression, because of `error`, when SGLang would only log it and go on.

    A command line that has the switch would fail with flags that cannot be defined. A launch with the variable in its
    environment would run dense, so it ends in Python too, where SGLang catches every exception.
    """
    if not isinstance(error, TriAttentionError):
        error = TriAttentionError(
            f"sglang-triattn could not be loaded ({type(error).__name__}: {first_line(error)}): run `sglang-triattn "
            "doctor`."
        )
    if words() or any(word.split("=")[0] == SWITCH for word in sys.argv[1:]):
        _exit(error)


def exit_if_forgotten() -> None:
    """Ends a scheduler process whose environment asks for compression, but whose settings record does not carry it."""
    if words():
        _exit(
            TriAttentionError(
                f"{VARIABLE} is set, but this launch started a scheduler without reading it, which would run without "
                "compression: launch in one of the ways of docs/configuration.md, or unset the variable."
            )
        )


def hooks(
    enable: Callable[[ServerArgs], None],
    enable_late: Callable[[ServerArgs], None],
    watch: Callable[[ServerArgs], None],
) -> list[Hook]:
    """Hooks on the settings record.

    Args:
        enable: called with a record that enables compression, before SGLang resolves it.
        enable_late: the same for a record that is resolved.
        watch: called with the record of one of several nodes that does not compress.
    """

    def from_cli_args(original: Callable, cls: type, args: argparse.Namespace) -> ServerArgs:
        try:
            # A switch that is not on the command line is False.
            config = read_launch({name: value for name, value in vars(args).items() if value is not False})
            record = original(cls, args)
            if config is not None:
                setattr(record, _FROM_CLI, True)
                _attach(record, config, enable)
            elif nodes_of(record) is not None:
                setattr(record, _FROM_CLI, True)
                watch(record)
        except TriAttentionError as error:
            _exit(error, args)
        return record

    def read_environment(record: ServerArgs) -> None:
        if config_of(record) is not None or calibration_of(record) is not None:
            return
        if not words():
            if nodes_of(record) is not None:
                watch(record)
            return
        setattr(record, _FROM_CLI, _is_command())
        try:
            config = from_environment()
            if config is not None:
                _attach(record, config, enable_late)
        except TriAttentionError as error:
            refuse(record, error)

    return [
        Hook(f"{_TARGET}.add_cli_args", "after", _add_cli_args, "parser", why="defines the flags"),
        Hook(
            f"{_TARGET}.from_cli_args",
            "around",
            from_cli_args,
            "cls args",
            why="reads the flags; once compression is asked for, installs the rest",
        ),
        Hook(
            f"{_TARGET}.check_server_args",
            "before",
            read_environment,
            "self",
            why="reads `SGLANG_TRIATTENTION` where no flag or keyword could be read",
        ),
    ]


def _is_command() -> bool:
    """Whether no code of a user could catch an exception: `python -m sglang...`, or a process spawned for a server."""
    name = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "")
    return name.split(".")[0] == "sglang" or multiprocessing.parent_process() is not None


def engine_arguments(
    server_args_class: type, enable: Callable[[ServerArgs], None], watch: Callable[[ServerArgs], None]
) -> type:
    """A stand-in for `Engine.server_args_class` that also takes the `triattention` keywords; see `hooks` for the rest.

    It builds a record of the original class, because SGLang tests records with isinstance and pickles them by class.
    """

    class EngineArguments:
        def __new__(cls, **keywords: Any) -> ServerArgs:
            try:
                config = read_launch(keywords)
                plain = {name: value for name, value in keywords.items() if "triattention" not in name}
                record = server_args_class(**plain)
                if config is not None:
                    _attach(record, config, enable)
                elif nodes_of(record) is not None:
                    watch(record)
            except TriAttentionError as error:
                _notify_other_nodes(SimpleNamespace(**keywords), error)
                raise
            return record

    return EngineArguments


def _attach(record: ServerArgs, config: Config, enable: Callable[[ServerArgs], None]) -> None:
    setattr(record, _CONFIG, config)
    enable(record)


def _add_cli_args(_: object, parser: argparse.ArgumentParser) -> None:
    add_flags(parser)


def _notify_other_nodes(settings: Any, error: TriAttentionError) -> None:
    nodes = nodes_of(settings)
    if nodes is not None:
        notify_others(nodes, str(error))


def _exit(error: TriAttentionError, settings: Any = None) -> NoReturn:
    """Prints the error and exits; first notifies the other nodes of a launch with these settings, if given."""
    print(f"sglang-triattn: error: {error}", file=sys.stderr, flush=True)
    if settings is not None:
        _notify_other_nodes(settings, error)
    raise SystemExit(2)
