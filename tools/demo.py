"""Serve a prepared model with TriAttention, outgrow its budget, show what was evicted and freed."""

import argparse
import json
import textwrap
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor, wait
from http.client import HTTPException

import prepare_model
from checkout import ROOT
from env import cache_root, fail
from server import Server, ServerError, exit_on_signals, running_server, triattention_args

NEW_TOKENS = 700
REQUEST_TIMEOUT_S = 900
POLL_S = 1.0
PROGRESS_S = 20.0

# Long on purpose: this is the prefix that the radix tree shares among the requests and that is never evicted.
SYSTEM_PROMPT = """\
You are the guide of a small science museum and you talk with visitors of every age. Answer in plain \
English and in full paragraphs, the way a patient teacher would write to a curious friend. Begin with \
the idea that matters most, then explain the reason behind it, and only then turn to the details. \
Whenever you use a technical word for the first time, say in the same sentence what it means. Prefer one \
good example from daily life to three abstract ones: kitchens, bicycles, gardens, rivers and weather are \
always welcome. Keep numbers round and give them a scale that a visitor can picture, such as the height \
of a house or the length of a day. If a question has more than one honest answer, describe each of them \
fairly and say what speaks for it. Never invent a name, a date or a quotation, and say openly when \
something is not known. Do not use lists, headings or tables, because your answers are read aloud. Take \
your time: visitors have come a long way and they enjoy a long, careful explanation more than a short \
one. After the explanation add what people once believed about the matter, how it was found to be wrong, \
and which experiment a visitor could try at home with simple things. Close by naming one question about \
the same subject that nobody has answered yet."""

QUESTIONS = [
    "How does a bicycle stay upright while it is moving?",
    "Why is the sky blue at noon and red in the evening?",
    "How do bees find their way back to the hive?",
    "Why does bread rise in the oven?",
]

COLUMNS = {
    "request": "request",
    "prompt": "prompt tokens",
    "cached": "cached prefix",
    "logical": "logical length",
    "physical": "physical length",
    "rounds": "rounds",
    "evicted": "evicted tokens",
    "freed": "freed slots",
}


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        return json.load(response)


def generate(server: Server, prompt: str, new_tokens: int) -> dict:
    # `ignore_eos` makes every request decode far past the budget, whenever the model would have stopped.
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return post(f"{server.url}/generate", {"text": prompt, "sampling_params": sampling})


def pool_tokens_in_use(server: Server) -> int:
    """KV slots that running requests hold now, shared ones counted once; asking costs the scheduler nothing."""
    with urllib.request.urlopen(f"{server.url}/v1/loads?include=core", timeout=30) as response:
        return sum(load["num_used_tokens"] for load in json.load(response)["loads"])


def watch_pool(server: Server, running: list[Future]) -> int:
    """Returns the most slots seen in use until all of `running` are done."""
    start = printed = time.monotonic()
    peak = 0
    while wait(running, timeout=POLL_S).not_done:
        in_use = pool_tokens_in_use(server)
        peak = max(peak, in_use)
        if time.monotonic() - printed >= PROGRESS_S:
            printed = time.monotonic()
            print(f"  {printed - start:4.0f} s: {in_use:,} slots in use", flush=True)
    return peak


def row(name: str, meta: dict) -> dict:
    """One line of the table, from a response's `meta_info`."""
    if "triattention" not in meta:
        raise ServerError("the response's meta_info has no `triattention`: the server ran without TriAttention.")
    report = meta["triattention"]
    return {
        "request": name,
        "prompt": meta["prompt_tokens"],
        "cached": meta["cached_tokens"],
        "logical": report["logical_length"],
        "physical": report["physical_length"],
        "rounds": report["rounds"],
        "evicted": report["evicted_tokens"],
        "freed": report["freed_slots"],
    }


def table(rows: list[dict]) -> str:
    cells = [[COLUMNS[name] for name in COLUMNS]]
    cells += [[value if isinstance(value, str) else f"{value:,}" for value in line.values()] for line in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    aligned = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([aligned[0], "  ".join("-" * width for width in widths), *aligned[1:]])


def held_together(rows: list[dict], length: str) -> int:
    """Slots that all requests hold when they end, with their shared prefix counted once."""
    return sum(line[length] - line["cached"] for line in rows) + max(line["cached"] for line in rows)


def summary(rows: list[dict], peak: int) -> str:
    dense, held = held_together(rows, "logical"), held_together(rows, "physical")
    lines = [
        f"KV held at the end, shared prefix counted once: {held:,} slots. Dense attention would hold "
        f"{dense:,}, {dense / held:.1f} times as many.",
        f"Most slots in use while they ran, asked every {POLL_S:.0f} s: {peak:,}.",
    ]
    return "\n".join(lines)


def shortened(text: str, characters: int = 420) -> str:
    text = " ".join(text.split())
    if len(text) > characters:
        half = characters // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    return textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="  ")


def talk(server: Server, model) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def prompt(question: str) -> str:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    print("one request alone, so that the system prompt is in the radix tree", flush=True)
    generate(server, prompt("Are you ready?"), 8)
    print(f"{len(QUESTIONS)} requests at once, {NEW_TOKENS} new tokens each", flush=True)
    start = time.monotonic()
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        running = [pool.submit(generate, server, prompt(question), NEW_TOKENS) for question in QUESTIONS]
        try:
            peak = watch_pool(server, running)
        except BaseException:
            # The threads keep this process alive until they are answered; without a server they fail.
            server.process.kill()
            raise
    answers = [future.result() for future in running]
    seconds = time.monotonic() - start
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"\n{question}  ({len(answer['text']):,} characters)\n{shortened(answer['text'])}")
    rows = [row(str(number), answer["meta_info"]) for number, answer in enumerate(answers, 1)]
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    print("\n(A model this small repeats itself when it has to go on, without compression too.)")
    print(f"\n{table(rows)}\n\n{summary(rows, peak)}\n{tokens:,} tokens in {seconds:.0f} s.")
    if not all(line["rounds"] for line in rows):
        raise ServerError("a request outgrew the budget and was never compacted.")
    if not all(line["logical"] - line["physical"] == line["evicted"] == line["freed"] for line in rows):
        raise ServerError("a request holds other slots than those that it did not free.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    prepare_model.add_model_option(parser)
    name = parser.parse_args().model
    exit_on_signals()
    log = cache_root() / "logs" / "demo-server.log"
    try:
        model, stats = prepare_model.prepare(name)
        print(f"starting the server (about a minute on a CPU); its log: {log}", flush=True)
        # From the checkout, as a user who has just cloned it: none of its folders may shadow a package.
        with running_server(model, triattention_args(stats), log_path=log, folder=ROOT) as server:
            talk(server, model)
    except ServerError as error:
        fail(str(error))
    except (OSError, HTTPException) as error:
        fail(f"the server stopped answering ({error}); its log is {log}.")
    except KeyboardInterrupt:
        fail("interrupted; nothing is left running.")


if __name__ == "__main__":
    main()
