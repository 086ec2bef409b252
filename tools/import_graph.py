"""Which files of the checkout each of its Python files needs, read from their sources; standard library only.

A file needs what it imports, inside functions too, and what its strings name: code that another process runs, a module
for `import_module`, a script, a folder of tests. A test also needs the fixtures of the conftest.py files above it that
it asks for, and what those need.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

PRODUCT = ("sglang_triattn", "kernels", "patches")
LINKS = (("sglang_triattn", "kernels"), ("sglang_triattn", "patches"))
# Imports every subcommand, of which each call runs one.
COMMANDS = "sglang_triattn/cli/main.py"
FOLDERS = (*PRODUCT, "tools", "benchmarks", "tests")
# Code in a string: `from a.b import c` or `import a.b`.
IMPORT = re.compile(r"\b(?:from\s+([\w.]+)\s+)?import\s+([\w., ]+)")
WORD = re.compile(r"[\w./-]+")


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def without_docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node below `tree` that can change what the code does: no string on its own, nothing for type checkers."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if is_for_type_checkers(child):
            continue
        yield child
        yield from without_docstrings(child)


class Source:
    """One Python file, or one function of a conftest.py.

    Attributes:
        imports: dotted names that it imports; `from a import b` gives both a and a.b.
        strings: the values of its string constants, docstrings left out.
        words: what stands between spaces in them.
        names: its identifiers: names, attributes, parameters and keywords.
        types_alone: modules that only a type checker imports.
    """

    def __init__(self, tree: ast.AST) -> None:
        self.imports: set[str] = set()
        self.strings: set[str] = set()
        self.names: set[str] = set()
        for node in without_docstrings(tree):
            match node:
                case ast.Import():
                    self.imports |= {alias.name for alias in node.names}
                case ast.ImportFrom(module=str(module)):
                    self.imports |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
                    self.names |= {alias.name for alias in node.names}
                case ast.Constant(value=str(text)):
                    self.strings.add(text)
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                    self.names.add(name)
        self.words = {word for text in self.strings for word in text.split()}
        for text in self.strings:
            for module, names in IMPORT.findall(text):
                parts = [name.split()[0] for name in names.split(",") if name.strip()]
                self.imports |= {module, *(f"{module}.{part}" for part in parts)} if module else set(parts)
        checked = (each for node in ast.walk(tree) if is_for_type_checkers(node) for each in ast.walk(node))
        self.types_alone = {node.module for node in checked if isinstance(node, ast.ImportFrom)}


class Conftest:
    """The definitions and imports of a conftest.py."""

    def __init__(self, tree: ast.Module) -> None:
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        self.imports: dict[str, str] = {}
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                self.imports |= {alias.asname or alias.name: prefix + alias.name for alias in node.names}
        rest = [
            node
            for node in tree.body
            if not isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)
        ]
        # What pytest runs or reads for every test.
        self.always = {name for name, node in self.functions.items() if name.startswith("pytest_") or _autouse(node)}
        self.always |= Source(ast.Module(rest, [])).names & set(self.imports)

    def used(self, wanted: set[str]) -> tuple[set[str], set[str]]:
        """What a test that uses the names `wanted` needs of this file: dotted names of imports, and words.

        The words are the names and strings of the functions that it uses; they may be fixtures of a conftest.py above.
        """
        imports, words, seen = set(), set(), set()
        todo = self.always | (wanted & (set(self.functions) | set(self.imports)))
        while todo:
            name = todo.pop()
            seen.add(name)
            if name in self.imports:
                imports.add(self.imports[name])
            if name in self.functions:
                source = Source(self.functions[name])
                imports |= source.imports
                words |= source.names | source.strings
                todo |= (source.names & (set(self.functions) | set(self.imports))) - seen
        return imports, words


def _autouse(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any("autouse=True" in ast.unparse(each) for each in node.decorator_list)


class Checkout:
    """The Python files of a checkout; every path is relative to its root, with forward slashes.

    Attributes:
        root: its folder.
        files: its Python files.
        sources: what each of them names.
    """

    def __init__(self, root: Path, deleted: Sequence[str] = ()) -> None:
        """deleted: Python files that were there, so that what still imports them is found."""
        self.root = root
        options = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
        self._bare_folders = set(options["pythonpath"])
        found = (path.relative_to(root) for folder in FOLDERS for path in (root / folder).rglob("*.py"))
        # The links of sglang_triattn are the top-level folders once more.
        self.files = sorted({*deleted, *(str(path) for path in found if path.parts[:2] not in LINKS)})
        trees = {file: ast.parse("" if file in deleted else (root / file).read_text()) for file in self.files}
        self.sources = {file: Source(tree) for file, tree in trees.items()}
        self._conftests = {file: Conftest(tree) for file, tree in trees.items() if Path(file).name == "conftest.py"}
        self.tests = [file for file in self.files if file.startswith("tests/") and Path(file).name.startswith("test_")]
        self.product = [file for file in self.files if file.partition("/")[0] in PRODUCT]
        self._needs: dict[str, set[str]] = {}
        self._words: dict[str, set[str]] = {}
        self._reached: dict[str, dict[str, str]] = {}

    @cached_property
    def modules(self) -> dict[str, str]:
        """File of each module by the name that it is imported by."""
        found = {}
        for file in self.files:
            path = Path(file)
            parts = [*path.parent.parts, *(() if path.stem == "__init__" else (path.stem,))]
            if path.parts[0] in PRODUCT:
                found[".".join(parts if parts[0] == "sglang_triattn" else ["sglang_triattn", *parts])] = file
            elif path.parts[0] == "benchmarks":
                found[".".join(parts)] = file
            elif str(path.parent) in self._bare_folders and path.stem != "conftest":
                found[path.stem] = file
        return found

    def imported(self, name: str) -> set[str]:
        """Files that `import name` runs: the module's and those of the packages that it is in."""
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return {self.modules[prefix] for prefix in prefixes if prefix in self.modules}

    @cached_property
    def _places(self) -> dict[str, set[str]]:
        """Files by what a string may call them: `name.py`, and each folder of tests."""
        found: dict[str, set[str]] = {}
        for file in (each for each in self.files if each not in self.product):
            path = Path(file)
            folders = [str(folder) for folder in path.parents if folder.parts[:1] == ("tests",)]
            for name in (path.name, file, *(folder for folder in folders if folder != "tests")):
                found.setdefault(name, set()).add(file)
        return found

    def _named(self, source: Source, loads: bool) -> set[str]:
        """Files that strings of a test name, but for the product, which is imported.

        Args:
            loads: whether it imports modules by names in strings.
        """
        found: set[str] = set()
        for text in source.strings:
            for word in WORD.findall(text):
                found |= self._places.get(word.rstrip("/"), set()) if "/" in word or word.endswith(".py") else set()
                found |= self._benchmarks(word)
            if loads and text in self.modules and "." not in text:
                found.add(self.modules[text])
        return found

    def _benchmarks(self, word: str) -> set[str]:
        """Files of the benchmark that `word` names as `python -m` does; all of a package if an f-string goes on."""
        if not word.startswith("benchmarks."):
            return set()
        if word.endswith("."):
            return {file for name, file in self.modules.items() if name.startswith(word)} | self.imported(word[:-1])
        return self.imported(f"{word}.__main__")

    def needs(self, file: str) -> set[str]:
        """Files that this one needs itself, without what those need in turn."""
        if file not in self._needs:
            source = self.sources[file]
            imports = {each for name in source.imports for each in self.imported(name)}
            if Path(file).parts[0] == "tests":
                loads = any("import_module" in self.sources[each].names for each in (file, *imports))
                imports |= self._named(source, loads)
            else:
                imports |= {self.modules[text] for text in source.strings if "." in text and text in self.modules}
            self._words[file] = source.strings
            if file in self.tests:
                imports |= self._fixtures(file)
            self._needs[file] = imports - {file}
        return self._needs[file]

    def _fixtures(self, test: str) -> set[str]:
        """Files that a test needs by way of the conftest.py files above it."""
        found: set[str] = set()
        wanted = set(self.sources[test].names)
        for folder in Path(test).parents:
            conftest = self._conftests.get(str(folder / "conftest.py"))
            if conftest:
                imports, words = conftest.used(wanted)
                found |= {each for name in imports for each in self.imported(name)}
                wanted |= words
                self._words[test] = self._words[test] | words
        return found

    def reached(self, file: str) -> dict[str, str]:
        """Every file that `file` needs, directly or not, and the file through which it was first reached.

        A command line has many subcommands, and a test runs those that it names: a string that it, or what it needs of
        the tests, is made of.
        """
        if file not in self._reached:
            self._reached[file] = self._follow(file)
        return self._reached[file]

    def _follow(self, file: str) -> dict[str, str]:
        found = {file: ""}
        queue = [file]
        words: set[str] = set()
        waiting: set[str] = set()
        while queue:
            for each in queue:
                for other in sorted(self.needs(each) - set(found)):
                    if each == COMMANDS and Path(other).parent == Path(COMMANDS).parent:
                        waiting.add(other)
                        continue
                    found[other] = each
                    queue.append(other)
                if each.startswith("tests/"):
                    words |= self._words[each]
            named = {name for name in waiting - set(found) if Path(name).stem.replace("_", "-") in words}
            found |= dict.fromkeys(named, COMMANDS)
            queue = sorted(named)
        return found
