"""Lets SGLang's hook registry find in one pass over all modules what it looks for once per hook.

After a hook is applied, the registry replaces the function wherever a module has imported it by name. For the fifty
hooks of a scheduler its own search takes two seconds of the launch.
"""

from __future__ import annotations

import sys
from types import ModuleType

from sglang_triattn.patches.hooks.hook import resolve

# Most of the modules that a process of SGLang has loaded; none of these packages imports SGLang.
_WITHOUT_SGLANG = sys.stdlib_module_names | {
    "Cython", "IPython", "PIL", "accelerate", "aiohappyeyeballs", "aiohttp", "anyio", "attr", "attrs",
    "charset_normalizer", "click", "compressed_tensors", "cuda", "cudnn", "cutlass", "dill", "einops", "fastapi",
    "filelock", "flashinfer", "fsspec", "gguf", "h11", "httpcore", "httpx", "huggingface_hub", "idna", "jinja2",
    "jsonschema", "loguru", "lxml", "mistral_common", "ml_dtypes", "mpmath", "msgspec", "multidict", "networkx",
    "numpy", "openai", "opentelemetry", "pandas", "propcache", "psutil", "pydantic", "pydantic_core", "pygments",
    "pynvml", "quack", "referencing", "regex", "requests", "rich", "safetensors", "scipy", "starlette", "sympy",
    "tiktoken", "timm", "tokenizers", "torch", "torchaudio", "torchcodec", "torchgen", "torchvision", "tqdm",
    "traitlets", "transformers", "triton", "triton_kernels", "tvm_ffi", "urllib3", "uvicorn", "uvloop", "watchfiles",
    "xgrammar", "yaml", "yarl", "zmq",
}  # fmt: skip


class Bindings:
    """The names under which modules hold the targets of hooks, as of the last module that was imported."""

    def __init__(self) -> None:
        self._modules = 0
        self._names: dict[int, list[tuple[ModuleType, str]]] = {}

    def replace(self, original: object, wrapped: object, source_module: object) -> int:
        """Replaces `original` by `wrapped` in all modules but `source_module`; returns in how many places.

        Packages that never import SGLang are not searched: a forked process would copy the pages of all they hold.

        Source: `_propagate_patch`, sglang/srt/plugins/hook_registry.py.
        """
        if self._modules != len(sys.modules) or id(original) not in self._names:
            self._search([original, *_targets()])
        replaced = 0
        for module, name in self._names[id(original)]:
            if module is not source_module and vars(module).get(name) is original:
                setattr(module, name, wrapped)
                replaced += 1
        return replaced

    def _search(self, functions: list[object]) -> None:
        self._modules, self._names = len(sys.modules), {id(function): [] for function in functions}
        for path in [path for path in list(sys.modules) if path.partition(".")[0] not in _WITHOUT_SGLANG]:
            module = sys.modules.get(path)
            # Names only where there is something to find: a forked process copies the pages of all that it looks at.
            if isinstance(module, ModuleType) and self._is_any_in(list(vars(module).values())):
                for name, value in list(vars(module).items()):
                    if id(value) in self._names:
                        self._names[id(value)].append((module, name))

    def _is_any_in(self, values: list[object]) -> bool:
        return not self._names.keys().isdisjoint(map(id, values))


def _targets() -> list[object]:
    """The functions that the registry has hooks for, or that it has hooked."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [resolve(target) for target in HookRegistry._hooks]


BINDINGS = Bindings()


def search_once() -> None:
    """For this process's registry, whichever plugin's hooks it applies."""
    from sglang.srt.plugins import hook_registry

    hook_registry._propagate_patch = BINDINGS.replace
