"""Models, each with one that drafts for it, and answers of their servers held to an account."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assistant_drafts import holding_of_assistant
from block_drafts import build_block_model, holding_of_blocks
from draft_account import Read, ReadNewest, Watched, WatchedLatent, WatchedVision, WholeModel, holding_of_head
from draft_heads import AUXILIARY, build_eagle, llama_config, load_eagle
from families import WINDOW
from family_servers import SETTINGS, STATE_ENV, STATE_FLAGS, modules_of, prepared, remote_code
from gemma4_family import ASSISTED, build_assistant
from harness import (
    BUDGET,
    DRAFTS,
    INTERVAL,
    KEYS_ALONE,
    RECENT,
    STEPS,
    TWO_GROUPS,
    Client,
    assert_pool_is_whole,
    compression,
    cores_for,
    greedy,
    only_models,
    prompt,
    python_path,
    served_logprobs,
)
from latent_family import LatentOracle
from layered_drafts import LAYERED, Layers, holding_of_layers
from lora_adapter import MODULES, build_adapter, install_unpinned, merge, serving
from mtp_family import MtpHead
from ngram_account import computed_before
from oracle import TOLERANCE, Oracle, oracle_of
from repeating_model import in_circle
from step_drafts import CHAINED, ChainedLayers
from storm import assert_withstood, storm
from tiny_model import TinyModel
from vision_account import VisionOracle
from vision_families import VisionModel

# Rounds that move K/V, in slots and in pages, by sets of each head and by one set; and rounds that move none.
MODES = {
    "moved": ("--page-size", "1"),
    "pages": ("--page-size", "16", "--triattention-selection", "union"),
    "remapped": ("--page-size", "1", "--triattention-selection", "shared-mean"),
    "ranks": ("--tp-size", "2", "--triattention-selection", "union"),
    "overlap off": ("--disable-overlap-schedule",),
    "groups": (*TWO_GROUPS, "--page-size", "1", "--triattention-selection", "shared-mean"),
    "ordered": ("--page-size", "1", "--triattention-recency", "0.5"),
}


def choosing(mode: str) -> tuple[str, ...]:
    """Flags by which scores alone choose, unless the mode needs values."""
    return () if mode == "ordered" else KEYS_ALONE


def cores_of(mode: str) -> dict[str, str]:
    """The environment in which a server in this mode runs: its ranks have two cores by turns."""
    return cores_for(MODES[mode])


# SGLang's settings of a block.
BLOCKS = ("--speculative-num-draft-tokens", str(STEPS + 1))
# Tokens that a draft model sees of a row; the first ones that EAGLE's sees, too; and those that a window layer of one
# that drafts blocks sees.
NEWEST, SINKS, NEAR = 48, 8, 20
# Gemma-4's draft model, which has no K/V.
ASSISTANT = "NEXTN assistant windows"
# Models with a draft layer of their own.
WITH_LAYER = {
    "NEXTN": "glm-4.5-mtp",
    "NEXTN latent": "deepseek-v3-mtp",
    "NEXTN states": "qwen3-next-mtp",
    "NEXTN more states": "qwen3-next-twice-mtp",
    "NEXTN axes": "qwen3.5-mtp",
    "NEXTN published": "qwen3.5-whole-mtp",
    "NEXTN experts": "qwen3.5-moe-whole-mtp",
    "EAGLE layers windows": LAYERED,
    "NEXTN layers windows": LAYERED,
    "EAGLE chained layers windows": CHAINED,
    "NEXTN chained layers windows": CHAINED,
}
# Models of other kinds for which blocks are drafted.
OF_BLOCKS = {
    "DFLASH windows": "gpt-oss",
    "DFLASH states": "qwen3-next",
    "DFLASH latent": "deepseek-v3",
    "DFLASH published": "qwen3.5-whole-mtp",
}
# Tested with adapters of the output projection alone: SGLang takes the queries of some for narrower than they are.
UNEVEN = ("NEXTN states", "NEXTN axes", "EAGLE layers windows")
KEEP_STATES = (
    "DFLASH states",
    "DFLASH published",
    "NEXTN states",
    "NEXTN more states",
    "NEXTN axes",
    "NEXTN published",
    "NEXTN experts",
)


@dataclass(frozen=True, eq=False)
class Pair:
    """A model and the one that drafts for it.

    Attributes:
        name: SGLang's name for this way of drafting, and what is particular about it.
        target: the model.
        account: its oracle.
        path: of the model that drafts; None if it comes with the target.
    """

    name: str
    target: TinyModel
    account: Oracle
    path: Path | None

    # SGLang's settings of a draft, and the most tokens of it that may hold.
    numbers = DRAFTS
    steps = STEPS

    @property
    def args(self) -> tuple[str, ...]:
        path = () if self.path is None else ("--speculative-draft-model-path", str(self.path))
        states = STATE_FLAGS if self.name in KEEP_STATES else ()
        algorithm = self.name.split()[0]
        # SGLang sets it for EAGLE alone.
        layers = ("--enable-multi-layer-eagle",) if self.in_layers and algorithm == "NEXTN" else ()
        numbers = BLOCKS if self.drafts_blocks else self.numbers
        if self.name.endswith("newest"):
            numbers = (*numbers, "--speculative-draft-window-size", str(NEWEST))
        if self.name == "EAGLE newest":
            numbers = (*numbers, "--speculative-draft-sink-size", str(SINKS))
        return ("--speculative-algorithm", algorithm, *numbers, *path, *states, *layers, *self.code)

    @property
    def code(self) -> list[str]:
        """The flag of a model that brings its configuration along."""
        return remote_code(WITH_LAYER.get(self.name, ""))

    @property
    def in_layers(self) -> bool:
        """Whether each token of a draft has a layer of the model's own."""
        return self.name.endswith("layers windows")

    @property
    def has_windows(self) -> bool:
        """Whether layers of the model attend to a window; the account of any family has a number for it."""
        return self.name.endswith("windows")

    @property
    def settings(self) -> tuple[str, ...]:
        """Flags of compression that the model needs."""
        return tuple(SETTINGS) if self.has_windows else ()

    @property
    def budgets(self) -> tuple[int, int]:
        """The least budget that a request of a storm may ask for, and the first that is too large."""
        return (WINDOW + 1, self.account.budget) if self.has_windows else (24, BUDGET)

    @property
    def env(self) -> dict[str, str]:
        family = ASSISTED if self.name == ASSISTANT else {**WITH_LAYER, **OF_BLOCKS}.get(self.name)
        if family:
            own, heads = modules_of(family), ()
        else:
            own = self.target.modules if isinstance(self.target, VisionModel) else ("llama", "gpt_oss")
            heads = "llama_eagle", "llama_eagle3"
        if self.drafts_blocks:
            heads = ("dflash",)
        return {**only_models(*own, *heads), **(STATE_ENV if self.name in KEEP_STATES else {})}

    @property
    def drafts_blocks(self) -> bool:
        """Whether a draft is a block of tokens that are drafted at once."""
        return self.name.startswith("DFLASH")

    def texts(self) -> list[list[int]]:
        """Prompts after which some drafts hold and some do not."""
        if self.name == "STANDALONE":
            return [prompt(60 + number, 40) for number in range(3)]
        return [prompt(5, 12) + in_circle(38)]

    def watched(self, mode: str) -> Watched:
        """The account of a server in this mode."""
        selection = MODES[mode][-1] if "--triattention-selection" in MODES[mode] else "per-layer-head"
        # Steps are queued, before which rounds empty whole pages.
        page_size = 16 if mode == "pages" else 1
        sizes = {"round_to": page_size, "page_size": page_size, "remaps": mode in ("remapped", "ranks", "groups")}
        if not self.has_windows:
            sizes |= {"budget": BUDGET, "interval": INTERVAL, "recent": RECENT}
        kinds = {LatentOracle: WatchedLatent, VisionOracle: WatchedVision}
        account = kinds.get(type(self.account), Watched)
        chosen = {"value_share": None, "recency": 0.5} if mode == "ordered" else {"value_share": 0.0}
        return account(**{**vars(self.account), **sizes, **chosen, "selection": selection})

    def holding(self, ids: list[int], account: Watched, starts: list[int]) -> list[int | None]:
        """How many of the tokens drafted at each step hold by an account, see `draft_account`."""
        model, sure = self.account.model, 2 * TOLERANCE
        if self.name == ASSISTANT:
            return holding_of_assistant(self.path, account, ids, starts, STEPS, sure)
        if self.drafts_blocks:
            return holding_of_blocks(self.path, account, ids, starts, sure, NEWEST * self.name.endswith("newest"))
        if self.in_layers:
            path, hidden = self.target.path, account.hidden
            if WITH_LAYER[self.name] == CHAINED:
                # Before the last norm.
                layers, hidden = ChainedLayers(path), account.inputs[model.config.num_hidden_layers]
            else:
                layers = Layers(path, model.lm_head)
            return holding_of_layers(layers, model, ids, hidden, starts, sure)
        return holding_of_head(self.read(ids, account), starts, STEPS, sure)

    def read(self, ids: list[int], account: Watched) -> Read:
        """What a draft model without layers for single tokens reads of the text, by an account."""
        model, places = self.account.model, torch.arange(len(ids) + self.steps)[None]
        group = model.config.get_text_config().num_attention_heads // account.seen.shape[1]
        if self.name == "STANDALONE":
            # Without an adapter that the account may have.
            model, seen = self.target.load(), account.seen.repeat_interleave(group, 1)
            own = model.get_input_embeddings(), model.lm_head
            return Read(WholeModel(model), *own, ids, seen, account.inputs[0], account.hidden, places)
        # It has one layer. Where the model scores one, each head follows its own, else all the last one's first.
        seen = account.seen.repeat_interleave(group, 1) if len(account.seen) == 1 else account.seen[-1:, :1]
        third, hidden = self.name.startswith("EAGLE3"), account.hidden
        if third:
            hidden = torch.cat([account.inputs[layer + 1] for layer in AUXILIARY], -1)
        head = load_eagle(self.path, third=third) if self.path else self._layer()
        # SGLang gives token counts to a draft model without several axes, as to the layer of Qwen3.5, of which it drops
        # them (sglang/srt/models/qwen3_5_mtp.py).
        if getattr(head, "sections", ()):
            places = account.places(len(ids) + self.steps)
        what = (head, model.get_input_embeddings(), model.lm_head, ids, seen.clone(), account.inputs[0], hidden, places)
        if not self.name.endswith("newest"):
            return Read(*what)
        return ReadNewest(*what, lambda place: account.drafting_row(-1, 0, place), NEWEST, None if third else SINKS)

    def _layer(self) -> MtpHead:
        return MtpHead(self.target.path, WITH_LAYER[self.name])


