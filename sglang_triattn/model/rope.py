"""A model's rotary position embedding (RoPE) as numbers: frequencies, scaling, rotated dims, and how they pair up.

RoPE turns complex component f of a vector at position p: `x_f -> s * x_f * exp(i w_f p)` (spec section 0).
"""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from sglang_triattn.errors import TriAttentionError

STATIC_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""RoPE types of transformers whose frequencies never change while serving."""

STYLES = ("half", "interleaved")
"""How dims pair up, see `Rope`."""

_FULL = "full_attention"
_PROBE_POSITIONS = (1, 7, 100)
_UNKNOWN = "Models of {} turn their queries in a way that is not supported: use a model with standard RoPE."


class RopeError(TriAttentionError):
    """Scores cannot be computed for the model's position embedding."""


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotation of queries and keys.

    Attributes:
        inv_freq: [F] float64 on the CPU, radians per token, scaling (llama3, yarn, linear) included; exact in every
            dtype that the model computes in. 0 for pairs of dims that stay as they are between others (proportional).
        attention_scaling: factor s on cos and sin: 1.0 except for YaRN-like types.
        rotary_dim: 2F, the leading dims of a head that are rotated.
        style: half: component f is (x[f], x[f + F]); interleaved: (x[2f], x[2f + 1]).
    """

    inv_freq: torch.Tensor
    attention_scaling: float
    rotary_dim: int
    style: str


def no_rotation(head_dim: int) -> Rope:
    """What stands for the rotation of models that have none (NoPE): it pairs up the dims of a head, and turns none."""
    return Rope(torch.zeros(head_dim // 2, dtype=torch.float64), 1.0, head_dim // 2 * 2, "half")


def to_complex(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Complex components [..., F] of the rotated dims of `x` [..., head_dim] (float32 or float64)."""
    turning = x[..., : rope.rotary_dim]
    if rope.style == "half":
        return torch.complex(*turning.chunk(2, dim=-1))
    return torch.complex(turning[..., 0::2], turning[..., 1::2])


def from_complex(z: torch.Tensor, rope: Rope) -> torch.Tensor:
    """The inverse of `to_complex`: real dims [..., rotary_dim] of components [..., F]."""
    if rope.style == "half":
        return torch.cat([z.real, z.imag], dim=-1)
    return torch.stack([z.real, z.imag], dim=-1).flatten(-2)


