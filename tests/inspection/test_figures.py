"""Heat maps: the right tokens at the right cells, in files that a viewer opens."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from looks import make_look
from matplotlib.image import imread

from qknorm.errors import InputError
from qknorm.inspection.figures import (
    draw_attention,
    draw_heads,
    draw_map,
    draw_measures,
    draw_report,
    label_tokens,
)
from qknorm.inspection.report import ModelLook, Report

SOURCE = ["O", "coche", "verm", "·ello", "está", "aquí", "."]
TARGET = ["The", "red", "car", "is", "here", "."]


def random_weights(*shape: int) -> torch.Tensor:
    return torch.softmax(3 * torch.randn(*shape), dim=-1)


def blueness(picture: np.ndarray) -> np.ndarray:
    """0 for white, 1 for the darkest blue of the colour map."""
    return 1 - picture[..., 0]


def test_png_shows_dark_cells_where_the_weight_is(tmp_path: Path) -> None:
    """With all the weight on one diagonal, the other diagonal swaps the dark corners."""
    eye = np.eye(6)
    for name, weights in (("one", eye), ("other", eye[::-1])):
        draw_attention(weights, SOURCE[:6], TARGET, tmp_path / f"{name}.png")
    one, other = (blueness(imread(tmp_path / f"{name}.png")) for name in ("one", "other"))
    assert one.shape == other.shape
    darker = one - other
    rows, columns = np.nonzero(darker > 0.5)
    middle_row, middle_column = (rows.min() + rows.max()) / 2, (columns.min() + columns.max()) / 2
    upper = rows < middle_row - 20
    assert upper.any() and (columns[upper] < middle_column).all()
    lower = rows > middle_row + 20
    assert lower.any() and (columns[lower] > middle_column).all()


def test_svg_holds_every_token_of_every_head(tmp_path: Path) -> None:
    path = tmp_path / "heads.svg"
    draw_attention(random_weights(4, len(TARGET), len(SOURCE)), SOURCE, TARGET, path, title="Galician → English")
    text = path.read_text(encoding="utf-8")
    comments = re.findall(r"<!-- (.*?) -->", text)  # beside the outlines of letters stands what they spell
    for token in SOURCE:
        assert comments.count(token) >= 4, token
    for token in TARGET[:-1]:
        assert comments.count(token) == 1, f"{token} stands once a row of heads, at its left"
    assert [f"head {number}" in comments for number in range(1, 6)] == [True] * 4 + [False]
    assert "Galician → English" in comments


def test_the_same_picture_is_the_same_png_and_grows_with_the_heads(tmp_path: Path) -> None:
    weights = random_weights(5, 3, 4)
    for name, heads in (("two", weights[:2]), ("again", weights[:2]), ("five", weights)):
        draw_attention(heads, SOURCE[:4], TARGET[:3], tmp_path / f"{name}.png")
    assert (tmp_path / "two.png").read_bytes() == (tmp_path / "again.png").read_bytes()
    two, five = (imread(tmp_path / f"{name}.png").shape for name in ("two", "five"))
    assert five[0] > 1.5 * two[0], "five heads take two rows"
    assert five[1] > 1.3 * two[1]


def test_tokens_are_text_and_never_formulas(tmp_path: Path) -> None:
    """Between two dollar signs matplotlib would read mathematics, and fail on these."""
    odd = ["$^$", r"$\frac$", "_{", "<&>", "ñ", "Việt", "שלום"]
    draw_attention(random_weights(6, 7), odd, TARGET, tmp_path / "odd.svg", title="$^$")
    assert "Việt" in (tmp_path / "odd.svg").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("error")
def test_accents_have_letters_in_the_font(tmp_path: Path) -> None:
    letters = ["ñ", "ç", "á", "ő", "ž", "ş", "ệ", "ư", "Ω", "ж", "→", "·"]
    draw_attention(random_weights(6, len(letters)), letters, TARGET, tmp_path / "letters.png")
    assert (tmp_path / "letters.png").stat().st_size > 5_000


@pytest.mark.parametrize("shape", [(6,), (7, 6), (2, 6, 6), (1, 2, 6, 7), (0, 6, 7)])
def test_weights_that_do_not_fit_the_tokens_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="6 target and 7 source tokens"):
        draw_attention(np.zeros(shape), SOURCE, TARGET, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_other_kinds_of_picture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"heads\.jpeg.*\.png or \.svg"):
        draw_attention(random_weights(6, 7), SOURCE, TARGET, tmp_path / "heads.jpeg")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        draw_attention(random_weights(6, 7), SOURCE, TARGET, tmp_path / "file" / "a.png")


@pytest.mark.parametrize(
    ("tokens", "labels"),
    [
        (["▁O", "▁coche", "▁verm", "ello", ".", "</s>"], ["O", "coche", "verm", "·ello", ".", "</s>"]),
        (["Os</w>", "coch", "es</w>", "-", "a</w>", "</s>"], ["Os", "coch", "·es", "-", "·a", "</s>"]),
        (["O", "▁", "a"], ["O", "▁", "·a"]),
        ([], []),
    ],
)
def test_labels_mark_what_goes_on_inside_a_word(tokens: list[str], labels: list[str]) -> None:
    assert label_tokens(tokens) == labels


def test_keys_that_read_from_the_right_begin_there(tmp_path: Path) -> None:
    """The same weights over Hebrew and over Latin keys are mirror images."""
    weights = np.eye(3)
    for name, keys in (("latin", ["aaa", "bbb", "ccc"]), ("hebrew", ["אאא", "בבב", "גגג"])):
        draw_attention(weights, keys, TARGET[:3], tmp_path / f"{name}.png")
    # the bar of colours is alike in both; what differs are the corners of the map
    latin, hebrew = (blueness(imread(tmp_path / f"{name}.png")) for name in ("latin", "hebrew"))
    rows, columns = np.nonzero((latin - hebrew) > 0.5)
    top = rows < rows.min() + 20
    assert columns[top].max() < columns[~top].max() - 50


# ------------------------------------------------------------------ pictures of a report


def spelled(path: Path) -> list[str]:
    """What stands in an SVG; beside the outlines of letters stands what they spell."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def report() -> Report:
    return Report([make_look("qknorm", heads=3), make_look("dot", heads=3, seed=1)])


