"""What README.md and the other documents name exists, and a test runs every example in them."""

import re
from collections import Counter

import pytest

from checkout import ROOT
from documents import DOCS, README, documents, fenced_blocks, headings, section, table, without_code
from sets import PARTS
from sglang_triattn import __version__
from sglang_triattn.patches.hooks.hook import SGLANG_VERSION

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OWN = "patches|sglang_triattn|kernels|tests|benchmarks|tools|docs"
# Except the output of commands.
PATH = re.compile(rf"(?<![\w/.-])(?<!--json )(?:{OWN})/[\w./-]*[\w/]")
MODULE = re.compile(r"(?<![\w/.])\w+\.py\b")
EXAMPLES = {
    ("README.md", "bash"): ["tests/server/test_readme_clients.py"],
    ("agents.md", "python"): ["tests/server/test_readme_clients.py"],
    ("clients.md", "python"): [*["tests/server/test_readme_clients.py"] * 3, "tests/server/test_grpc.py"],
    ("clients.md", "bash"): ["tests/server/test_readme_clients.py"],
    ("capacity.md", ""): ["tests/unit/cli/test_plan.py"],
    ("compatibility.md", ""): ["tests/unit/cli/test_check.py"],
    ("transformers.md", "python"): ["tests/unit/transformers_cache/test_transformers_cache.py"],
}
"""By document and language: the test that runs each fenced block, or compares it with what it shows."""

each_document = pytest.mark.parametrize("file", documents(), ids=lambda file: str(file.relative_to(ROOT)))


def anchors(text: str) -> set[str]:
    """Fragments that GitHub generates for the headings."""
    return {re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-") for _, _, words in headings(text)}


@each_document
def test_links(file):
    """Prevents links to files and headings that were moved or renamed."""
    for target in LINK.findall(file.read_text()):
        if target.startswith("https://"):
            continue
        path, _, fragment = target.partition("#")
        found = (file.parent / path).resolve() if path else file
        assert found.is_relative_to(ROOT), target
        assert found.exists(), target
        assert not fragment or fragment in anchors(found.read_text()), target


@each_document
def test_named_files(file):
    """Prevents names of files, and of functions in them, that no longer exist."""
    text = file.read_text()
    for path in PATH.findall(LINK.sub("", text)):
        assert (ROOT / path).exists(), path
    modules = {path.name for folder in OWN.split("|") for path in (ROOT / folder).rglob("*.py")} | {"__init__.py"}
    assert set(MODULE.findall(text)) <= modules
    for name, path in re.findall(rf"`([\w.]+)` in\s+`((?:{OWN})/[\w/]+\.py)`", text):
        owner, _, own = name.rpartition(".")
        source = (ROOT / path).read_text()
        assert re.search(rf"\b(?:def|class) {own}\b", source), f"{path} has no {own}"
        assert not owner or f"class {owner}" in source, f"{path} has no {owner}"


@each_document
def test_make_targets(file):
    """Prevents commands that the Makefile does not have."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^    |\$\()make (?:-s )?([a-z-]+)", file.read_text(), re.MULTILINE)) <= targets


def test_every_make_target_is_explained():
    """Prevents a target without an explanation."""
    rows = table(ROOT / "CONTRIBUTING.md", "Set up and test", "command")
    listed = {row[0].strip("`").split()[-1] for row in rows}
    assert listed == set(re.findall(r"^([a-z-]+): .*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_ci_runs_the_commands_of_the_readme():
    """Prevents first commands that no test runs."""
    listed = re.findall(r"^    (make \w+)", section(README, "Try it without a GPU"), re.MULTILINE)
    ran = re.findall(r"^make .*", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert listed == ["make demo", "make test"]
    assert ran == [*listed, f"make test-wide PART=$((16#$first_digits % {PARTS}))"]


def test_every_example_is_tested():
    """Prevents an example that users copy but no test has ever run."""
    found = Counter((file.name, kind) for file in documents() for kind, _ in fenced_blocks(file.read_text()))
    assert found == {key: len(tests) for key, tests in EXAMPLES.items()}
    for (name, _), tests in EXAMPLES.items():
        for test in tests:
            source = (ROOT / test).read_text()
            assert "README," in source if name == "README.md" else f'"{name}"' in source, (name, test)


@each_document
def test_form(file):
    """Prevents overlong lines, technical terms that are not introduced, and paths from somebody's machine."""
    text = file.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= 120 or line.startswith("|"), f"line {number}"
        assert not re.search(r"(?<![\w.~])/(?:work|home|root|tmp|usr)/", line), f"line {number}"
    first = re.search(r"([\w*]+)[\s]+\brounds?\b", without_code(text))
    assert first is None or first[1].lower().strip("*") == "compaction", first[0]


def test_the_readme_is_short():
    """Prevents the README from growing back."""
    assert len(without_code(README.read_text()).split()) <= 1100


@pytest.mark.parametrize("file", [README, DOCS / "compatibility.md", ROOT / "CHANGELOG.md"], ids=lambda file: file.name)
def test_versions(file):
    """Prevents documents for another version than the code's."""
    text = file.read_text()
    assert set(re.findall(r"(?:SGLang |sglang==)(\d+\.\d+\.\d+)", text)) == {SGLANG_VERSION}
    pins = [(ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")]
    assert all(re.findall(r"\bsglang==([\d.]+)", pin) == [SGLANG_VERSION] for pin in pins)
    assert __version__ in text or file.name == "compatibility.md"
