"""`sglang-triattn verify` on real servers: all is well, and each planted fault is found, in the row that names it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import pytest

import dormant_faults
import prepare_model
from forked_servers import running_server
from harness import BUDGET, INTERVAL, STRICT, Client, install_plugin, prompt, python_path
from sets import wide
from sglang_triattn.cli import main as cli
from sglang_triattn.verify.checks import CHECKS
from tiny_model import TinyModel

# SGLang would end a server that loses slots; here, a check has to find out.
LENIENT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "0",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "0",
    "SGLANG_DEBUG_MEMORY_POOL": "0",
    "SGLANG_TRIATTN_CHECK": "0",
}
# Each check fails by one of these.
FAULTS = {
    "reports are exchanged": {"report", "freed", "bound", "counters", "metrics", "conversation"},
    "rounds come too early": {"report", "exact"},
    "rounds are reported and not done": {"effect", "memory", "tree", "conversation"},
    "a round writes to the prefix": {"frozen prefix"},
    "no prefix is ever found": {"prefix cache"},
}
OTHER_FAULTS = {
    "the sums stand still": {"counters", "metrics"},
    "rounds are counted twice": {"counters", "metrics"},
    "the metrics stand still": {"metrics"},
    "fewer slots are freed than tokens evicted": {"freed", "counters", "metrics"},
    "requests within the budget are altered": {"exact"},
    "the tree takes compacted rows": {"tree"},
    "no conversation is resumed": {"conversation"},
    "freed slots are lost": {"memory"},
}
FAULTS_OF_TRAINED_MODELS = {
    "positions are places in the row": {"positions"},
    "a conversation resumes another row": {"conversation"},
}


@pytest.fixture(scope="module")
def smollm():
    model, stats = prepare_model.prepare()
    return TinyModel(model, stats)


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """(environment of a server with dormant faults, a function that wakes the fault of this name)."""
    folder = tmp_path_factory.mktemp("faults")
    install_plugin(folder, "dormant_faults", Path(dormant_faults.__file__).read_text())
    file = folder / "awake"
    file.write_text("")
    return {**LENIENT, "PYTHONPATH": python_path(folder), "FAULT_FILE": str(file)}, file.write_text


@pytest.fixture(scope="module")
def faulty(serve, faults):
    """A server of the tiny model with dormant faults, and the function that wakes one."""
    env, wake = faults
    return serve(env=env), wake


@pytest.fixture(scope="module")
def faulty_smollm(forkserver, smollm, faults, tmp_path_factory):
    """The same of a trained model, with the server's own budget."""
    env, wake = faults
    with running(forkserver, smollm, tmp_path_factory, {**STRICT, **env}) as client:
        yield client, wake


@contextmanager
def running(forkserver, model, tmp_path_factory, env, *more: str):
    args = ["--enable-triattention", "--triattention-stats", str(model.stats), "--enable-metrics", *more]
    # In bfloat16, processors without bfloat16 arithmetic would take minutes.
    args += ["--dtype", "float32", "--max-total-tokens", "6144", "--sleep-on-idle"]
    log = tmp_path_factory.mktemp("logs") / "log"
    with running_server(forkserver, model.path, args, env, log) as server:
        yield Client(server)


@pytest.fixture
def verify(capsys):
    """`verify(client, *options)` returns the exit status, and the findings of --json."""

    def run(client: Client, *options: str) -> tuple[int, dict]:
        status = cli.main(["verify", "--url", client.url, "--json", *options])
        return status, json.loads(capsys.readouterr().out)

    return run


def names(answer: dict, status: str) -> set[str]:
    return {check["name"] for check in answer["checks"] if check["status"] == status}


@pytest.mark.wide
def test_all_is_well(verify, faulty_smollm):
    """Prevents false alarms on a trained model with a prefix tree, and checks that are quietly left out."""
    status, answer = verify(faulty_smollm[0])
    assert names(answer, "passed") == set(CHECKS), answer
    assert (status, answer["passed"], answer["shared"]) == (0, True, False)


@pytest.mark.parametrize(("trained", "untested"), [(False, {"positions"}), wide(True, set())])
def test_all_is_well_in_pages(verify, capsys, forkserver, tiny, tmp_path_factory, trained, untested):
    """Prevents false alarms, and checks that ask too little, where whole pages are freed; with an API key."""
    more = ("--page-size", "16", "--api-key", "secret", *(() if trained else ("--skip-tokenizer-init",)))
    model = TinyModel(*prepare_model.prepare()) if trained else tiny
    with running(forkserver, model, tmp_path_factory, STRICT, *more) as client:
        status, answer = verify(client, "--api-key", "secret")
        assert names(answer, "passed") == set(CHECKS) - untested, answer
        assert (status, answer["page_size"]) == (0, 16)
        assert_one_sentence(client.url, "refuses the API key", capsys)


def test_a_random_model_is_not_blamed(verify, faulty):
    """Prevents a model that never copies from failing, or from passing, the checks that need it to."""
    status, answer = verify(faulty[0])
    assert status == 0
    assert names(answer, "not tested") == {"positions"}
    assert names(answer, "passed") == set(CHECKS) - {"positions"}, answer


@pytest.mark.parametrize("fault", [*FAULTS, *map(wide, OTHER_FAULTS)])
def test_fault_is_found(verify, faulty, fault):
    """Prevents checks that cannot fail: each fault fails its own, and no others."""
    # Metrics take in at a round what a fault before kept from them.
    faulty[0].generate(prompt(1, 8), BUDGET + 2 * INTERVAL)
    assert_found(verify, *faulty, fault, {**FAULTS, **OTHER_FAULTS}[fault])


@pytest.mark.wide
@pytest.mark.parametrize("fault", ["positions are places in the row", "a conversation resumes another row"])
def test_fault_is_found_by_copying(verify, faulty_smollm, fault):
    """Prevents wrong positions, and rows with other content, from passing where a trained model would show them."""
    assert_found(verify, *faulty_smollm, fault, FAULTS_OF_TRAINED_MODELS[fault])


def assert_found(verify, client, wake, fault: str, expected: set[str]) -> None:
    wake(fault)
    try:
        status, answer = verify(client)
    finally:
        wake("")
    assert names(answer, "failed") == expected, answer
    assert status == 1
    client.assert_alive()


def assert_one_sentence(url: str, sentence: str, capsys) -> None:
    assert cli.main(["verify", "--url", url]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_plain_sglang_is_recognised(serve, capsys):
    """Prevents a table of failures for a server that was never asked to compress."""
    assert_one_sentence(serve(compressed=False).url, "does not compress: start it with --enable-triattention", capsys)
