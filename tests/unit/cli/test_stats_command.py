"""`sglang-triattn stats`: what users see of a statistics file."""

import sys

import pytest
import torch

from sglang_triattn.cli import main as cli
from sglang_triattn.cli.stats import _figure
from sglang_triattn.model.rope import Rope
from sglang_triattn.stats.concentration import concentration, outlook
from sglang_triattn.stats.file import QueryStats, save_stats


def make(rope: Rope | None = None, **more) -> QueryStats:
    """Two layers of three heads; concentration is 0.5 except for layer 1, head 2, whose queries are all equal."""
    abs_mean = torch.ones(2, 3, 4)
    mean = torch.full((2, 3, 4), 0.5, dtype=torch.complex64)
    mean[1, 2] = 1j
    inv_freq = 5000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    rope = rope or Rope(inv_freq, 1.0, 8, "interleaved")
    return QueryStats(mean, abs_mean, 1, 10, rope, "abc", 1234, "here", **more)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_stats(make(), "m.safetensors")
    return tmp_path / "m.safetensors"


def test_concentration_weighs_frequencies_by_their_size():
    """Prevents a frequency of tiny queries from counting as much as the one that decides scores."""
    stats = make()
    stats.abs_mean[0, 0, 0] = 9
    assert concentration(stats)[0].tolist() == pytest.approx([2 / 12, 0.5, 0.5])
    assert float(concentration(stats)[1, 2]) == 1


def test_report_and_picture(file, capsys):
    """Prevents a file that looks like another model's."""
    assert cli.main(["stats", "m.safetensors"]) == 0
    out = capsys.readouterr().out
    for line in (
        "layers          2\n",
        "without RoPE    none\n",
        "unrotated       not in the file\n",
        "query heads     3\n",
        "KV heads        1\n",
        "head_dim        10\n",
        "RoPE            interleaved pairs, 8 dims turn, attention scaling 1, theta 5,000\n",
        "fingerprint     abc\n",
        "tokens          1,234\n",
        "highest       layer 1 head 2 (1.000)",
        "concentration   mean 0.583, 10th percentile 0.500",
        "  layers 0-1    0.50 0.67\n",
        "  it predicts   poor (mean concentration 0.58, below 0.6): the queries of this model are spread, and",
        "picture         m.png\n",
    ):
        assert line in out
    assert (file.parent / "m.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def no_matplotlib(monkeypatch):
    """Python finds no matplotlib, as after a plain `pip install sglang-triattn`."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_the_report_needs_no_matplotlib(file, capsys, no_matplotlib):
    """Prevents a report that fails for the sake of its picture, and a picture that is missing without a word."""
    assert cli.main(["stats", "m.safetensors"]) == 0
    out = capsys.readouterr().out
    assert "query heads     3\n" in out
    assert out.endswith(
        'picture         none, because matplotlib is not installed: run `pip install "sglang-triattn[plot]"`\n'
    )
    assert not (file.parent / "m.png").exists()


def test_no_plot_says_nothing_of_matplotlib(file, capsys, no_matplotlib):
    """Prevents advice about a picture that was declined."""
    assert cli.main(["stats", "m.safetensors", "--no-plot"]) == 0
    assert "matplotlib" not in capsys.readouterr().out


def test_a_wanted_picture_without_matplotlib_is_refused(file, capsys, no_matplotlib):
    """Prevents a traceback, and a script that goes on without the picture that it asked for."""
    assert cli.main(["stats", "m.safetensors", "--plot", "x.png"]) == 2
    shown = capsys.readouterr()
    assert "--plot draws with matplotlib, which is not installed" in shown.err
    assert 'run `pip install "sglang-triattn[plot]"`.' in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_report_of_some_layers(file, capsys):
    """Prevents layers from being named by their place among the scored ones, and layers without RoPE from hiding."""
    more = {"layers": (3, 7), "rotates": (True, False), "unrotated_mean": torch.zeros(2, 3, 2)}
    save_stats(make(**more), "some.safetensors")
    assert cli.main(["stats", "some.safetensors", "--no-plot"]) == 0
    out = capsys.readouterr().out
    for line in (
        "layers          2: 3, 7\n",
        "without RoPE    layers 7\n",
        "unrotated       2 dims\n",
        "highest       layer 7 head 2 (1.000)",
        "  layers 3-7    0.50 0.67\n",
    ):
        assert line in out


@pytest.mark.parametrize(
    ("mean", "word", "part"),
    [(0.61, "fair", 0.63), (0.75, "fair", 0.73), (0.85, "good", 0.86), (0.99, "good", 0.87)],
)
def test_what_is_predicted_was_measured(mean, word, part):
    """Prevents a prediction for another concentration than the file's, and a number without a verdict."""
    stats = make()
    stats.mean[:] = mean
    assert outlook(stats).startswith(f"{word} (mean concentration {mean:.2f}): scores found at least {part} of")


@pytest.mark.parametrize(
    "name", ["m.safetensors", "W" * 70 + ".safetensors", "DeepSeek-R1-Distill-Llama-8B.safetensors"]
)
@pytest.mark.parametrize("heads", [3, 32])
def test_the_title_fits_the_picture(name, heads):
    """Prevents a title that is cut at the picture's edges, so that it does not name its file."""
    figure = _figure(torch.full((2, heads), 0.5, dtype=torch.float64), f"Query concentration of {name}")
    figure.draw_without_rendering()
    (title,) = figure.texts
    drawn, whole = title.get_window_extent(), figure.bbox
    assert whole.x0 <= drawn.x0 < drawn.x1 <= whole.x1
    assert whole.y0 <= drawn.y0 < drawn.y1 <= whole.y1
    assert title.get_text().replace("\n", "").replace(" ", "").endswith(name)


def test_scaled_frequencies_have_no_theta(file, capsys):
    """Prevents a base that would be wrong for models with scaled RoPE."""
    inv_freq = 5000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    inv_freq[3] /= 8
    save_stats(make(Rope(inv_freq, 1.0, 8, "half")), "scaled.safetensors")
    assert cli.main(["stats", "scaled.safetensors", "--no-plot"]) == 0
    assert "scaled frequencies" in capsys.readouterr().out
    assert not (file.parent / "scaled.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.safetensors"], "Statistics file none.safetensors does not exist"),
        (["m.safetensors", "--plot", "x.jpg"], "--plot is x.jpg, but its name must end in .png."),
        (["m.safetensors", "--plot", "none/x.png"], "but its folder does not exist"),
        (["m.safetensors", "--plot", "folder.png"], "Cannot write folder.png"),
    ],
)
def test_mistakes_give_one_sentence(file, capsys, arguments, message):
    """Prevents a traceback for a user's mistake."""
    (file.parent / "folder.png").mkdir()
    assert cli.main(["stats", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_arguments_after_dashes_are_for_calibrate_alone(file, capsys):
    """Prevents server arguments from being silently dropped."""
    with pytest.raises(SystemExit) as error:
        cli.main(["stats", "m.safetensors", "--", "--tp", "2"])
    assert error.value.code == 2