class Pairs(dict[str, Pair]):
    """A Pair for each way of drafting, by its name, built when a test first asks for it."""

    def __init__(self, tiny: TinyModel, repeating: TinyModel, folder: Path) -> None:
        super().__init__()
        self.tiny, self.repeating, self.folder = tiny, repeating, folder

    def __missing__(self, name: str) -> Pair:
        self[name] = self._built(name)
        return self[name]

    def _built(self, name: str) -> Pair:
        if name.startswith("NEXTN") and name.endswith("layers windows"):
            return replace(self[name.replace("NEXTN", "EAGLE")], name=name)
        # Two variants of one family have one name.
        folder = self.folder / name.replace(" ", "-")
        folder.mkdir()
        if name in WITH_LAYER:
            return Pair(name, *prepared(folder, WITH_LAYER[name]), None)
        if name in OF_BLOCKS:
            target, account = prepared(folder, OF_BLOCKS[name], repeating=True)
            return Pair(name, target, account, build_block_model(folder, target))
        if name.startswith("DFLASH"):
            drafting = build_block_model(folder, self.repeating, NEAR * name.endswith("near"))
            return Pair(name, self.repeating, oracle_of(self.repeating), drafting)
        if name == "EAGLE3 windows":
            target, account = prepared(folder, "gpt-oss", repeating=True)
            return Pair(
                name, target, account, build_eagle(folder, target, third=True, noise=0.45, config=llama_config())
            )
        if name == ASSISTANT:
            target, account = prepared(folder, ASSISTED)
            return Pair(name, target, account, build_assistant(folder, target.path))
        if name == "STANDALONE":
            return Pair(name, self.tiny, oracle_of(self.tiny), self.tiny.path)
        third = name.startswith("EAGLE3")
        head = build_eagle(folder, self.repeating, third=third, noise=0.25 if third else 0.9)
        return Pair(name, self.repeating, oracle_of(self.repeating), head)


