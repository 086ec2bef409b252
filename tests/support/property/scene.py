"""Requests and a conversation in mid-life, for tests that corrupt the books of one of them."""

from __future__ import annotations

import torch

from checks import decode_together
from simulation import Simulation
from whole_server import take_census


class Scene:
    """Two running requests that share a prompt with the tree, and an idle conversation; all three have evicted."""

    def __init__(self, page_size: int) -> None:
        self.page = page_size
        self.sim = Simulation(page_size)
        talk = self.sim.request([7] * 3, conversation="chat")
        self.first, self.second = self.sim.request([5] * 20), self.sim.request([5] * 20)
        for running in (talk, self.first, self.second):
            assert self.sim.admit(running, 1000)
        decode_together(self.sim, [talk, self.first, self.second], 30)
        self.sim.release(talk, finish=True)
        self.chat = self.sim.conversations.idle()["chat"]
        self.kv = self.first.req.kv
        self.row, self.other = (self.sim.rows.req_to_token[r.req.kv.req_pool_idx] for r in (self.first, self.second))
        self.talk_row = self.sim.rows.req_to_token[self.chat.kv.req_pool_idx]
        assert self.first.evicted
        assert self.kv.cache_protected_len == 20
        take_census(self.sim)

    def place(self, slot) -> str:
        first = int(slot) // self.page * self.page
        if self.page == 1:
            return f"slot {first}"
        return f"page {first // self.page} (slots {first} to {first + self.page - 1})"

    def free(self, slot) -> None:
        allocator = self.sim.allocator
        allocator.free_pages = torch.cat([allocator.free_pages, slot.reshape(1).long() // self.page])
