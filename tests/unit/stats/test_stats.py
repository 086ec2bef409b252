"""Statistics files: written atomically, read strictly, compared with the served model field by field."""

from pathlib import Path

import pytest
import torch

from sample_stats import FREQUENCIES, HEADS, KV_HEADS, LAYERS, rope, shape, stats
from sglang_triattn.stats.file import StatsError, check_stats, load_stats, save_stats
from stats_files import assert_one_sentence, damage, published


def test_round_trip(tmp_path):
    """Prevents a field from being lost or rounded between calibration and serving."""
    saved, path = stats(rope=rope(theta=1.23e6, attention_scaling=1.3466)), tmp_path / "s.safetensors"
    save_stats(saved, path)
    loaded = load_stats(path)
    assert torch.equal(loaded.mean, saved.mean)
    assert torch.equal(loaded.abs_mean, saved.abs_mean)
    assert torch.equal(loaded.rope.inv_freq, saved.rope.inv_freq)
    assert loaded.rope.inv_freq.dtype == torch.float64
    for field in ("num_kv_heads", "head_dim", "fingerprint", "token_count"):
        assert getattr(loaded, field) == getattr(saved, field)
    for field in ("attention_scaling", "rotary_dim", "style"):
        assert getattr(loaded.rope, field) == getattr(saved.rope, field)
    assert loaded.source == str(path)


def test_round_trip_of_a_file_without_model(tmp_path):
    """Prevents unknown fields from becoming the text "None"."""
    saved = stats(rope=None, fingerprint=None, token_count=None, num_kv_heads=None)
    save_stats(saved, tmp_path / "s.safetensors")
    loaded = load_stats(tmp_path / "s.safetensors")
    assert (loaded.rope, loaded.fingerprint, loaded.token_count, loaded.num_kv_heads) == (None,) * 4


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    """Prevents a full disk or a kill from destroying statistics, and temporary files from piling up."""
    path = tmp_path / "s.safetensors"
    save_stats(stats(), path)
    before = path.read_bytes()

    def fail(*arguments):
        Path(arguments[1]).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sglang_triattn.files.save_file", fail)
    with pytest.raises(StatsError, match="No space left") as error:
        save_stats(stats(), path)
    assert_one_sentence(error.value)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_triattn.files.save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_stats(stats(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["s.pt", "s", "missing/s.safetensors"])
def test_unwritable_names_are_refused(tmp_path, name):
    """Prevents a long calibration from ending in a traceback."""
    with pytest.raises(StatsError) as error:
        save_stats(stats(), tmp_path / name)
    assert_one_sentence(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "layers", "heads"), [
    ("qwen3_8b", 5, 12), ("ds_qwen7b", 2, 7), ("ds_llama8b", 2, 8),
])  # fmt: skip
def test_published_files(reference_files, name, layers, heads):
    """Prevents the paper's own files from being refused."""
    loaded = load_stats(reference_files / f"{name}.pt")
    assert loaded.mean.shape == loaded.abs_mean.shape == (layers, heads, 64)
    assert (loaded.mean.dtype, loaded.abs_mean.dtype) == (torch.complex64, torch.float32)
    assert loaded.head_dim == 128
    assert (loaded.rope, loaded.fingerprint, loaded.num_kv_heads, loaded.token_count) == (None,) * 4


def test_published_schema_distinguishes_layers_and_heads(tmp_path):
    """Prevents layer-major entries from being read head-major."""
    loaded = load_stats(published(tmp_path / "s.pt"))
    assert loaded.mean[2, 5, 0] == complex(2, 5)
    assert loaded.mean[1, 0, 7] == complex(1, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "interleaved"}, "RoPE style 'interleaved'"),
        ({"drop": ["layer01_head02"]}, "17 of 18 query heads"),
        ({"entry": {"q_mean_real": torch.zeros(3)}}, "not a TriAttention statistics file"),
        ({"entry": {"q_abs_mean": torch.full((8,), float("nan"))}}, "NaN or infinite"),
        ({"entry": {"q_abs_mean": torch.full((8,), 0.5)}}, "below the absolute mean"),
        ({"head_dim": 8}, "more frequencies than"),
    ],
    ids=["style", "missing-head", "ragged", "nan", "below-mean", "head-dim"],
)
def test_damaged_published_files_are_refused(tmp_path, options, message):
    """Prevents serving with statistics that lack heads or cannot be statistics at all."""
    with pytest.raises(StatsError, match=message) as error:
        load_stats(published(tmp_path / "s.pt", **options))
    assert_one_sentence(error.value)


class Malicious:
    def __reduce__(self):
        return (Path.touch, (Path("touched-by-unpickling"),))