def hold_drafts(
    client: Client, steps: Callable[[], list[dict]], pair: Pair, mode: str, ids: list[int], tokens: int, first: int = 0
) -> list[int]:
    """Holds an answer of several rounds, and its drafts from the place `first` on, to their account; returns how many
    held at each step.

    Args:
        steps: of the server's probe.
    """
    steps()
    response = client.generate(ids, tokens, logprobs=True)
    frozen = len(ids) - len(ids) % client.setting("page_size")
    found = drafts_with_account(pair, mode, ids, response, steps(), frozen, first=first)
    assert compression(response)["rounds"] >= 6
    return found


def assert_some_hold(pair: Pair, found: list[int], least: int) -> None:
    """Asserts that of more than `least` drafts some hold and some do not: 0.05 of the tokens hold with random weights,
    0.9 where the circle is followed."""
    assert len(found) > least
    assert 0.02 * pair.steps * len(found) < sum(found) < 0.96 * pair.steps * len(found)


def drafts_with_account(pair, mode, ids, response, steps, frozen, chunk=None, first=0) -> list[int]:
    """How many drafts held at each step whose outcome an account is sure of; holds answer and drafts to it, drafts
    from the place `first` on."""
    account, done, runs = fitting_account(pair, mode, ids, response, steps, frozen, chunk)
    everything, found = ids + response["output_ids"][:-1], []
    # Where the last recorded step ended is not known for certain.
    for (start, end), held in list(zip(runs, pair.holding(everything, account, done), strict=True))[
        : len(computed_before(steps, len(ids))) - 1
    ]:
        if held is not None and start >= first:
            assert end - start == held + 1, start
            found.append(held)
    return found


