"""`sglang-triattn doctor`: what it says about this installation, and about broken ones."""

import ast
import json
import re
import subprocess
import sys
import textwrap
import tomllib

import pytest

from checkout import ROOT
from plan_cases import CONFIGS
from sample_stats import stats
from sglang_triattn.cli import doctor
from sglang_triattn.cli import main as cli
from sglang_triattn.doctor import machine, packages, statistics
from sglang_triattn.doctor.rows import Row
from sglang_triattn.model.fingerprint import model_fingerprint
from sglang_triattn.patches.doctor import upstream_check
from sglang_triattn.patches.launch.census_switch import VARIABLE
from sglang_triattn.stats.cache import cached_path
from sglang_triattn.stats.file import save_stats

QWEN3 = CONFIGS / "qwen3-32b.json"
PLUGINS = "sglang.srt.plugins"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An environment of its own; returns the folder of kept statistics, which does not exist yet."""
    for variable in (VARIABLE, "SGLANG_PLUGINS", "SGLANG_PLATFORM"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sglang-triattn" / "statistics"


@pytest.fixture
def no_compiler(monkeypatch):
    """Leaves out the part that takes long."""
    monkeypatch.setattr(machine, "kernel_rows", list)


def answer(capsys, *options: str) -> tuple[int, dict]:
    status = cli.main(["doctor", "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def test_all_is_well_here(capsys):
    """Prevents a release that does not fit the SGLang it is for, and an answer that finds fault with nothing wrong."""
    status, found = answer(capsys, "--model", str(QWEN3))
    assert [row for row in found["rows"] if row["status"] not in ("ok", "note")] == []
    assert (status, found["ok"]) == (0, True)
    names = [row["name"] for row in found["rows"]]
    hooks = [hook.target for hooks in upstream_check.all_hooks().values() for hook in hooks]
    assert len(hooks) > 30
    assert {target.removeprefix("sglang.srt.") for target in hooks} <= set(names)
    others = {"python", *packages.TESTED, "installed", "folder", "check", "statistics", "patches/hooks/hook.py"}
    assert others <= set(names)
    assert any(name.startswith("kernels for sm_") for name in names)


def test_other_functions_of_sglang_are_named(monkeypatch, capsys, no_compiler):
    """Prevents an upgrade of SGLang that breaks something without a word about what."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache import common

    monkeypatch.setattr(Scheduler, "flush_cache", lambda self, new_name: None)
    monkeypatch.delattr(common, "checkpoint_kv_cache")
    monkeypatch.delattr(choices, "add_attention_backend_choices")
    status, found = answer(capsys)
    assert (status, found["ok"]) == (1, False)
    changed, missing, lacking = (row for row in found["rows"] if "consequence" in row)
    assert (changed["name"], changed["status"]) == ("managers.scheduler.Scheduler.flush_cache", "changed")
    assert changed["found"] == "takes (self, new_name), not (self, empty_cache)"
    refused = "every launch with --enable-triattention is refused; the hook "
    assert changed["consequence"] == refused + "forgets conversations whose memory was flushed"
    assert (missing["name"], missing["status"]) == ("mem_cache.common.checkpoint_kv_cache", "missing")
    assert missing["consequence"] == refused + "keeps the answer of a retracted request out of the tree"
    assert (lacking["name"], lacking["status"]) == ("patches/cpu/backend_choice.py", "missing")
    assert "choices.add_attention_backend_choices (AttributeError" in lacking["found"]
    assert cli.main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert output.count("→ every launch with --enable-triattention is refused") == 2
    assert "3 faults, " in output.splitlines()[-1]


