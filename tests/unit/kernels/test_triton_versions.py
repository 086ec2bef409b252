"""The kernels use only what every supported version of Triton has."""

import ast

import pytest

from checkout import ROOT

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
FILES = [*sorted((ROOT / "kernels").rglob("*.py")), ROOT / "tools" / "compile_kernels.py"]

# Found in both Triton 3.6.0 and 3.8.0, and compiled and interpreted with both. Before adding a name, look it up in
# both and run what benchmarks/README.md says.
TRITON = {
    "__version__", "cdiv", "compile", "jit", "knobs", "knobs.cache", "knobs.cache.dir", "knobs.cache.scope",
    "knobs.nvidia", "knobs.nvidia.dump_ptxas_log", "knobs.nvidia.scope", "knobs.runtime", "knobs.runtime.interpret",
    "next_power_of_2",
}  # fmt: skip
LANGUAGE = {
    "PropagateNan", "PropagateNan.ALL", "arange", "bfloat16", "cdiv", "constexpr", "cumsum", "debug_barrier", "dot",
    "exp", "float16", "float32", "full", "histogram", "int32", "int64", "load", "log", "maximum", "minimum",
    "multiple_of", "num_programs", "pointer_type", "program_id", "reduce", "reshape", "split", "sqrt", "static_range",
    "store", "sum", "uint32", "uint8", "where", "zeros", "zeros_like",
}  # fmt: skip
KEYWORDS = {
    ("compile", "options"), ("compile", "target"), ("cumsum", "axis"),
    ("dot", "input_precision"), ("histogram", "mask"), ("jit", "do_not_specialize"),
    ("load", "mask"), ("load", "other"), ("maximum", "propagate_nan"), ("store", "mask"), ("sum", "axis"),
    ("to", "bitcast"),
}  # fmt: skip
OPTIONS = {"num_warps", "num_stages", "maxnreg"}
"""Launch options, as opposed to a kernel's own compile-time arguments, which are in capitals."""


def path_of(node: ast.AST) -> list[str]:
    """Names of `a.b.c`, empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    rest = path_of(node.value) if isinstance(node, ast.Attribute) else []
    return [*rest, node.attr] if rest else []


def used() -> tuple[set[str], set[str], set[tuple[str, str]], set[str]]:
    """Attributes of `triton`, of `triton.language`, keywords of their functions, and launch options."""
    attributes: dict[str, set[str]] = {"triton": set(), "tl": set()}
    keywords, options = set(), set()
    for tree in (ast.parse(path.read_text()) for path in FILES):
        kernels = "triton.language" in {name.name for node in ast.walk(tree) if isinstance(node, ast.Import)
                                        for name in node.names}  # fmt: skip
        for node in ast.walk(tree):
            first, *rest = path_of(node) or [""]
            if first in attributes and rest:
                attributes[first].add(".".join(rest))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = path_of(node.func)[:1]
                if owner in (["tl"], ["triton"]) or (kernels and node.func.attr == "to"):
                    keywords |= {(node.func.attr, each.arg) for each in node.keywords}
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_settings"):
                keys = [key.value for each in ast.walk(node) if isinstance(each, ast.Return) for key in each.value.keys]
                options |= {key for key in keys if not key.isupper()}
    return attributes["triton"], attributes["tl"], keywords, options


def test_nothing_is_used_that_only_one_version_has():
    """Prevents kernels that work with the tests' Triton but fail at launch with the one on a GPU machine."""
    triton_names, language, keywords, options = used()
    # Only equality with the whole list shows that the source was read as intended.
    assert language == LANGUAGE
    assert triton_names == TRITON
    assert keywords == KEYWORDS
    assert options == OPTIONS


def test_what_is_listed_is_installed():
    """Prevents a list that no longer describes the Triton at hand."""
    import triton
    import triton.language

    for root, names in ((triton, TRITON), (triton.language, LANGUAGE)):
        for name in names:
            found = root
            for part in name.split("."):
                found = getattr(found, part)
