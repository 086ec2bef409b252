"""Checks, while the image is built, that the package works with the SGLang in it, and that nothing else changed.

    python3 -P verify.py BEFORE

BEFORE is the output of `pip list --format=freeze` before the installation. Ends with one sentence if something is
wrong. Needs no GPU.
"""

import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "sglang-triattn"
ENTRY_POINTS = {"sglang.srt.plugins": {"triattention"}, "sglang.srt.platforms": {"triattention_cpu"}}


def main() -> None:
    check_requirements()
    check_entry_points()
    check_unchanged(Path(sys.argv[1]).read_text())


def check_requirements() -> None:
    """Every package that this one needs is installed, in a version that it accepts: of SGLang, the only one."""
    for requirement in map(Requirement, importlib.metadata.requires(PACKAGE) or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            sys.exit(f"{PACKAGE} needs {requirement}, and this image has no {requirement.name}.")
        if not requirement.specifier.contains(found, prereleases=True):
            sys.exit(f"{PACKAGE} needs {requirement}, but this image has {found}: use the image of that version.")


def check_entry_points() -> None:
    """SGLang will find the plugin and the platform, and they come from the installed package alone."""
    for group, names in ENTRY_POINTS.items():
        ours = [
            point
            for point in importlib.metadata.entry_points(group=group)
            if point.dist is not None and point.dist.name == PACKAGE
        ]
        if sorted(point.name for point in ours) != sorted(names):
            sys.exit(f"{group} has {sorted(point.name for point in ours)} of {PACKAGE}, but must have {sorted(names)}.")
        for point in ours:
            point.load()


def check_unchanged(before: str) -> None:
    """Nothing that the image had was replaced, torch above all."""
    for line in before.split():
        name, _, version = line.partition("==")
        now = importlib.metadata.version(name)
        if now != version.lstrip("="):
            sys.exit(f"The installation replaced {name} {version} by {now}, but must leave what the image has alone.")


if __name__ == "__main__":
    main()