def fitting_account(
    pair, mode, ids, response, steps, frozen, chunk=None
) -> tuple[Watched, list[int], list[tuple[int, int]]]:
    """Holds an answer to its account; returns that, the tokens computed before each step, and where each began and
    ended."""
    everything = ids + response["output_ids"][:-1]
    recorded = computed_before(steps, len(ids))
    values, tokens = served_logprobs(response)
    account, overlap, differ = pair.watched(mode), mode != "overlap off", []
    account.overlap = overlap
    # Nothing records where the last step began, which may be before a round or after it.
    ends = range(recorded[-1] + 1, min(recorded[-1] + pair.steps + 2, len(everything)))
    for done in (recorded, *([*recorded, last] for last in ends)):
        runs = list(zip(done, [*done[1:], len(everything)], strict=True))
        expected, rounds = account.logprobs(everything, len(ids), frozen, chunk=chunk, pauses=runs, late=overlap)
        differ.append((expected.gather(1, tokens) - values).abs().max())
        if compression(response)["rounds"] == rounds and differ[-1] < TOLERANCE:
            return account, done, runs
    pytest.fail(f"No account fits: log-probabilities differ by {differ} at least.")


def adapting(folder: Path) -> tuple[str, ...]:
    """Flags by which SGLang drafts STEPS tokens for one request, one for each of two, and none for more."""
    file, lengths = folder / "adaptive.json", {"1": [STEPS], "2": [1], "3": [0]}
    file.write_text(json.dumps({size: {"candidate_steps": steps} for size, steps in lengths.items()}))
    first = ("--speculative-num-steps", "1", "--speculative-num-draft-tokens", "2")
    return ("--speculative-adaptive", "--speculative-adaptive-config", str(file), *first)


