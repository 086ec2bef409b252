"""Hooks apply or stop the launch: SGLang itself would only log."""

import sys
import types

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

import hook_table
from sglang_triattn import variable
from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches import plugin
from sglang_triattn.patches.hooks import registry
from sglang_triattn.patches.hooks.hook import Hook, check_target, check_version
from sglang_triattn.patches.launch import handshake
from sglang_triattn.patches.launch import server_args as args_patch
from sglang_triattn.patches.launch.census_switch import VARIABLE
from sglang_triattn.rounds.rules import complete


@pytest.fixture
def target(monkeypatch):
    """A new module to hook, and a registry that forgets afterwards."""
    module = types.ModuleType("hook_target")
    module.double = lambda value: 2 * value
    monkeypatch.setitem(sys.modules, "hook_target", module)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return module


WHY = "adds one"


def add_one(result, value):
    return result + 1


def test_install_applies(target):
    """Prevents a hook that is registered but never runs."""
    hook = Hook("hook_target.double", "after", add_one, "value", WHY)
    registry.install([hook])
    assert target.double(3) == 7
    registry.install([hook])
    assert target.double(3) == 7


@pytest.mark.parametrize("known_before", [True, False])
def test_importers_call_the_hook_too(target, monkeypatch, known_before):
    """Prevents a hook that runs only for callers who look the function up in its own module."""
    importer = types.ModuleType("hook_importer")
    importer.twice, importer.other = target.double, target.double(1)
    target.triple = lambda value: 3 * value
    importer.triple = target.triple
    if known_before:
        monkeypatch.setitem(sys.modules, "hook_importer", importer)
    registry.install([Hook("hook_target.double", "after", add_one, "value", WHY)])
    monkeypatch.setitem(sys.modules, "hook_importer", importer)
    assert importer.twice(3) == (7 if known_before else 6)
    assert importer.other == 2
    registry.install([Hook("hook_target.triple", "after", add_one, "value", WHY)])
    assert importer.triple(3) == 10


def test_importers_of_a_target_found_late_are_found(target, monkeypatch):
    """Prevents a hook of another plugin, which this package knows nothing of, from missing importers."""
    registry.install([Hook("hook_target.double", "after", add_one, "value", WHY)])
    target.triple = lambda value: 3 * value
    monkeypatch.setattr(sys.modules[__name__], "imported", target.triple, raising=False)
    HookRegistry.register("hook_target.triple", lambda result, value: result + 1)
    HookRegistry.apply_hooks()
    assert sys.modules[__name__].imported(3) == 10


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (Hook("hook_target.triple", "after", add_one, "value", WHY), "no usable hook_target.triple"),
        (Hook("hook_target.double", "after", add_one, "value other", WHY), "takes (value)"),
    ],
)
def test_changed_targets_are_refused(target, hook, words):
    """Prevents hooking a function that is not the one the hook was written for."""
    with pytest.raises(TriAttentionError) as caught:
        registry.install([hook])
    assert words in str(caught.value)


def test_a_hook_that_cannot_be_applied_is_noticed(target, monkeypatch):
    """Prevents running dense after the registry logged a failure."""
    monkeypatch.setattr(HookRegistry, "_apply_target", classmethod(lambda *_: 1 / 0))
    with pytest.raises(TriAttentionError, match="did not apply"):
        registry.install([Hook("hook_target.double", "after", add_one, "value", WHY)])


def test_a_target_taken_by_another_plugin_is_noticed(target):
    """Prevents a hook that the registry skips because it has already patched the target."""
    HookRegistry.register("hook_target.double", lambda result, value: None)
    HookRegistry.apply_hooks()
    with pytest.raises(TriAttentionError, match="Another plugin"):
        registry.install([Hook("hook_target.double", "after", add_one, "value", WHY)])


def test_other_versions_are_refused(monkeypatch):
    """Prevents running on an untested SGLang."""
    import sglang

    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    with pytest.raises(TriAttentionError, match=r"0\.5\.24 is installed"):
        check_version()


def test_every_hook_fits_the_installed_sglang(monkeypatch):
    """Prevents a release whose hooks fail only when a server starts."""
    monkeypatch.delenv(VARIABLE, raising=False)
    every = [hook for hooks_of_one in hook_table.all_hooks().values() for hook in hooks_of_one]
    for hook in every:
        check_target(hook)
    assert len({hook.target for hook in every}) >= 29


