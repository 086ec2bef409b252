"""Is a decode step right? Checked before any figure is reported, on the very graph that is timed.

A ledger holds copies of the K and V that the checked requests should hold: it starts from the pool, drops what a round
evicts, adds what each step computes, and never looks at a row again. Queries and keys are normalised and rotated again
in float64, at the ledger's own logical positions.
"""

from __future__ import annotations

import torch

from benchmarks.decode.batch import Batch
from benchmarks.decode.model import Layer, Shape
from benchmarks.decode.step import Step

TOLERANCE = 0.01
"""Largest error of a head's vector, relative to its length. bf16 alone causes about 0.003, a wrong token among a few
thousand several times this limit in the heads that weigh it most."""

GRAPH_TOLERANCE = 0.1
"""The same between a graph and its eager reference, in every layer: if a matrix product is split differently under
capture, bf16 makes the error grow to a few hundredths by the last layer. A graph that misses a change is off by about
1."""

LEAST_AGREEMENT = 0.99
"""Share of a round's kept tokens that its reference keeps too: nearly equal scores may fall either way."""

LAYERS = 3
REQUESTS = 2


class Ledger:
    """What some requests hold in some layers: K and V [H_kv, n, D] by (request, layer)."""

    def __init__(self, step: Step, batch: Batch) -> None:
        self._step, self._batch = step, batch
        last, count = step.requests - 1, len(step.buffers[0])
        self.requests = sorted({0, last})[:REQUESTS]
        self.layers = sorted({0, count // 2, count - 1})[:LAYERS]
        self.logical = {r: batch.logical[r] for r in self.requests}
        self.held = {
            (r, layer): [self._copy(buffers[layer], r) for buffers in step.buffers]
            for r in self.requests
            for layer in self.layers
        }

    def _copy(self, pool: torch.Tensor, request: int) -> torch.Tensor:
        slots = self._batch.rows.slots[request, : self._batch.lengths[request]].long()
        return pool[slots].transpose(0, 1)

    def evict(self, frozen: int) -> None:
        """Keeps what the rounds that just ran left: the frozen part and, beyond it, the kept tokens of each head."""
        for (r, layer), pair in self.held.items():
            if r in self._batch.kept:
                kept = self._batch.kept[r].long()
                kept = kept[layer] if kept.ndim == 3 else kept
                kept = kept.expand(len(pair[0]), -1)[..., None]  # [H_kv, keep, 1]
                self.held[r, layer] = [
                    torch.cat([x[:, :frozen], x[:, frozen:].gather(1, kept.expand(-1, -1, x.shape[-1]))], 1)
                    for x in pair
                ]

    def add(self, request: int, layer: int, *pair: torch.Tensor) -> None:
        """Appends K and V [H_kv, D] of the newest token."""
        held = self.held[request, layer]
        self.held[request, layer] = [torch.cat([x, new[:, None]], 1) for x, new in zip(held, pair, strict=True)]

    def attend(self, request: int, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attention [H_q, D] float32 of queries [H_q, D] over what the ledger holds."""
        k, v = (x.float() for x in self.held[request, layer])
        grouped = queries.float().view(len(k), -1, queries.shape[-1])
        weights = torch.softmax(grouped @ k.mT / queries.shape[-1] ** 0.5, -1)
        return (weights @ v).view(queries.shape)


def check(step: Step, batch: Batch, steps: int, what: str) -> float:
    """Checks `steps` steps of a batch that has been started; returns the largest relative error.

    Raises:
        SystemExit: an answer is wrong: attention is not over exactly the kept tokens, a position is not the logical
            one, the graph differs from the same work launched one by one, or a round keeps other tokens than its
            reference.
    """
    ledger, worst, rounds = Ledger(step, batch), 0.0, 0
    batch.notes_kept = True
    for _ in range(steps):
        expected = _reference_keeps(batch, ledger)
        batch.prepare()
        for r, kept in expected.items():
            agreement = _agreement(batch.kept[r], kept)
            _demand(
                agreement >= LEAST_AGREEMENT,
                what,
                f"a round agrees with its reference on {agreement:.3f} of the tokens",
            )
        rounds += len(expected)
        ledger.evict(batch.rounds.config.sinks if batch.rounds else 0)
        step.plan(batch)
        _compare_graph(step, what)
        for r in ledger.requests:
            for layer in ledger.layers:
                worst = max(worst, _compare_layer(step, ledger, r, layer, what))
            ledger.logical[r] += 1
    batch.notes_kept = False
    _demand(batch.rounds is None or rounds >= len(ledger.requests), what, "the check saw no round")
    return worst


def _compare_graph(step: Step, what: str) -> None:
    """Runs the planned step twice from the same state; the graph's run counts."""
    ids = step.ids.clone()
    step.eager()
    logits, answers = step.logits.clone(), [seen.answers.clone() for seen in step.seen]
    step.ids.copy_(ids)
    step.run()
    errors = [_error(seen.answers, other) for seen, other in zip(step.seen, answers, strict=True)]
    worst = max(*errors, _error(step.logits, logits))
    _demand(worst < GRAPH_TOLERANCE, what, f"the graph and the same work launched one by one differ by {worst:.4f}")
    chosen = torch.equal(step.ids, step.logits.argmax(-1))
    _demand(chosen, what, "the next tokens are not those of the largest logits")


def _compare_layer(step: Step, ledger: Ledger, r: int, layer: int, what: str) -> float:
    """Checks one request's queries, new K and V, and attention in one layer; adds the new token to the ledger."""
    model, seen, slot = step.model, step.seen[layer], step.slots[r]
    queries, key, value = expected_heads(
        model.shape, model.layers[layer], model.inv_freq, seen.qkv[r], ledger.logical[r]
    )
    k, v = step.buffers[0][layer][slot], step.buffers[1][layer][slot]
    rotation = max(_error(seen.queries[r], queries), _error(k, key), _error(v, value))
    _demand(
        rotation < TOLERANCE,
        what,
        f"queries or keys of layer {layer} are {rotation:.4f} off those at logical position {ledger.logical[r]}",
    )
    ledger.add(r, layer, k, v)
    attention = _error(seen.answers[r], ledger.attend(r, layer, seen.queries[r]))
    _demand(
        attention < TOLERANCE,
        what,
        f"attention of layer {layer} is {attention:.4f} off that over exactly the kept tokens",
    )
    return max(rotation, attention)


def expected_heads(shape: Shape, layer: Layer, inv_freq: torch.Tensor, qkv: torch.Tensor, position: int):
    """Queries [H_q, D], keys and values [H_kv, D] in float64 from one token's QKV, by RoPE's definition."""
    heads = qkv.double().view(-1, shape.head_dim)
    q, k, v = heads.split([shape.q_heads, shape.kv_heads, shape.kv_heads])
    turn = torch.polar(torch.ones_like(inv_freq), position * inv_freq).to(qkv.device)

    def prepared(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + shape.epsilon).sqrt() * weight.double()
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    return prepared(q, layer.q_norm), prepared(k, layer.k_norm), v


def _reference_keeps(batch: Batch, ledger: Ledger) -> dict[int, torch.Tensor]:
    """What checked requests with a due round should keep."""
    if batch.rounds is None:
        return {}
    config, frozen, found = batch.rounds.config, batch.rounds.config.sinks, {}
    for r in ledger.requests:
        length = batch.lengths[r]
        if length >= batch.rounds.bound:
            facts = torch.tensor([[length - frozen], [ledger.logical[r]]], device=batch.rows.slots.device)
            slots = batch.rows.slots[r : r + 1, frozen:length]
            keep = config.budget_for(frozen)
            found[r] = batch.rounds.reference.keep(slots, *facts, keep, min(config.recent, keep))[0]
    return found


def _agreement(kept: torch.Tensor, other: torch.Tensor) -> float:
    """Share of tokens that both hold, over all sets."""
    size = int(max(kept.max(), other.max())) + 1
    marks = [torch.zeros(*x.shape[:-1], size, device=x.device).scatter_(-1, x.long(), 1.0) for x in (kept, other)]
    return ((marks[0] * marks[1]).sum() / kept.numel()).item()


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error of a vector over the last dim, relative to its length; NaN counts as infinite."""
    got, expected = got.float(), expected.float()
    relative = (got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    return relative.nan_to_num(nan=float("inf")).max().item()


def _demand(right: bool, what: str, sentence: str) -> None:
    if not right:
        raise SystemExit(f"No figures: with {what}, {sentence}.")