def hold_changing_lengths(client: Client, steps: Callable[[], list[dict]], pair: Pair, mode: str) -> None:
    """Holds answers that a server with the flags of `adapting` drafts with each length, and its pool.

    Args:
        steps: of the server's probe.
    """
    steps()
    prompts = [prompt(5 + number, 12) + in_circle(38, 9 * number) for number in range(3)]
    asked = [greedy(tokens + 100 * pair.has_windows) for tokens in (200, 330, 480)]
    answers = client.generate_each(list(zip(prompts, asked, strict=True)), logprobs=True)
    hold_each_length(client, steps(), [(pair, *each) for each in zip(prompts, answers, strict=True)], mode)


def hold_each_length(
    client: Client, steps: list[dict], answers: list[tuple[Pair, list[int], dict[str, Any]]], mode: str
) -> None:
    """Holds three answers of different lengths to accounts of steps of each length, and the server's pool.

    Args:
        steps: of the server's probe, while it answered.
        answers: of each prompt's pair, ids and response, the longest last.
    """
    for pair, ids, answer in answers:
        rid = answer["meta_info"]["id"]
        own = [{"requests": [one for one in step["requests"] if one["rid"] == rid]} for step in steps]
        own = [step for step in own if step["requests"]]
        frozen = len(ids) - len(ids) % client.setting("page_size")
        _, _, runs = fitting_account(pair, mode, ids, answer, own, frozen)
        assert compression(answer)["rounds"] >= 4
        taken = {end - start for start, end in runs[:-1]}
    # Of the longest answer, tokens in steps of each length; more than two come of the longest alone.
    assert taken >= {1, 2}
    assert max(taken) > 2
    switched = re.findall(r"Switch adaptive runtime state: steps (\d) -> (\d)", client.server.log_path.read_text())
    assert {number for change in switched for number in change} == {"0", "1", str(STEPS)}
    assert_pool_is_whole(client)


def hold_adapter(probed, pair, mode, folder, monkeypatch) -> None:
    """Holds an adapter's answer, and the drafts that the base model's draft model makes for it, to an account."""
    modules = ("o_proj",) if pair.name in UNEVEN else MODULES
    pair = replace(pair, account=merge(copy.deepcopy(pair.account), pair.target, modules))
    monkeypatch.setenv("PYTHONPATH", python_path(install_unpinned(folder / "unpinned")))
    adapter = serving(build_adapter(folder, pair.target, modules))
    flags = (*pair.args, *adapter, *MODES[mode], *pair.settings, *KEYS_ALONE)
    client, steps = probed(*flags, model=pair.target, env=pair.env)
    page_size, ids = client.setting("page_size"), pair.texts()[0]
    client.flush()
    steps()
    response = client.generate(ids, 430, logprobs=True, lora="other")
    assert drafts_with_account(pair, mode, ids, response, steps(), len(ids) - len(ids) % page_size)
    assert compression(response)["rounds"] >= 9


def weather_storm(client: Client, pair: Pair) -> None:
    """Sends a server that drafts a storm, and holds it to having withstood it."""
    # States keep no conversation's row while tokens are drafted.
    names = 0 if pair.name in KEEP_STATES else 6
    _, finished = storm(client, 7, 30, pair.budgets, 1500, conversations=names)
    assert_withstood(client, finished, 30)
