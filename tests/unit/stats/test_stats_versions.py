"""Statistics of dims and layers without RoPE, which version 2 of the file knows and version 1 does not."""

import pytest
import torch

from sample_stats import HEAD_DIM, HEADS, LAYERS, PARTIAL, partial_shape, partial_stats, shape, stats
from sglang_triattn.stats.file import StatsError, check_stats, load_stats, save_stats
from stats_files import assert_one_sentence, published, version_1


def test_round_trip_of_layers_and_unrotated_dims(tmp_path):
    """Prevents a file from forgetting which layers it measured, which of them have RoPE, and the rest of the head."""
    saved, path = partial_stats(), tmp_path / "s.safetensors"
    save_stats(saved, path)
    loaded = load_stats(path)
    assert torch.equal(loaded.unrotated_mean, saved.unrotated_mean)
    assert (loaded.layers, loaded.rotates) == ((0, 2, 5), (True, False, True))
    assert loaded.scored_dims == HEAD_DIM
    whole = stats(unrotated_mean=torch.zeros(LAYERS, HEADS, 0))
    save_stats(whole, path)
    assert load_stats(path).unrotated_mean.shape == (LAYERS, HEADS, 0)
    assert (load_stats(path).layers, load_stats(path).rotates) == ((0, 1, 2), (True,) * 3)


def test_where_the_turned_dims_begin(tmp_path):
    """Prevents rows of latents from being scored as if their first dims turned, and the reverse."""
    path, start = tmp_path / "s.safetensors", HEAD_DIM - 2 * PARTIAL
    save_stats(partial_stats(rotary_start=start), path)
    loaded = load_stats(path)
    assert check_stats(loaded, partial_shape(rotary_start=start)).rotary_start == start
    with pytest.raises(StatsError, match=f"the first dim that RoPE turns is {start} there and 0 in the model") as error:
        check_stats(loaded, partial_shape())
    assert_one_sentence(error.value)
    with pytest.raises(StatsError, match="the first dim that RoPE turns is 0 there"):
        check_stats(partial_stats(), partial_shape(rotary_start=start))
    for wrong in (3, -start):
        save_stats(partial_stats(rotary_start=wrong), path)
        with pytest.raises(StatsError, match="the dims that RoPE turns are elsewhere"):
            load_stats(path)


def test_files_of_version_1_are_read(tmp_path):
    """Prevents a new release from refusing the files of the one before, and from scoring dims that they lack."""
    loaded = load_stats(version_1(tmp_path / "s.safetensors", stats()))
    assert (loaded.layers, loaded.rotates, loaded.unrotated_mean) == ((0, 1, 2), (True,) * 3, None)
    check_stats(loaded, shape())
    usual = {"layers": (0, 1, 2), "rotates": ()}
    partial = load_stats(version_1(tmp_path / "p.safetensors", partial_stats(**usual)))
    assert partial.scored_dims == 2 * PARTIAL
    check_stats(partial, partial_shape(**usual))


@pytest.mark.parametrize("served", [shape(rotates=(True, False, True)), shape(rotates=(False,) * 3)])
def test_layers_without_rope_need_a_file_that_knows_of_them(tmp_path, served):
    """Prevents keys that were never turned from being scored as if they were."""
    old = load_stats(version_1(tmp_path / "s.safetensors", stats()))
    for one in (old, load_stats(published(tmp_path / "s.pt"))):
        with pytest.raises(StatsError, match="do not say which layers have RoPE") as error:
            check_stats(one, served)
        assert_one_sentence(error.value)


@pytest.mark.parametrize(
    ("served", "message"),
    [
        ({"layers": (0, 2, 4)}, r"scored layers is \(0, 2, 5\) there and \(0, 2, 4\)"),
        ({"rotates": (True, True, True)}, r"layers without RoPE is \[2\] there and \[\]"),
        ({"rotates": (True, False, False)}, r"layers without RoPE is \[2\] there and \[2, 5\]"),
    ],
)
def test_layers_of_another_model_are_refused(served, message):
    """Prevents a layer from being scored with another's means, or turned where its keys are not."""
    check_stats(partial_stats(), partial_shape())
    with pytest.raises(StatsError, match=message) as error:
        check_stats(partial_stats(), partial_shape(**served))
    assert_one_sentence(error.value)