@pytest.mark.parametrize("name", ["s.pt", "s.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not statistics", b"\x80\x02}q\x00."], ids=["empty", "text", "dict"])
def test_files_of_another_kind_are_refused(tmp_path, name, content):
    """Prevents a traceback for a file of the wrong kind."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StatsError) as error:
        load_stats(tmp_path / name)
    assert_one_sentence(error.value)


def test_pickled_code_is_not_run(tmp_path, monkeypatch):
    """Prevents a statistics file from running code."""
    monkeypatch.chdir(tmp_path)
    torch.save({"metadata": {}, "stats": Malicious()}, tmp_path / "s.pt")
    with pytest.raises(StatsError) as error:
        load_stats(tmp_path / "s.pt")
    assert_one_sentence(error.value)
    assert not (tmp_path / "touched-by-unpickling").exists()


def test_missing_and_unknown_files_are_refused(tmp_path):
    """Prevents an unclear error for the most common mistake, a wrong path."""
    with pytest.raises(StatsError, match="does not exist: make one with `sglang-triattn calibrate`"):
        load_stats(tmp_path / "none.safetensors")
    with pytest.raises(StatsError, match="does not exist"):
        load_stats(tmp_path)
    (tmp_path / "s.json").write_text("{}")
    with pytest.raises(StatsError, match="must end in"):
        load_stats(tmp_path / "s.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": {"format": "other"}}, "not a TriAttention statistics file"),
        ({"metadata": {"format_version": "99"}}, "format version 99"),
        ({"metadata": {"head_dim": "many"}}, "incomplete"),
        ({"metadata": {"style": "neox"}}, "unknown RoPE style 'neox'"),
        ({"metadata": {"rotary_dim": "14"}}, "rotary_dim disagrees"),
        ({"metadata": {"attention_scaling": "nan"}}, "not positive and finite"),
        ({"drop": ["style"]}, "incomplete"),
        ({"drop": ["abs_mean"]}, "incomplete"),
        ({"tensors": {"abs_mean": torch.ones(2, 2, 2)}}, "shapes disagree"),
        ({"tensors": {"mean_im": torch.full((LAYERS, HEADS, FREQUENCIES), float("inf"))}}, "NaN or infinite"),
        ({"metadata": {"layers": "[0, 1]"}}, "lists of layers do not fit"),
        ({"metadata": {"layers": "[0, 2, 1]"}}, "layers are out of order"),
        ({"metadata": {"rotates": "[true]"}}, "lists of layers do not fit"),
        ({"metadata": {"layers": "all"}}, "incomplete"),
        ({"metadata": {"layers": "3"}}, "incomplete"),
        ({"tensors": {"unrotated_mean": torch.zeros(LAYERS, HEADS, 3)}}, "unrotated dims disagree"),
        ({"tensors": {"inv_freq": -torch.ones(FREQUENCIES, dtype=torch.float64)}}, "not positive and finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_files_are_refused(tmp_path, changes, message):
    """Prevents a file that only looks right from giving NaN scores, or scores with another model's geometry."""
    save_stats(stats(), tmp_path / "s.safetensors")
    with pytest.raises(StatsError, match=message) as error:
        load_stats(damage(tmp_path / "s.safetensors", **changes))
    assert_one_sentence(error.value)


def test_fitting_statistics_pass():
    """Prevents refusing the right file because of float32 rounding of the frequencies."""
    rounded = rope(inv_freq=rope().inv_freq.float().double(), attention_scaling=1.0 + 1e-9)
    checked = check_stats(stats(), shape(rope=rounded))
    assert checked.rope is not None
    assert checked.num_kv_heads == KV_HEADS


def test_published_statistics_take_rope_from_the_model(tmp_path):
    """Prevents guessing frequencies when a file has none."""
    served = shape(rope=rope(theta=1e6))
    checked = check_stats(load_stats(published(tmp_path / "s.pt")), served)
    assert checked.rope is served.rope
    assert checked.num_kv_heads == KV_HEADS


@pytest.mark.parametrize(
    ("served", "message"),
    [
        ({"layers": (0, 1, 2, 3), "rotates": ()}, "layers is 3 there and 4 in the model"),
        ({"layers": (0, 1, 3)}, r"scored layers is \(0, 1, 2\) there and \(0, 1, 3\)"),
        ({"num_q_heads": 8}, "query heads is 6 there and 8"),
        ({"num_kv_heads": 3}, "KV heads is 2 there and 3"),
        ({"head_dim": 32}, "head_dim is 16 there and 32"),
        ({"rope": rope(rotary_dim=8)}, "rotary_dim is 16 there and 8"),
        ({"rope": rope(style="interleaved")}, "RoPE style is half there and interleaved"),
        ({"rope": rope(attention_scaling=1.3)}, r"attention scaling is 1\.0 there and 1\.3"),
        ({"rope": rope(theta=1e6)}, r"RoPE frequency 1 of 8 \(rope_theta or rope scaling\) is 0\.31"),
        ({"fingerprint": "0" * 32}, "fingerprint is f{32} there and 0{32}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_statistics_of_another_model_are_refused(served, message):
    """Prevents serving with another model's statistics: every stored field counts."""
    with pytest.raises(StatsError, match=message) as error:
        check_stats(stats(), shape(**served))
    assert_one_sentence(error.value)
    assert "sglang-triattn calibrate" in str(error.value)


def test_unknown_fingerprints_are_not_compared():
    """Prevents a refusal when either side cannot know the weights."""
    check_stats(stats(fingerprint=None), shape())
    check_stats(stats(), shape(fingerprint=None))


@pytest.mark.parametrize("served", [rope(style="interleaved"), rope(rotary_dim=8)], ids=["style", "rotary_dim"])
def test_published_statistics_fit_plain_rope_only(tmp_path, served):
    """Prevents a published file, always half style over the whole head, from meeting another layout."""
    with pytest.raises(StatsError):
        check_stats(load_stats(published(tmp_path / "s.pt")), shape(rope=served))