def test_what_is_right_is_left_out(monkeypatch, capsys):
    """Prevents a fault that is lost among hundreds of rows that are right."""
    rows = [Row("python", "ok", "3.11"), Row("torch", "note", "2.99; the tests ran with 2.14")]
    monkeypatch.setattr(doctor, "_parts", lambda model: [("Versions", lambda: rows), ("GPUs", lambda: rows[:1])])
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "torch" in shown
    assert "python" not in shown
    assert "GPUs" not in shown
    assert shown.endswith("3 rows: no faults, 1 note; --all prints every row\n")
    assert cli.main(["doctor", "--all"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("python") == 2
    assert shown.endswith("3 rows: no faults, 1 note\n")
    assert len(answer(capsys)[1]["rows"]) == 3


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("sglang", "smg_grpc_servicer"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Absent())
from sglang_triattn.doctor import machine
machine.kernel_rows = list
from sglang_triattn.cli.main import main
sys.exit(main(["doctor", "--json"]))
"""


def test_without_sglang():
    """Prevents a traceback where SGLang, and with it the gRPC server that it requires, is not installed."""
    done = subprocess.run([sys.executable, "-P", "-c", ABSENT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    rows = json.loads(done.stdout)["rows"]
    hooked = [row for row in rows if row["part"] == "SGLang's functions that are hooked"]
    assert {row["status"] for row in hooked} == {"missing"}
    assert len(hooked) > 30
    assert all(re.search("No module named '(sglang|smg_grpc_servicer)", row["found"]) for row in hooked)
    assert packages._version_row("no-such-package", "1").status == "missing"


def test_what_is_read_from_source():
    """Prevents names that only the type checker needs from being faults, and replaced attributes from being missed."""
    tree = ast.parse(
        textwrap.dedent("""
        if TYPE_CHECKING:
            from sglang.srt.a import Unused
        def f():
            import sglang
            from sglang.srt import b as c
            c.replaced = sglang.version.number
            other.thing = 1
        """)
    )
    assert upstream_check.names_used(tree) == {"sglang", "sglang.version", "sglang.srt.b", "sglang.srt.b.replaced"}


def test_other_versions(monkeypatch):
    """Prevents a version that SGLang does not work with from going unnoticed, and one that it allows from being one."""
    versions = {"torch": "2.11.0", "triton": "3.6.0", "sglang": "0.5.22", "transformers": "5.19.0+local"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: versions.get(name, packages.TESTED.get(name)))
    rows = {row.name: row for row in packages.version_rows()}
    assert {name: rows[name].status for name in rows} == {
        "python": rows["python"].status, "sglang": "wrong", "torch": "wrong", "triton": "note",
        "flashinfer-python": "ok", "transformers": "ok",
    }  # fmt: skip
    assert "--enable-triattention is refused: sglang-triattn asks for sglang==0.5.23" in rows["sglang"].consequence
    assert "sglang asks for torch==" in rows["torch"].consequence
    assert rows["triton"].found == f"3.6.0; the tests ran with {packages.TESTED['triton']}"


def test_what_was_tested_is_what_is_pinned():
    """Prevents an answer about the versions of an earlier release, or about other entry points than the package's."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {name: pins[name] for name in packages.TESTED} == packages.TESTED
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, packages.LEAST_PYTHON))
    assert {group: dict([entry]) for group, entry in packages.ENTRY_POINTS.items()} == project["entry-points"]


