"""SGLang's registry of models, and a configuration for each of its architectures.

SGLang's modules are parsed and not imported: that takes a second in place of half a minute, and finds also those that
cannot be imported without a GPU.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from checkout import ROOT

CONFIGS = ROOT / "tests" / "support" / "configs"

# Words in the names of models that draft for another one, of embedding, reward and classification models, and of
# encoders that SGLang registers by themselves.
_NOT_ALONE = re.compile(
    "NextN|MTP|Eagle|Draft|DSpark|DFlash|Assistant|Reward|ForSequenceClassification|ForClassification|Embedding|"
    "VisionModel"
)
# Modules that serve the layers of other packages: no config.json names their architectures.
_STAND_FOR_OTHERS = ("transformers", "mindspore")
_MODELS = "sglang.srt.models."
# What annotations say that name no configuration of one model.
_GENERAL = ("PretrainedConfig", "PreTrainedConfig", "Any")
# Parts of the name of an architecture that its configuration does not have.
_ENDINGS = re.compile("(ForCausalLM|ForConditionalGeneration|LMHeadModel|ChatModel|Model|ForBlockDiffusion).*$")


@cache
def _source() -> Path:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "srt"


@cache
def _modules() -> dict[str, Path]:
    """The files that SGLang looks for models in, by module."""
    return {file.stem: file for file in sorted((_source() / "models").glob("*.py"))}


def _tree(module: str) -> ast.Module:
    # Not kept: so many objects slow down everything after them.
    return ast.parse(_modules()[module].read_text())


@cache
def architectures() -> dict[str, str]:
    """Each architecture of the registry, with the name of its module: what the modules call `EntryClass`."""
    return {name: module for module in _modules() for name in _entries(_tree(module))}


def generates(name: str, module: str) -> bool:
    """Whether it is served by itself and continues a text, by SGLang's own list and by its name."""
    return not (_NOT_ALONE.search(name) or name in _embedding_models() or stands_for_others(module))


def stands_for_others(module: str) -> bool:
    return module in _STAND_FOR_OTHERS


def keeps_kv(module: str) -> bool:
    """Whether a model's layers have KV: some are attention layers of SGLang's, or another module's that have it."""
    # Modules import one another.
    pending, seen = [module], set[str]()
    while pending:
        name = pending.pop()
        files = [_modules()[name]] if name in _modules() else (_source() / "models" / name).glob("*.py")
        if any("RadixAttention(" in file.read_text() for file in files):
            return True
        seen.add(name)
        origins = [origin for origin, _ in _imports(name).values()] if name in _modules() else []
        others = {origin.split(".")[3] for origin in origins if origin.startswith(_MODELS)}
        pending += others - seen
    return False


def configuration(name: str, module: str) -> dict[str, Any] | None:
    """The content of a config.json for an architecture: that of a known model, else what transformers or SGLang builds
    by default; None if neither has a configuration class for it, or one without defaults."""
    if name in _known():
        return _known()[name]
    for found in _classes(name, module):
        try:
            content = json.loads(json.dumps(found().to_dict(), default=str))
        except Exception:  # What a class raises that lacks a default is its own affair.
            continue
        return {**content, "architectures": [name]}
    return None


@cache
def _known() -> dict[str, dict[str, Any]]:
    """The files of known models, by architecture."""
    contents = (json.loads(file.read_text()) for file in sorted(CONFIGS.glob("*.json"), reverse=True))
    return {content["architectures"][0]: content for content in contents}


def _classes(name: str, module: str) -> Iterator[type]:
    """Configuration classes for an architecture: by what transformers calls its model, by the annotation in SGLang's
    code, and by its name."""
    import sglang.srt.configs
    import transformers

    if name in _transformers_types():
        yield getattr(transformers, _transformers_types()[name])
    annotated = _annotated(name, module)
    if annotated is not None:
        yield annotated
    for package in (sglang.srt.configs, transformers):
        found = getattr(package, f"{_ENDINGS.sub('', name)}Config", None)
        if found is not None:
            yield found


@cache
def _transformers_types() -> dict[str, str]:
    """The configuration class of each model class of transformers, by name."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    found: dict[str, str] = {}
    tables = [table for name, table in vars(modeling_auto).items() if re.fullmatch("MODEL_.*MAPPING_NAMES", name)]
    for kind, models in (item for table in tables for item in table.items()):
        for model in (models,) if isinstance(models, str) else models:
            if kind in CONFIG_MAPPING_NAMES:
                found.setdefault(model, CONFIG_MAPPING_NAMES[kind])
    return found


def _annotated(name: str, module: str) -> type | None:
    """The class that the constructor of SGLang's model, or of its nearest base, takes for its configuration."""
    definition = next((node for node in _tree(module).body if _defines(node, name)), None)
    if not isinstance(definition, ast.ClassDef):
        origin = _imports(module).get(name)
        other = origin[0].rpartition(".")[2] if origin else ""
        return _annotated(origin[1], other) if origin and other in _modules() else None
    init = next(
        (node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None
    )
    if not isinstance(init, ast.FunctionDef):
        found = (_annotated(base.id, module) for base in definition.bases if isinstance(base, ast.Name))
        return next((each for each in found if each is not None), None)
    given = next((argument for argument in init.args.args if argument.arg == "config"), None)
    words = re.findall(r"\w+", ast.unparse(given.annotation)) if given and given.annotation else []
    for word in words:
        package, original = _imports(module).get(word, ("", ""))
        if word not in _GENERAL and package.startswith(("transformers", "sglang.srt.configs")):
            return getattr(importlib.import_module(package), original, None)
    return None


@cache
def _imports(module: str) -> dict[str, tuple[str, str]]:
    """(module, name) of each name that one of SGLang's modules imports."""
    nodes = (node for node in ast.walk(_tree(module)) if isinstance(node, ast.ImportFrom) and node.module)
    return {each.asname or each.name: (node.module or "", each.name) for node in nodes for each in node.names}


def _entries(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "EntryClass" for target in node.targets):
            values = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
            yield from (ast.unparse(value) for value in values)


@cache
def _embedding_models() -> frozenset[str]:
    """The names in SGLang's `is_generation_model`, which are those that do not generate."""
    tree = ast.parse((_source() / "configs" / "model_config.py").read_text())
    function = next(node for node in tree.body if _defines(node, "is_generation_model"))
    constants = (node.value for node in ast.walk(function) if isinstance(node, ast.Constant))
    return frozenset(value for value in constants if isinstance(value, str))


def _defines(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
