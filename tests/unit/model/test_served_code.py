"""What SGLang's code of each architecture can do, compared with its source."""

import ast

import pytest

import sglang_registry
from sglang_triattn.compatibility.served_code import CAPTURING, CAPTURING_FOR_BLOCKS, UNSTAGED
from sglang_triattn.model.families import FAMILIES

# Their `forward` takes what the stage before it sends; see the comment on the names.
FAILING = {"GraniteMoeHybridForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"}

# Their method calls one that their language model has not; see the comment there.
WITHOUT_INNER = {"Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"}


@pytest.fixture(scope="module")
def methods() -> dict[str, dict[str, ast.FunctionDef]]:
    """The methods of each class of SGLang's models, inherited ones too, by its name."""
    classes: dict[str, ast.ClassDef] = {}
    for module in sglang_registry._modules():
        found = (node for node in sglang_registry._tree(module).body if isinstance(node, ast.ClassDef))
        classes.update((node.name, node) for node in found)

    def methods_of(name: str) -> dict[str, ast.FunctionDef]:
        if name not in classes:
            return {}
        node, inherited = classes[name], {}
        for base in reversed(node.bases):
            if isinstance(base, ast.Name) and base.id != name:
                inherited |= methods_of(base.id)
        return inherited | {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}

    return {
        name: methods_of(name)
        for name, module in sglang_registry.architectures().items()
        if name in FAMILIES and FAMILIES[name].refused is None and sglang_registry.generates(name, module)
    }


@pytest.mark.wide
def test_architectures_without_stages(methods):
    """Prevents a launch in stages that ends with an assertion of SGLang, and a refusal of one that works."""
    taken = {
        name: [argument.arg for argument in (*found["forward"].args.args, *found["forward"].args.kwonlyargs)]
        for name, found in methods.items()
        if "forward" in found
    }
    assert {name for name, names in taken.items() if "pp_proxy_tensors" not in names} | FAILING == UNSTAGED
    assert len(taken) - len(UNSTAGED) > 60


@pytest.mark.wide
def test_architectures_that_capture_for_eagle3(methods):
    """Prevents a launch with an EAGLE-3 head that ends once the weights are loaded, and a refusal of one that works."""
    assert {name for name, found in methods.items() if "set_eagle3_layers_to_capture" in found} == CAPTURING


@pytest.mark.wide
def test_architectures_that_capture_for_blocks(methods):
    """Prevents the same with a model that drafts a block of tokens at once."""
    found = {name for name, found in methods.items() if "set_dflash_layers_to_capture" in found}
    assert found - WITHOUT_INNER == CAPTURING_FOR_BLOCKS
    assert found >= WITHOUT_INNER


@pytest.mark.parametrize(
    ("model", "flags", "reason"),
    [
        ("qwen3-next-80b-a3b", "--pp-size 2", "cannot serve this model in stages: use --pp-size 1."),
        ("lfm2-1.2b", "--pp-size 2 --model-impl transformers", ""),
        ("nemotron-nano-9b-v2", "--pp-size 2", ""),
        ("hunyuan-7b", "EAGLE3", "does not capture the hidden states that EAGLE3 reads: use another"),
        ("hunyuan-7b", "EAGLE", ""),
        ("qwen3-32b", "EAGLE3", ""),
        ("qwen3-32b", "DFLASH", ""),
        ("gpt-oss-20b", "DFLASH --triattention-budget 4096", ""),
        ("llama-3.3-70b", "DFLASH --attention-backend flashmla", ""),
        ("glm-4.6", "DFLASH", "does not capture the hidden states that DFLASH reads"),
        ("qwen3-32b", "EAGLE3 --model-impl transformers", "does not capture the hidden states"),
    ],
)
def test_they_are_refused_by_name(run_check, model, flags, reason):
    """Prevents a refusal that a model or another way of serving it does not deserve, or a missing one."""
    drafts = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    given = flags if flags.startswith("--") else f"{drafts} --speculative-algorithm {flags}"
    status, output, _ = run_check(model, *given.split())
    assert status == bool(reason)
    assert reason in output
    assert not reason or f"tests/support/configs/{model}.json (" in output
