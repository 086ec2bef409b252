"""The account of what an assistant drafts, see `gemma4_family`.

An assistant has no K/V: its layers read those of the model's last layer of their kind. In all steps of a draft it
stands at the newest token that the model has computed. Nothing here uses the project's code, see `draft_account`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Gemma4AssistantForCausalLM

from draft_account import Watched
from families import WINDOW


@torch.no_grad()
def holding_of_assistant(
    path: Path, account: Watched, ids: list[int], starts: list[int], steps: int, margin: float
) -> list[int | None]:
    """As `draft_account.holding_of_head`, for an assistant.

    Args:
        path: of the assistant.
        account: of the ids, which has run.
    """
    assistant = Gemma4AssistantForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    text, cache = getattr(account.model.model, "language_model", account.model.model), account.cache
    kinds = text.config.layer_types
    full, near = (
        cache.layers[max(number for number, kind in enumerate(kinds) if kind == each)]
        for each in ("full_attention", "sliding_attention")
    )
    group = text.config.num_attention_heads // account.shown.shape[1]
    shown = account.shown[-1].repeat_interleave(group, 0)
    found: list[int | None] = []
    for start in starts:
        recent = slice(max(start - WINDOW, 0), start)
        read = {
            "full_attention": (full.keys[:, :, :start], full.values[:, :, :start]),
            "sliding_attention": (near.keys[:, :, recent], near.values[:, :, recent]),
        }
        blocked = torch.where(shown[:, start, :start], 0.0, torch.finfo(torch.float32).min)
        masks = {"full_attention": blocked[None, :, None], "sliding_attention": None}
        token, state, held = torch.tensor([[ids[start]]]), account.hidden[None, start - 1 : start], 0
        while held is not None and held < steps and start + held + 1 < len(ids):
            mixed = assistant.pre_projection(torch.cat((text.embed_tokens(token), state), -1))
            # SGLang counts the model's positions from 1 (gemma4_mm.py), and the assistant's from 0.
            place = torch.tensor([[start - 2]])
            made = assistant.model(
                inputs_embeds=mixed, attention_mask=masks, position_ids=place, shared_kv_states=read, use_cache=False
            ).last_hidden_state
            state, best = assistant.post_projection(made), assistant.lm_head(made)[0, 0].log_softmax(-1).topk(2)
            token = best.indices[:1].view(1, 1)
            if best.values[0] - best.values[1] < margin:
                held = None
            elif int(token) != ids[start + held + 1]:
                break
            else:
                held += 1
        found.append(held)
    return found
