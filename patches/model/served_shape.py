"""The shape of the model that a scheduler serves, of all its pipeline stages; runs two private passes of one token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang_triattn.model.families import family_of
from sglang_triattn.model.rope import no_rotation, same_rope
from sglang_triattn.patches.model.inspect import read_ropes, read_shape
from sglang_triattn.patches.model.late_norm import without_weights
from sglang_triattn.patches.model.layers import UnsupportedModel, attention_layers, scored_layers
from sglang_triattn.patches.model.rotation import POSITION, Rotation, match_rotation, queries_at
from sglang_triattn.patches.ranks.pipeline import is_staged
from sglang_triattn.patches.ranks.tensor_parallel import agreed
from sglang_triattn.stats.file import ModelShape

if TYPE_CHECKING:
    from sglang_triattn.patches.sglang_types import Scheduler


def served_shape(scheduler: Scheduler) -> ModelShape:
    """The shape of the model that `scheduler` serves; every rank of every stage calls this before it serves.

    Raises:
        UnsupportedModel: `read_shape` or `match_rotation` refuses.
        TriAttentionError: they do in another stage, or the stages do not go together.
    """
    if not is_staged(scheduler):
        return shape_of_stage(scheduler)
    with agreed(scheduler):
        own = shape_of_stage(scheduler)
    return join_stages(scheduler.pp_group.all_gather_object(own))


def join_stages(stages: Sequence[ModelShape]) -> ModelShape:
    """The shape of a model whose layers are split over `stages`.

    Raises:
        UnsupportedModel: they rotate their queries differently.
    """
    first = stages[0]
    if not all(same_rope(first.rope, stage.rope) for stage in stages):
        raise UnsupportedModel("the layers of one pipeline stage have another rotary embedding than those of another")
    layers = tuple(layer for stage in stages for layer in stage.layers)
    return replace(first, layers=layers, rotates=tuple(turns for stage in stages for turns in stage.rotates))


def shape_of_stage(scheduler: Scheduler) -> ModelShape:
    """The shape of this stage's layers; the stages before and after it run along, so every one calls this."""
    runner, ranks = scheduler.tp_worker.model_runner, scheduler.dp_tp_group.world_size
    # A stage that refused alone would leave the others waiting in the passes.
    with agreed(scheduler) if is_staged(scheduler) else nullcontext():
        layers = scored_layers(attention_layers(runner.model))
        ropes = read_ropes(runner.model, layers[0].rotary_width)
        family = family_of(runner.model_config.hf_config.architectures)
        if not ropes and family.may_lack_rope:
            ropes = [no_rotation(layers[0].rotary_width)]
        if family.learned_positions:
            # The same token enters a layer differently at two positions, so their queries say nothing of a rotation.
            return read_shape(runner, ranks, Rotation(ropes[0], (False,) * len(layers)))
    position = min(POSITION, scheduler.model_config.context_len - 1)
    seen, first = queries_at(scheduler, layers, position)
    if family.norm_after_rope:
        seen = without_weights(seen, layers, runner.model, family.norm_after_rope)
    rotation = match_rotation(seen, [layer.number for layer in layers], ropes, position)
    return read_shape(runner, ranks, replace(rotation, first_position=first))
