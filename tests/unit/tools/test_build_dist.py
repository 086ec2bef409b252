"""What `make dist` refuses; that it accepts this package is shown in tests/server/test_wheel.py."""

import io
import re
import tarfile
import zipfile

import pytest

import build_dist
from checkout import ROOT
from sglang_triattn import __version__

INFO, TOP = "sglang_triattn-1.0.dist-info", "sglang_triattn-1.0"
ABOUT = b"Metadata-Version: 2.4\nName: sglang-triattn\nVersion: 1.0\nRequires-Dist: torch\n\nWords.\n"
SOURCE = {
    "pyproject.toml": b'[project]\nname = "sglang-triattn"\ndependencies = ["torch"]\n',
    "README.md": b"Words.\n",
    "LICENSE": b"Do as you like.\n",
    "sglang_triattn/__init__.py": b'__version__ = "1.0"\n',
    "sglang_triattn/py.typed": b"",
    "kernels/one.py": b"",
}
WHEEL = {
    "sglang_triattn/__init__.py": SOURCE["sglang_triattn/__init__.py"],
    "sglang_triattn/py.typed": b"",
    "sglang_triattn/kernels/one.py": b"",
    f"{INFO}/METADATA": ABOUT,
    f"{INFO}/licenses/LICENSE": SOURCE["LICENSE"],
}
SDIST = {f"{TOP}/PKG-INFO": ABOUT}


@pytest.fixture
def judge(tmp_path):
    """Checks a wheel and an sdist with this content against a small checkout."""
    for name, content in SOURCE.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "source" / "sglang_triattn" / "kernels").symlink_to("../kernels")

    def check(wheel=WHEEL, sdist=SDIST):
        with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
            for name, content in wheel.items():
                archive.writestr(name, content)
        with tarfile.open(tmp_path / "s.tar.gz", "w:gz") as archive:
            for name, content in sdist.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        build_dist.check(tmp_path / "s.tar.gz", tmp_path / "w.whl", tmp_path / "source")

    return check


def about(old: bytes, new: bytes) -> dict:
    changed = ABOUT.replace(old, new)
    return {"wheel": {**WHEEL, f"{INFO}/METADATA": changed}, "sdist": {f"{TOP}/PKG-INFO": changed}}


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"wheel": {k: v for k, v in WHEEL.items() if "typed" not in k}}, "sglang_triattn/py.typed in w.whl"),
        ({"wheel": {k: v for k, v in WHEEL.items() if "one" not in k}}, "sglang_triattn/kernels/one.py in w.whl"),
        ({"wheel": {**WHEEL, "tests/test_one.py": b""}}, "tests/test_one.py in w.whl"),
        ({"wheel": {**WHEEL, "sglang_triattn/py.typed": b"partial\n"}}, "sglang_triattn/py.typed in w.whl"),
        ({"wheel": {**WHEEL, f"{INFO}/licenses/LICENSE": b""}}, "no LICENSE, or another one"),
        ({"sdist": {**SDIST, f"{TOP}/tests/test_one.py": b""}}, "holds tests/"),
        ({"sdist": {f"{TOP}/PKG-INFO": ABOUT + b"More.\n"}}, "describe themselves differently"),
        (about(b"Version: 1.0", b"Version: one"), "would refuse the metadata: 'one' is invalid"),
        (about(b"Version: 1.0", b"Version: 1.1"), "the metadata's version is not the checkout's"),
        (about(b"torch", b"numpy"), "the metadata's dependencies"),
        (about(b"Words.", b"Other words."), "the metadata's description"),
    ],
)
def test_what_must_not_be_released(judge, capsys, files, sentence):
    """Prevents a release with a file, a license or metadata missing or wrong."""
    judge()
    with pytest.raises(SystemExit, match=re.escape(sentence)):
        judge(**files)


def test_the_newest_changes_are_those_of_this_version():
    """Prevents a release without its list of changes, and changes that belong to no version."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0].partition(",")[0] in (__version__, "Unreleased")