def install(folder, name: str, version: str, entry: str) -> str:
    """Metadata of a package with one plugin; returns the folder that holds it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{PLUGINS}]\n{entry}\n")
    return str(folder)


def test_copies_that_hide_each_other(tmp_path, monkeypatch):
    """Prevents an old copy on the path whose plugins SGLang loads instead of ours, without a word."""
    old = install(tmp_path / "old", "sglang-triattn", "0.0.9", "triattention = sglang_triattn.old:activate")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, old])
        installed, plugin, _ = packages.loading_rows()
        assert (installed.status, plugin.status) == ("wrong", "ok")
        assert f"uninstall {old}" in installed.consequence
        patch.setattr(sys, "path", [old, *sys.path])
        installed, plugin, platform = packages.loading_rows()
        assert "stale metadata" in installed.consequence
        assert (plugin.status, plugin.found) == ("wrong", "sglang_triattn.old:activate of sglang-triattn")
        assert (platform.status, platform.found) == ("missing", "no installed package has it")
    fork = install(tmp_path / "fork", "a-fork", "1", f"triattention = {packages.ENTRY_POINTS[PLUGINS][1]}")
    monkeypatch.setattr(sys, "path", [*sys.path, fork])
    installed, plugin, _ = packages.loading_rows()
    assert (installed.status, plugin.status) == ("ok", "wrong")
    assert "of a-fork" in plugin.found


@pytest.mark.parametrize(
    ("variable", "value", "faults"),
    [
        ("SGLANG_PLUGINS", "triattention, triattention_cpu", 0),
        ("SGLANG_PLUGINS", "triattention", 1),
        ("SGLANG_PLUGINS", "another", 2),
        ("SGLANG_PLATFORM", "triattention_cpu", 0),
        ("SGLANG_PLATFORM", "another", 1),
    ],
)
def test_variables_that_leave_plugins_out(monkeypatch, variable, value, faults):
    """Prevents a search for the reason why SGLang does not know the flags."""
    monkeypatch.setenv(variable, value)
    assert [row.name for row in packages.loading_rows() if row.is_fault] == [variable] * faults


def test_a_compiler_that_fails(monkeypatch):
    """Prevents a doctor that hangs with the compiler, and one that hides its output."""
    with monkeypatch.context() as patch:
        patch.setattr(machine, "COMPILE_SECONDS", 0.001)
        (row,) = machine.kernel_rows()
    assert (row.status, row.found) == ("wrong", "not compiled within 0.001 s")
    monkeypatch.setattr(machine, "_TRIAL", "sglang_triattn.no_compiler")
    (row,) = machine.kernel_rows()
    assert row.is_fault
    assert "No module named sglang_triattn.no_compiler" in row.found


def test_gpus(monkeypatch):
    """Prevents a GPU for which no kernel was ever compiled from passing as one of those that were."""
    monkeypatch.setattr(machine, "_gpus", lambda: [("A", 90), ("B", 75)])
    assert [(row.name, row.status) for row in machine.gpu_rows()] == [("GPU 0", "ok"), ("GPU 1", "note")]


def test_the_folder_of_kept_statistics(home, monkeypatch):
    """Prevents a model that is measured again at every launch without anybody knowing why."""
    (row,) = statistics.cache_rows()
    assert (row.status, home.exists()) == ("note", False)
    save_stats_in(home)
    (row,) = statistics.cache_rows()
    size = next(home.iterdir()).stat().st_size
    assert (row.status, row.found) == ("ok", f"{home}: 1 file, {size:,} bytes")

    def read_only(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    (row,) = statistics.cache_rows()
    assert (row.status, row.found) == ("wrong", f"{home} cannot be written (Read-only file system)")
    assert "measures again" in row.consequence


def test_a_file_where_the_folder_should_be(home):
    """Prevents the same for a folder that cannot be made."""
    home.parent.parent.write_text("")
    (row,) = statistics.cache_rows()
    assert row.is_fault


def save_stats_in(folder, fingerprint: str = "f" * 32) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_stats(stats(fingerprint=fingerprint), folder / f"{fingerprint}.safetensors")


def test_one_model(home, tmp_path):
    """Prevents an answer about the statistics of another model."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(QWEN3.read_text())
    check, kept = statistics.model_rows(str(model))
    assert (check.status, kept.status) == ("ok", "note")
    assert "64 full" in check.found
    save_stats_in(home, model_fingerprint(str(model)))
    _, kept = statistics.model_rows(str(model))
    assert kept.status == "ok"
    assert "4,096 tokens; fair (mean concentration 0.67)" in kept.found
    weighed = cached_path(model_fingerprint(str(model)), "look-ups")
    weighed.write_text("damaged")
    _, kept, other = statistics.model_rows(str(model))
    assert (kept.status, other.status, str(weighed) in other.found) == ("ok", "wrong", True)
    weighed.unlink()
    cached_path(model_fingerprint(str(model))).write_text("damaged")
    _, kept = statistics.model_rows(str(model / "config.json"))
    assert kept.status == "wrong"
    check, _ = statistics.model_rows(str(CONFIGS / "deepseek-v3.2.json"))
    assert check.is_fault


def test_mistakes_get_one_sentence(capsys):
    """Prevents a traceback for a model that does not exist."""
    assert cli.main(["doctor", "--model", "no/such/model"]) == 2
    assert capsys.readouterr().err.startswith("sglang-triattn: --model no/such/model cannot be read")
