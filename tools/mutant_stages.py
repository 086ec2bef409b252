"""Runs the stages of tests against one mutation at a time, in a clone of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil

from env import fail
from import_graph import Checkout
from mutations import Mutation
from tests_for import tests_for

STAGES = ("unit", "property", "interpreted", "server")
FOLDERS = {"unit": "tests/unit/", "property": "tests/property/", "interpreted": "tests/gpu/", "server": "tests/server/"}
KERNELS_IN_ROUNDS = tuple(f"tests/support/property/{name}.py" for name in ("rounds_by_kernels", "backend_metadata"))
"""Tests that only an interpreting process runs, see tests/slow/test_interpreted.py."""
ONE_TEST_S = 600
# pytest's exit statuses.
FAILED, NOTHING_COLLECTED = 1, 5
REPORTED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)


def files_of(checkout: Checkout, file: str) -> dict[str, list[str]]:
    """The files of tests of each stage that a change of this file can break, those that are closest to it first."""
    chosen = sorted(tests_for(checkout, file), key=lambda test: distance(checkout, test, file))
    found = {stage: [test for test in chosen if test.startswith(folder)] for stage, folder in FOLDERS.items()}
    found["interpreted"] += [
        test for test in KERNELS_IN_ROUNDS if test in checkout.sources and file in checkout.reached(test)
    ]
    return found


def distance(checkout: Checkout, test: str, file: str) -> int:
    """How many imports lead from a test to a file; more than any such number if none do."""
    reached, steps = checkout.reached(test), 0
    if file not in reached:
        return len(checkout.files)
    while file != test:
        file, steps = reached[file], steps + 1
    return steps


class Clone:
    """A clone of a checkout, with what is not committed, whose tests and servers import the product from it alone."""

    def __init__(self, root: Path, folder: Path, limit: float) -> None:
        """limit: seconds that a stage may take; one that takes longer counts as a test that failed."""
        self.root, self._limit = folder, limit
        self._failing: list[str] = []
        subprocess.run(["git", "clone", "-q", "--shared", str(root), str(folder)], check=True)
        for name in _git(root, "diff", "--name-only", "--no-renames", "-z", "HEAD"):
            (folder / name).unlink(missing_ok=True)
        changed = (
            *_git(root, "diff", "--name-only", "-z", "HEAD"),
            *_git(root, "ls-files", "-o", "--exclude-standard", "-z"),
        )
        for name in changed:
            if (root / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name, follow_symlinks=False)
        options = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
        self._has_wide = any(marker.startswith("wide") for marker in options.get("markers", ()))
        self._prove_imports()

    def _prove_imports(self) -> None:
        command = [sys.executable, "-P", "-c", "import sglang_triattn; print(sglang_triattn.__file__)"]
        done = subprocess.run(command, env=self._environment("unit"), capture_output=True, text=True)
        found = done.stdout.strip()
        if not found or not Path(found).is_relative_to(self.root):
            fail(f"tests in the clone would import the product from {found or 'nowhere'}: {done.stderr.strip()}")

    def _environment(self, stage: str) -> dict[str, str]:
        path, more = [str(self.root)], {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if stage == "interpreted":
            path.append(str(self.root / "tests" / "support" / "unit"))
            more |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}

    def run_stage(self, stage: str, files: list[str], marker: str, mutation: Mutation) -> str:
        """Runs a stage's files of tests against the mutation.

        Returns the test that caught it, or how else it showed; empty if all tests passed. A test that fails without the
        mutation too is left out from then on.

        Args:
            marker: "wide" for the tests so marked, "not wide" for the others.
        """
        if not files or (marker == "wide" and not self._has_wide):
            return ""
        while True:
            status, output = self._mutated(stage, files, marker, mutation)
            if status in (0, NOTHING_COLLECTED):
                return ""
            if status is None:
                return f"time-out of {self._limit:.0f} s in {stage}"
            tests = REPORTED.findall(output)
            if status != FAILED or not tests:
                # Nothing can be collected, or the process died; without the mutation neither happens.
                options = ["--collect-only"] if status > 0 else []
                if self._pytest(stage, files, marker, options)[0] not in (0, FAILED):
                    fail(f"the tests of {stage} cannot run in a clone of this checkout:\n{output[-2000:]}")
                return tests[0] if tests else f"exit status {status} of pytest in {stage}"
            if self._pytest(stage, tests[:1], marker, [])[0] not in (FAILED, None):
                return tests[0]
            print(f"   left out, it fails without a mutation: {tests[0]}", flush=True)
            self._failing.append(tests[0])

    def _mutated(self, stage: str, files: list[str], marker: str, mutation: Mutation) -> tuple[int | None, str]:
        path = self.root / mutation.file
        original = path.read_bytes()
        mutation.apply(self.root)
        try:
            return self._pytest(stage, files, marker, ["-x"])
        finally:
            path.write_bytes(original)

    def _pytest(self, stage: str, tests: list[str], marker: str, options: list[str]) -> tuple[int | None, str]:
        """Exit status, None if it took too long, and output."""
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"]
        command = [*command, "--timeout", str(ONE_TEST_S), *options]
        command += ["-m", marker] if self._has_wide else []
        command += ["-p", "quick_interpreter"] if stage == "interpreted" else []
        command += [f"--deselect={name}" for name in self._failing if name not in tests]
        with subprocess.Popen(
            [*command, *tests],
            cwd=self.root,
            env=self._environment(stage),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=self._limit)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                return None, ""
            finally:
                end_with_descendants(process)


def end_with_descendants(process: subprocess.Popen) -> None:
    """Kills a process that still runs, and the servers that it started, which lead sessions of their own."""
    if process.poll() is None:
        leader = psutil.Process(process.pid)
        for each in [*leader.children(recursive=True), leader]:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait()


def _git(root: Path, *command: str) -> list[str]:
    done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name]