def test_the_same_heads_of_two_models_side_by_side(report: Report, tmp_path: Path) -> None:
    draw_heads(report, tmp_path / "heads.svg", attention="encoder.1.self")
    words = spelled(tmp_path / "heads.svg")
    assert "Encoder self-attention, layer 2" in words
    assert [word for word in words if ", head" in word] == [
        f"{m}, head {h}" for m in ("qknorm", "dot") for h in (1, 2, 3)
    ]
    assert words.count("dous") == 2 * 3 + 2, "below every head, and at the left of every model"


def test_a_picture_of_one_model_names_it(tmp_path: Path) -> None:
    draw_heads(Report([make_look("qknorm", heads=2)]), tmp_path / "heads.svg")
    words = spelled(tmp_path / "heads.svg")
    assert {"Encoder self-attention, layer 1", "qknorm", "head 2"} <= set(words)


@pytest.mark.parametrize("name", ["qknorm", "a folder with a name that is much too long for/any title/runs/qknorm"])
def test_the_name_of_one_model_leaves_room_for_the_tokens(name: str, tmp_path: Path) -> None:
    draw_heads(Report([make_look(name, heads=2)]), tmp_path / "heads.png")
    picture = imread(tmp_path / "heads.png")[..., :3]
    for edge in (picture[-2:], picture[:2], picture[:, :2], picture[:, -2:]):
        assert edge.min() == 1.0, "nothing is cut off"


def test_of_many_heads_the_first_four_are_drawn_and_no_more_than_both_models_have(tmp_path: Path) -> None:
    for heads, drawn in (((6, 5), 4), ((6, 2), 2)):
        draw_heads(Report([make_look("m", heads=count) for count in heads]), tmp_path / "heads.svg")
        titles = [word for word in spelled(tmp_path / "heads.svg") if ", head" in word]
        assert titles == 2 * [f"m, head {head + 1}" for head in range(drawn)]


def test_attentions_and_measures_that_are_not_there_are_refused(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no attention nothing"):
        draw_heads(report, tmp_path / "a.png", attention="nothing")
    with pytest.raises(ValueError, match="has no measure q_norm"):
        draw_measures(report, tmp_path / "a.png", ["q_norm"])


def test_measures_by_attention_and_head(report: Report, tmp_path: Path) -> None:
    draw_measures(report, tmp_path / "measures.svg")
    words = spelled(tmp_path / "measures.svg")
    assert [word for word in words if ":" in word] == [
        f"{measure}: {model}" for measure in ("relative entropy", "saturation") for model in ("qknorm", "dot")
    ]
    assert words.count("decoder.1.cross") == 2


def test_the_map_has_every_head(report: Report, tmp_path: Path) -> None:
    draw_map(report, tmp_path / "map.svg")
    words = spelled(tmp_path / "map.svg")
    for label in (f"{layer}.{head}" for layer in (1, 2) for head in range(1, 4)):
        assert words.count(label) == 2 * 3, label
    assert "dot: decoder cross" in words


def test_courses_are_drawn_where_they_were_recorded(report: Report, tmp_path: Path) -> None:
    draw_report(report, tmp_path, ".svg")
    assert {"Scale g: qknorm", "Scale g: dot", "encoder self"} <= set(spelled(tmp_path / "scales.svg"))
    assert {"Largest |logit|: qknorm", "Largest |logit|: dot"} <= set(spelled(tmp_path / "logits.svg"))
    small = make_look("small", [("un dous", "one")], layers=1, heads=2)
    bare = Report([ModelLook("bare", small.sentences)])
    assert [path.name for path in draw_report(bare, tmp_path / "all")] == ["heads.png", "measures.png", "map.png"]
    assert len(draw_report(Report([small]), tmp_path / "more", ".svg")) == 5