def rotate(x: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Applies RoPE at `positions` [S] to vectors [..., S, head_dim] (float32 or float64); other dims pass through."""
    return _turn(x, positions, rope, 1.0, rope.attention_scaling)


def unrotate(x: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """The inverse of `rotate`: pre-RoPE vectors [..., S, head_dim] of post-RoPE ones."""
    return _turn(x, positions, rope, -1.0, 1.0 / rope.attention_scaling)


def _turn(x: torch.Tensor, positions: torch.Tensor, rope: Rope, sign: float, scale: float) -> torch.Tensor:
    angles = sign * positions.to(x.device, torch.float64)[:, None] * rope.inv_freq.to(x.device)  # [S, F]
    z = to_complex(x, rope)
    turned = z * torch.polar(torch.full_like(angles, scale), angles).to(z.dtype)
    return torch.cat([from_complex(turned, rope), x[..., rope.rotary_dim :]], dim=-1)


def rope_of_transformers(model: torch.nn.Module, config) -> Rope:
    """Reads the RoPE of a transformers model, or of a rotary module alone.

    Frequencies and scaling are those that the module itself uses. The pairing of dims is found by rotating a probe
    vector with the model's own function; a lone rotary module without such a function is taken as "half". Of a module
    that turns layers of different kinds differently (Gemma 3), those of the layers with full attention are read.

    Args:
        config: the model's configuration, for messages.

    Raises:
        RopeError: the model has no RoPE, several different ones, one whose frequencies change while serving, or one
            that turns vectors in an unknown way.
    """
    rotary = _rotary_module(model)
    rope_type = getattr(rotary, "rope_type", "default")
    if isinstance(rope_type, Mapping):
        rope_type = rope_type[_FULL]
    if rope_type not in STATIC_TYPES and not (rope_type == "dynamic" and _is_stretched(rotary, config)):
        raise RopeError(
            f"RoPE type {rope_type!r} changes its frequencies with a text's length, but scores need fixed "
            f"ones: calibrate with --engine sglang, or use a model with one of {', '.join(STATIC_TYPES)}."
        )
    inv_freq = cast(torch.Tensor, _frequencies(rotary)).detach()
    if inv_freq.dtype not in (torch.float32, torch.float64):
        raise RopeError(
            f"The model's RoPE frequencies were rounded to {inv_freq.dtype}: load the model with dtype=... "
            "instead of converting it afterwards."
        )
    inv_freq = inv_freq.to("cpu", torch.float64)
    scaling = getattr(rotary, f"{_FULL}_attention_scaling" if _by_kind(rotary) else "attention_scaling", 1.0)
    rope = Rope(inv_freq, float(scaling), 2 * inv_freq.numel(), "half")
    apply = getattr(sys.modules.get(type(rotary).__module__), "apply_rotary_pos_emb", None)
    if apply is None:
        if rotary is model:
            return rope
        raise RopeError(_UNKNOWN.format(type(model).__name__))
    return _probe(rotary, apply, rope, type(config).__name__)


def ropes_of_buffers(module: torch.nn.Module) -> list[Rope]:
    """The rotations, in both styles, that a rotary module in the style of transformers may stand for; none of others.

    Such a module holds frequencies, one set for each type of layer if these differ, and their attention scaling. Types
    whose frequencies change while serving are left out.
    """
    found = []
    for name, buffer in module.named_buffers(recurse=False):
        kind = name.removesuffix("inv_freq")
        if kind == name or kind.endswith("original_") or buffer.dtype not in (torch.float32, torch.float64):
            continue
        types = getattr(module, "rope_type", "default")
        rope_type = types.get(kind.removesuffix("_")) if isinstance(types, dict) else types
        if rope_type in STATIC_TYPES:
            frequencies = buffer.detach().to("cpu", torch.float64)
            scaling = float(getattr(module, f"{kind}attention_scaling", 1.0))
            found += [Rope(frequencies, scaling, 2 * frequencies.numel(), style) for style in STYLES]
    return found


def same_rope(one: Rope, other: Rope) -> bool:
    return (
        torch.equal(one.inv_freq, other.inv_freq)
        and one.attention_scaling == other.attention_scaling
        and one.style == other.style
    )


def _rotary_module(model: torch.nn.Module) -> torch.nn.Module:
    """The module that holds the frequencies; modules with equal ones count as one."""
    found = [module for module in model.modules() if _frequencies(module) is not None]
    if not found:
        raise RopeError(
            f"{type(model).__name__} has no rotary position embedding (RoPE) common to its layers, but "
            "this needs one: calibrate with --engine sglang, or use a model that has."
        )
    first, *others = (cast(torch.Tensor, _frequencies(module)) for module in found)
    if any(other.shape != first.shape or not torch.equal(other, first) for other in others):
        raise RopeError(f"{type(model).__name__} has several different rotary embeddings; only one is supported")
    return found[0]


def _is_stretched(rotary: torch.nn.Module, config) -> bool:
    """Whether frequencies of the type "dynamic" are stretched by a fixed `alpha`, for all lengths (Hunyuan)."""
    parameters, frequencies = config.rope_parameters or {}, _frequencies(rotary)
    if frequencies is None or not parameters.get("alpha"):
        return False
    slowest = parameters["rope_theta"] ** (1 / frequencies.numel() - 1) / parameters["alpha"]
    return abs(float(frequencies[-1]) / slowest - 1) < 1e-4


def _by_kind(rotary: torch.nn.Module) -> bool:
    """Whether it has frequencies for each kind of layers, by name."""
    return not hasattr(rotary, "inv_freq")


def _frequencies(module: torch.nn.Module) -> torch.Tensor | None:
    """Those of all layers, else those of the layers with full attention; None if the module has no such tensor."""
    found = (getattr(module, name, None) for name in ("inv_freq", f"{_FULL}_inv_freq"))
    return next((each for each in found if isinstance(each, torch.Tensor)), None)


def _probe(rotary: torch.nn.Module, apply, rope: Rope, name: str) -> Rope:
    """`rope` with the pairing style in which `apply`, the model's own function, turns a probe vector."""
    device = cast(torch.Tensor, _frequencies(rotary)).device
    kind = (_FULL,) if _by_kind(rotary) else ()
    positions = torch.tensor(_PROBE_POSITIONS, device=device)
    probe = torch.randn(1, 1, len(positions), rope.rotary_dim, generator=torch.Generator().manual_seed(0))
    probe = probe.to(device)
    # Some functions turn queries and keys at once, others one of them (Gemma 4).
    single = next(iter(inspect.signature(apply).parameters)) == "x"
    try:
        tables = rotary(probe, positions[None], *kind)
        turned = (apply(probe, *tables) if single else apply(probe, probe, *tables)[0]).double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise RopeError(f"the rotation of a model of {name} is not recognised; it is not supported") from error
    for style in STYLES:
        candidate = Rope(rope.inv_freq, rope.attention_scaling, rope.rotary_dim, style)
        expected = rotate(probe.double(), positions, candidate)
        if turned.shape == expected.shape and torch.allclose(turned, expected, rtol=1e-3, atol=1e-3):
            return candidate
    raise RopeError(_UNKNOWN.format(name))