def test_nothing_is_hooked_without_the_flag(target, monkeypatch):
    """Prevents the installed package from changing servers that did not ask for it."""

    def run_scheduler_process(server_args):
        plugin.activate()
        return set(HookRegistry._hooks)

    def run_detokenizer_process(server_args):
        plugin.activate()
        return set(HookRegistry._hooks)

    plain = types.SimpleNamespace()
    asked = types.SimpleNamespace(_triattention=complete(Config("s")))
    assert run_scheduler_process(plain) == set()
    assert run_detokenizer_process(asked) == set()
    assert "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run" in run_scheduler_process(asked)


def test_main_hooks_only_the_command_line(target):
    """Prevents the same in the main process, where only settings are defined and read."""
    plugin.activate()
    names = {name.rsplit(".", 1)[1] for name in HookRegistry._hooks}
    assert names == {"add_cli_args", "from_cli_args", "check_server_args"}


def test_a_command_line_that_asks_gets_the_reason(target, monkeypatch, capsys):
    """Prevents 'unrecognized arguments' as the answer from an SGLang of another version."""
    import sglang

    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    monkeypatch.setattr(sys, "argv", ["launch_server", "--enable-triattention"])
    with pytest.raises(SystemExit) as ended:
        plugin.activate()
    assert ended.value.code == 2
    assert "0.5.24 is installed" in capsys.readouterr().err


@pytest.mark.parametrize("broken", ["version", "module"])
def test_an_environment_that_asks_ends_a_launch_without_hooks(target, monkeypatch, capsys, broken):
    """Prevents a dense launch where SGLang only logs that the plugin failed, and no flag is missed."""
    monkeypatch.setenv(variable.VARIABLE, "--enable-triattention")
    if broken == "version":
        monkeypatch.setattr("sglang.__version__", "0.5.24")
    else:
        monkeypatch.setattr(registry, "register", lambda _: 1 / 0)
    with pytest.raises(SystemExit) as ended:
        plugin.activate()
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("sglang-triattn: error: ")
    assert ("0.5.24 is installed" if broken == "version" else "ZeroDivisionError: division by zero") in line


def test_keywords_of_an_engine_may_stand_in_the_environment(monkeypatch):
    """Prevents a dense Engine whose program has no keyword, and two sources of settings for one Engine."""
    enabled = []
    build = args_patch.engine_arguments(types.SimpleNamespace, enabled.append, watch=enabled.append)
    assert args_patch.config_of(build(model_path="m")) is None
    monkeypatch.setenv(variable.VARIABLE, "--enable-triattention --triattention-budget 99")
    record = build(model_path="m")
    assert args_patch.config_of(record) == Config(budget=99)
    assert enabled == [record]
    with pytest.raises(TriAttentionError, match="only one of the two places"):
        build(model_path="m", enable_triattention=True)


def test_a_scheduler_that_the_environment_passed_by_ends(target, monkeypatch, capsys):
    """Prevents a dense scheduler of a launch that no hook saw, and that waits for no handshake."""

    def run_scheduler_process(server_args):
        plugin.activate()

    run_scheduler_process(types.SimpleNamespace())
    monkeypatch.setenv(variable.VARIABLE, "--enable-triattention")
    run_scheduler_process(types.SimpleNamespace(_triattention=complete(Config("s"))))
    with pytest.raises(SystemExit) as ended:
        run_scheduler_process(types.SimpleNamespace())
    assert ended.value.code == 2
    assert f"{variable.VARIABLE} is set, but this launch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("infos", "words"),
    [
        ([{"status": "ready"}], "did not confirm"),
        ([{"triattention": handshake.answer(None)}, {"status": "ready"}], "did not confirm"),
        ([{"triattention": {"version": "0.0.0", "refusal": None}}], "did not confirm"),
        ([{"triattention": handshake.answer("the reason.")}], "the reason."),
    ],
)
def test_silent_or_refusing_schedulers_are_noticed(infos, words):
    """Prevents a launch in which one rank compresses and another does not."""
    handshake.check_answers([{"triattention": handshake.answer(None)}])
    with pytest.raises(TriAttentionError, match=words):
        handshake.check_answers(infos)
