"""A scheduler in miniature over SGLang's real tree, allocator, row table, KV pool and requests.

Every K/V row that a request computes is a content oracle: it says which layer, head, token and logical position it
belongs to, and whether it was computed before its request's first eviction (exact) or, after that, by which request
(tainted). After any move, reading a row back shows whose content it holds.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, ReqKvInfo
from sglang.srt.mem_cache.common import evict_from_tree_cache, release_kv_cache
from sglang.srt.sampling.sampling_params import SamplingParams

from content import content_of_one, contents, exact_length, same_for_all
from memory import CONTEXT, Memory
from running import Running
from sglang_triattn.patches.request import chunked_prefill
from sglang_triattn.patches.request import compressed as requests_patch
from sglang_triattn.patches.scheduler.idle_rows import Conversation
from sglang_triattn.request.lifecycle import CompressedRequest
from sglang_triattn.request.options import CompressionOptions
from sglang_triattn.rounds.plan import ceil_align

THINK_END = 4


def common_length(one: list[int], other: list[int]) -> int:
    """How many first tokens are equal."""
    equal = (a == b for a, b in zip(one, other, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, equal))


@dataclass(frozen=True)
class Talk:
    """The account of a row that waits for a next turn; fields as those of Running, of the row that `kv` records."""

    kv: ReqKvInfo
    tokens: list[int]
    positions: torch.Tensor
    first_tainted: int | None
    prompt_length: int
    serial: int
    inputs: frozenset[int]
    neighbours: int


class Simulation(Memory):
    """Admission, decode, rounds, retraction and release as in SGLang's scheduler, one step at a time."""

    def __init__(self, *args, **options) -> None:
        """Takes the arguments of Memory."""
        super().__init__(*args, **options)
        self.running: list[Running] = []
        self.waiting: list[Running] = []
        self.finished: list[list[int]] = []
        self.talks: dict[int, Talk] = {}
        self.spoken: dict[str, list[int]] = {}
        self.kept_once: set[str] = set()
        self.resumed = self.found = self.cut = self.copied = self.shared_starts = 0
        self.barred = self.stripped = self.aborted_prefills = 0
        self.early_rounds = self.level_rounds = self.prefill_rounds = self.cut_rounds = self.input_rounds = 0
        self._serial = 0

    def counts(self) -> dict[str, int]:
        """How often each event happened."""
        return {
            "rounds": self.rounds,
            "early rounds": self.early_rounds,
            "first rounds that came early": self.level_rounds,
            "prefill rounds": self.prefill_rounds,
            "rows cut before their newest tokens": self.cut_rounds,
            "resumed turns": self.resumed,
            "rows found by their tokens": self.found,
            "rows resumed before their end": self.cut,
            "rows copied in case that a turn fails": self.copied,
            "rounds of rows with inputs": self.input_rounds,
            "shared starts of compacted rows": self.shared_starts,
            "rows barred by SGLang": self.barred,
            "stripped answers": self.stripped,
            "aborted prefills": self.aborted_prefills,
        }

    @property
    def rounds(self) -> int:
        return self.compressor.totals.rounds

    def request(
        self,
        prompt: list[int],
        conversation: str | None = None,
        *,
        asked: CompressionOptions | None = None,
        **fields,
    ) -> Running:
        """A request that asks for the server's settings, or for `asked`; the other `fields` are those of Running."""
        self._serial += 1
        req = Req(f"r{self._serial}", "", array("q", prompt), SamplingParams(max_new_tokens=CONTEXT))
        req.serial = self._serial
        req.skip_radix_cache_insert = fields.get("barred", False)
        requests_patch.attach_options(req, asked or self.options(conversation), self.reserve)
        return Running(req, **fields)

    def options(self, conversation: str | None = None) -> CompressionOptions:
        """Options of a request that asks for the server's settings."""
        auto = conversation is None and self.config.conversations == "auto"
        return CompressionOptions(self.config, conversation, auto=auto)

    def admit(
        self,
        running: Running,
        chunk: int,
        between_chunks: Callable[[Running], None] = lambda _: None,
        abort_at: int | None = None,
    ) -> bool:
        """Prefills in chunks of `chunk` tokens; returns False, with nothing changed, if the pool has no room.

        Args:
            between_chunks: runs the rounds between two chunks and updates the account.
            abort_at: when the client goes away: 2n before the rounds that follow chunk n, 2n + 1 after them.
        """
        req, owner = running.req, requests_patch.compression_of(running.req)
        with envs.SGLANG_RADIX_FORCE_MISS.override(self.force_miss):
            self._next_input(req, self.tree)
        idle, start = self.conversations.idle().get(owner.conversation), owner.start
        acquired = self.conversations.acquire(req)
        req.lock = self.tree.lock(req.last_node)
        needed = len(req.full_untruncated_fill_ids) - req.prefix_len + self.page_size
        if not self.make_room(needed) or not (acquired or self.make_row()):
            self.tree.unlock(req.lock)
            req.lock = None
            if acquired:
                self.conversations.rollback(req)
            return False
        self.rows.alloc([req])
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        req.is_retracted = False
        talk = None
        if acquired:
            talk = self.talks.pop(id(req.kv))
            self._go_on(running, talk)
        else:
            if req.prefix_len:
                row[: req.prefix_len] = self.tree.path_device_indices(req.last_node)[: req.prefix_len].to(row.dtype)
            running.positions = same_for_all(range(req.prefix_len))
            running.first_tainted, running.prompt_length = None, len(req.origin_input_ids)
            running.inputs, running.neighbours = frozenset(), 0
        if owner.settings is not None:
            room = self.slots.available_size() + self.tree.evictable_size() - needed
            if self.window:
                room = min(room, self.allocator.swa_available_size() + self.tree.swa_evictable_size() - needed)
            self.conversations.commit(req, room)
        if talk is not None and owner.replaces is not None:
            self._account_for_copy(talk, owner.replaces.kv, req.prefix_len)
            if self.radix:
                evict_from_tree_cache(self.tree, needed)
            assert self.allocator.available_size() >= needed, "a copy took what its request needs"
        if start is None and owner.keeps_row:
            self._check_start(owner, acquired, idle)
        done = 0
        while not self._prefill(running, row, chunk):
            for work in (lambda: between_chunks(running), lambda: self._stash_new(req)):
                if done == abort_at or req.discard_output_reason is not None:
                    self._abort_prefill(running)
                    return True
                work()
                done += 1
            self._next_input(req)
        self.stash(req)
        self._say(running)
        self.running.append(running)
        return True

    def _go_on(self, running: Running, talk: Talk) -> None:
        """Makes the account of a row, cut where the request goes on, that of the request."""
        req, entries = running.req, running.req.prefix_len
        end = entries + requests_patch.compression_of(req).evicted_tokens
        assert common_length(talk.tokens, running.tokens) >= end, "a request goes on after other text"
        held = talk.positions[..., :entries]
        assert held.shape[-1] == entries, "a request goes on after more than the row has"
        assert bool((held < end).all()), "a row was cut among tokens that do not follow one another"
        running.positions, running.prompt_length, req.serial = held, talk.prompt_length, talk.serial
        running.first_tainted = talk.first_tainted
        if talk.first_tainted is not None:
            running.first_tainted = min(talk.first_tainted, end)
        running.inputs = frozenset(position for position in talk.inputs if position < end)
        running.neighbours = talk.neighbours
        if running.settings.keeps_inputs:
            running.inputs |= frozenset(range(end, len(running.tokens)))
            running.neighbours += 2 * (self.page_size - 1)
        self.resumed += 1
        self.found += requests_patch.compression_of(req).conversation is None
        self.cut += entries < talk.positions.shape[-1]

    def _account_for_copy(self, talk: Talk, kv: ReqKvInfo, entries: int) -> None:
        """Makes the account of a row, cut to its first `entries`, that of a copy which `kv` records, too."""
        self.talks[id(kv)] = replace(talk, kv=kv, positions=talk.positions[..., :entries])
        self.copied += 1

    def _keep(self, running: Running, kv: ReqKvInfo, held: torch.Tensor) -> None:
        """Keeps the account of a row that waits for a next turn; `held` are the positions of its entries."""
        assert not running.barred, "K/V that its tokens do not determine waits for other tokens"
        if (name := requests_patch.compression_of(running.req).conversation) is not None:
            self.kept_once.add(name)
        self.talks[id(kv)] = Talk(
            kv,
            running.tokens,
            held,
            running.first_tainted,
            running.prompt_length,
            running.req.serial,
            running.inputs,
            running.neighbours,
        )

    def _check_start(self, owner: CompressedRequest, acquired: bool, idle: Conversation | None) -> None:
        """Checks how the report says that a conversation started against the account of what was kept.

        Args:
            idle: the row of its name before it was admitted.
        """
        if acquired:
            expected = {"resumed"}
        elif idle is not None:
            # It may have made way for this very request; a spare's turn still runs.
            expected = {"diverged", "new" if idle.spare else "lost"}
        else:
            expected = {"lost" if owner.conversation in self.kept_once else "new"}
        assert owner.start in expected, f"the conversation is {owner.start}, not {expected}"
        if acquired:
            self.kept_once.discard(owner.conversation)

    def _abort_prefill(self, running: Running) -> None:
        running.req.finished_reason, kv = FINISH_ABORT(), running.req.kv
        with self.flags():
            self.ends.release(release_kv_cache, running.req, self.tree, checkpoint=False)
        owner = requests_patch.compression_of(running.req)
        if owner.kept:
            self._keep(running, kv, running.positions)
        self._note_spare(owner)
        self.aborted_prefills += 1

    def _note_spare(self, owner: CompressedRequest) -> None:
        """Notes that a conversation has gone back to the copy of its row."""
        gone_back = owner.start == "resumed" and not owner.kept and self.conversations.keeps(owner)
        if gone_back and owner.conversation is not None:
            self.kept_once.add(owner.conversation)

    def _prefill(self, running: Running, row: torch.Tensor, chunk: int) -> bool:
        """Prefills one chunk; True after the last."""
        req = running.req
        start, end = req.prefix_len, min(len(req.full_untruncated_fill_ids), req.prefix_len + chunk)
        req.extend_end = end
        positions = range(start + running.evicted, end + running.evicted)
        asked = running.tokens[positions.start : positions.stop]
        assert list(req.get_fill_ids()[start:]) == asked, "a prefill computes other tokens than come next"
        row[start:end] = self.allocate(row, start, end).to(row.dtype)
        self._write(running, row[start:end], positions)
        running.positions = torch.cat([running.positions, same_for_all(positions)], -1)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        return end == len(req.full_untruncated_fill_ids)

    def _stash_new(self, req: Req) -> None:
        # A round between two chunks has already given the tree its part.
        if req.extend_end > req.prefix_len:
            self.stash(req)

    def _next_input(self, req: Req, *tree) -> None:
        chunked_prefill._init_next_round(Req.init_next_round_input, req, *tree)

    def decode(self, running: Running) -> bool:
        """One more token; False if its answer is complete, or the context or the pool has no room for it."""
        complete = len(running.req.output_ids) >= running.req.sampling_params.max_new_tokens
        if complete or not self._compute_last(running):
            return False
        self._say(running)
        return True

    def _compute_last(self, running: Running) -> bool:
        """Computes K/V of the newest token."""
        kv = running.req.kv
        length, held = kv.kv_committed_len, kv.kv_allocated_len
        end = ceil_align(length + self.reserve, self.page_size) if self.reserve else length + 1
        position = length + running.evicted
        self.slide(running.req)
        if position + 1 + self.reserve >= CONTEXT or not self.make_room(self.page_size + self.reserve):
            return False
        row = self.rows.req_to_token[kv.req_pool_idx]
        if end > held:
            row[held:end] = self.allocate(row, held, end).to(row.dtype)
            kv.kv_allocated_len = end
        self._write(running, row[length : length + 1], [position])
        running.positions = torch.cat([running.positions, same_for_all([position])], -1)
        kv.kv_committed_len = length + 1
        return True

    def _say(self, running: Running) -> None:
        req, token = running.req, self._next_token(running)
        req.output_ids.append(token)
        if running.thinks:
            req.update_reasoning_tokens(token, [THINK_END])

    def compress(self, chunked: Running | None = None) -> SimpleNamespace:
        """Runs due rounds of the running batch and of a prefill between two chunks; returns the batch afterwards."""
        lengths = torch.tensor([r.req.kv.kv_committed_len for r in self.running])
        logical = torch.tensor([r.req.kv.kv_committed_len + r.evicted for r in self.running], dtype=torch.int32)
        batch = SimpleNamespace(
            reqs=[r.req for r in self.running],
            seq_lens=lengths.clone(),
            seq_lens_cpu=lengths,
            orig_seq_lens=logical,
            seq_lens_sum=int(lengths.sum()),
            batch_is_full=True,
        )
        self.compressor.run_due_rounds(batch, chunked=None if chunked is None else chunked.req)
        return batch

    def release(self, running: Running, *, finish: bool, abort: bool = False, overrun: bool = False) -> None:
        """Ends a request, or only its row.

        Args:
            finish: its answer is complete; otherwise it is retracted.
            abort: it finishes because its client went away.
            overrun: with overlap, the K/V of its newest token was computed before anyone knew that it was the last.
        """
        self.running.remove(running)
        req, owner = running.req, requests_patch.compression_of(running.req)
        held = running.positions[..., : len(running.tokens) - 1 - running.evicted]
        if overrun:
            self._compute_last(running)
        of_others = self._owned_of_others(running)
        if finish:
            req.finished_reason = FINISH_ABORT() if abort else FINISH_LENGTH(length=len(req.output_ids))
            self.finished.append(running.tokens[:-1])
        before, (least, most) = self.matched(running.tokens), self._for_the_tree(running)
        kv, protected = req.kv, req.kv.cache_protected_len
        with self.flags():
            self.ends.release(release_kv_cache, req, self.tree, checkpoint=finish)
        found = self.matched(running.tokens)
        most = max(before, most if finish else 0, of_others)
        assert found <= most, f"{req.rid}: the tree has {found} entries, but may have {most}"
        if finish:
            self._note_spare(owner)
        if owner.kept:
            self._keep(running, kv, held)
        elif finish:
            assert found >= least, f"{req.rid}: the tree has {found} exact entries, but {least} were there"
            self.shared_starts += running.first_tainted is not None and least > protected
        if finish and owner.conversation is not None:
            self.spoken[owner.conversation] = running.tokens

    def _for_the_tree(self, running: Running) -> tuple[int, int]:
        """Entries of a finished request's row that the tree must have, and the most that it may have."""
        req = running.req
        exact = exact_length(running.positions)
        if running.barred or not self.radix:
            self.barred += self.radix
            return 0, 0
        if self.strip_thinking and req.reasoning_tokens:
            self.stripped += exact > len(req.origin_input_ids)
            exact = min(exact, len(req.origin_input_ids))
        exact -= exact % self.page_size
        # Without the window at its end, SGLang finds no prefix.
        return 0 if self.window else exact, exact

    def _owned_of_others(self, running: Running) -> int:
        """Entries of a row that the tree may own from others, and does not find while their window is missing.

        What others gave to the tree has been checked when they did.
        """
        if not self.window:
            return 0
        owned = [other.tokens[: other.req.kv.cache_protected_len] for other in self.running]
        return max((common_length(running.tokens, tokens) for tokens in (*owned, *self.finished)), default=0)

    def matched(self, tokens: list[int]) -> int:
        """How many of the first `tokens` the tree has K/V for."""
        probe = Req("probe", "", array("q", [*tokens, 0]), SamplingParams(max_new_tokens=1))
        probe.init_next_round_input(self.tree)
        return probe.prefix_len

    def retract(self, running: Running) -> None:
        self.release(running, finish=False)
        running.req.reset_for_retract()
        self.waiting.append(running)

    def row(self, running: Running) -> torch.Tensor:
        """The slots of its computed entries."""
        kv = running.req.kv
        return self.rows.req_to_token[kv.req_pool_idx, : kv.kv_committed_len]

    def _write(self, running: Running, slots: torch.Tensor, positions) -> None:
        stamp = running.req.serial if running.evicted else 0
        if len(positions) == 1:
            # By a number: far cheaper than by a tensor of one, and most writes are of one.
            where: int | torch.Tensor = int(slots)
            content = content_of_one(running.tokens[positions[0]], positions[0], stamp)
        else:
            where = slots.long()
            content = contents(running.tokens, same_for_all(positions), stamp)
        for layer, (k, v) in enumerate(zip(self.pool.k_buffer, self.pool.v_buffer, strict=True)):
            k[where] = content[..., layer, 0, :, :]
            v[where] = content[..., layer, 1, :, :]
        if self.window:
            self.window_keys[self.allocator.full_to_swa_index_mapping[where]] = content[..., 0, 0, :, :]

    def _next_token(self, running: Running) -> int:
        # Depends only on what came before, so that retracted and repeated requests continue as they were.
        return 1 + (sum(running.tokens) * 31 + len(running.tokens)) % 5
