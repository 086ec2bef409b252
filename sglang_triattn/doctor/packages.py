"""Installed packages: their versions, and whether SGLang will load this one."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from importlib.metadata import Distribution

from sglang_triattn import __version__
from sglang_triattn.doctor.rows import NOTE, OK, WRONG, Row
from sglang_triattn.errors import first_line

NAME = "sglang-triattn"
TESTED = {
    "sglang": "0.5.23",
    "torch": "2.14.1",
    "triton": "3.8.0",
    "flashinfer-python": "0.7.2",
    "transformers": "5.19.0",
}
"""Versions that the tests ran with; those of constraints.txt, which is not installed."""
TESTED_PYTHON, LEAST_PYTHON = "3.11", (3, 11)
ENTRY_POINTS = {
    "sglang.srt.plugins": ("triattention", "sglang_triattn.patches.plugin:activate"),
    "sglang.srt.platforms": ("triattention_cpu", "sglang_triattn.patches.cpu.platform:activate"),
}
"""By group: name and value; those of pyproject.toml."""
_FLAGS = "a server does not know --enable-triattention, and runs dense in spite of SGLANG_TRIATTENTION"
_CPU = "a server without an accelerator does not start"
_WITHOUT = {"sglang.srt.plugins": _FLAGS, "sglang.srt.platforms": _CPU}


def version_rows() -> Iterator[Row]:
    """Python and the packages whose versions matter, compared with the tested and the required versions."""
    python = platform.python_version_tuple()
    if tuple(map(int, python[:2])) < LEAST_PYTHON:
        yield Row("python", WRONG, platform.python_version(), f"{NAME} needs {'.'.join(map(str, LEAST_PYTHON))}")
    else:
        yield _against_tested("python", platform.python_version(), ".".join(python[:2]), TESTED_PYTHON)
    for name, tested in TESTED.items():
        yield _version_row(name, tested)


def _version_row(name: str, tested: str) -> Row:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Row(name, "missing", "not installed", f"SGLang cannot serve: run `pip install {name}=={tested}`")
    refused = [f"{who} asks for {what}" for who, what in _asked(name, version)]
    if refused:
        without = "every launch with --enable-triattention is refused" if name == "sglang" else "SGLang may not work"
        return Row(name, WRONG, version, f"{without}: {', '.join(refused)}")
    return _against_tested(name, version, version.partition("+")[0], tested)


def _against_tested(name: str, version: str, shown: str, tested: str) -> Row:
    same = shown == tested
    return Row(name, OK if same else NOTE, version if same else f"{version}; the tests ran with {tested}")


def _asked(name: str, version: str) -> Iterator[tuple[str, str]]:
    """(package, its requirement) for each requirement of SGLang and this package that the version does not meet."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for who in ("sglang", NAME):
        try:
            requirements = map(Requirement, importlib.metadata.requires(who) or ())
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in requirements:
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            met = requirement.specifier.contains(version, prereleases=True)
            if canonicalize_name(requirement.name) == name and applies and not met:
                yield who, f"{name}{requirement.specifier}"


def loading_rows() -> Iterator[Row]:
    """Whether SGLang finds this package's entry points, once, and may load them."""
    copies = [found for found in importlib.metadata.distributions() if _name(found) == NAME]
    yield _copies_row(copies)
    for group, (name, value) in ENTRY_POINTS.items():
        yield _entry_point_row(group, name, value)
    yield from _environment_rows()


def _name(distribution: Distribution) -> str:
    return (distribution.metadata["Name"] or "").lower().replace("_", "-")


def _copies_row(copies: list[Distribution]) -> Row:
    """The first copy on the path is the one that SGLang sees; others matter if they say something else."""
    if not copies:
        return Row("installed", "missing", "no metadata of this package is on the path", _FLAGS)
    facts = [(str(copy.locate_file("")), copy.version, _own_entry_points(copy)) for copy in copies]
    places = ", ".join(f"{version} in {place}" for place, version, _ in facts)
    differing = [place for place, *rest in facts[1:] if rest != list(facts[0][1:])]
    if facts[0][1] != __version__:
        return Row("installed", WRONG, places, f"stale metadata: the code is {__version__}, so reinstall {NAME}")
    if differing:
        remove = f"the first hides the others, and removing it changes what runs: uninstall {', '.join(differing)}"
        return Row("installed", WRONG, places, remove)
    return Row("installed", OK, places + (": copies that agree" if len(facts) > 1 else ""))


def _own_entry_points(copy: Distribution) -> set[tuple[str, str, str]]:
    return {(entry.group, entry.name, entry.value) for entry in copy.entry_points if entry.group in ENTRY_POINTS}


def _entry_point_row(group: str, name: str, value: str) -> Row:
    """As SGLang's `load_plugins_by_group` (sglang/srt/plugins/__init__.py) finds and loads it."""
    title, without = f"{group}: {name}", _WITHOUT[group]
    found = [entry for entry in importlib.metadata.entry_points(group=group) if entry.name == name]
    if not found:
        return Row(title, "missing", "no installed package has it", f"{without}: reinstall {NAME}")
    loaded = ", ".join(f"{entry.value} of {entry.dist.name if entry.dist else 'an unknown package'}" for entry in found)
    if len(found) > 1 or found[0].value != value:
        return Row(title, WRONG, loaded, f"SGLang loads something else than {value}: uninstall what provides it")
    try:
        found[0].load()
    except Exception as error:
        return Row(title, WRONG, f"{type(error).__name__}: {first_line(error)}", without)
    return Row(title, OK, loaded)


def _environment_rows() -> Iterator[Row]:
    """SGLang's variables that leave plugins out: a list of names, and the name of one platform."""
    # Sources: `load_plugins_by_group` and `_get_excluded_dists`, sglang/srt/plugins/__init__.py.
    listed = os.environ.get("SGLANG_PLUGINS", "")
    for group, (name, _) in ENTRY_POINTS.items():
        if listed and name not in map(str.strip, listed.split(",")):
            yield Row(
                "SGLANG_PLUGINS", WRONG, f"leaves {name} out", f"{_WITHOUT[group]}: add {name} to it, or unset it"
            )
    selected, ours = os.environ.get("SGLANG_PLATFORM"), ENTRY_POINTS["sglang.srt.platforms"][0]
    if selected and selected != ours:
        left_out = f"is {selected}, which leaves all plugins of {NAME} out"
        yield Row("SGLANG_PLATFORM", WRONG, left_out, f"{_FLAGS}: unset it")
