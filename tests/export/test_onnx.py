"""The graphs against PyTorch: every kind of model, every shape, and what a folder holds."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from export_cases import KINDS, SHAPE, TYPES, make_model, make_translator, write_run
from hypothesis import given, settings
from hypothesis import strategies as st

from qknorm.config import Attention, Model, Train
from qknorm.errors import InputError
from qknorm.models.translator import Translator

onnx = pytest.importorskip("onnx", reason="exporting to ONNX needs the package onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="running ONNX graphs needs the package onnxruntime")

from qknorm.export import export_run  # noqa: E402
from qknorm.export import onnx_layers as layers  # noqa: E402
from qknorm.export.onnx import largest_difference, write_folder, write_graphs  # noqa: E402
from qknorm.export.onnx_engine import OnnxModel  # noqa: E402
from qknorm.export.onnx_graph import OPSET, Graph  # noqa: E402


def run_graph(g: Graph, **given_: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(g.model().SerializeToString(), providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, given_)[0]
    return found


def step_through(model: OnnxModel, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Log-probabilities (b, k, t, v), every sentence with k targets (b, k, t) of its own."""
    stepper = model.start(source, target.shape[1])
    return np.stack([stepper.step(target[:, :, i]) for i in range(target.shape[2])], axis=2)


def in_float64(model: Translator, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The same without any cache, all at once and in double precision."""
    b, k, t = target.shape
    double = make_like(model)
    with torch.no_grad():
        rows = double(torch.from_numpy(source).repeat_interleave(k, 0), torch.from_numpy(target).view(b * k, t))
    return rows.log_softmax(-1).view(b, k, t, -1).numpy()


def make_like(model: Translator) -> Translator:
    double = Translator(model.vocabulary, model.settings).eval()
    double.load_state_dict(model.state_dict())
    return double.double()


def random_ids(b: int, s: int, k: int, t: int, types: int = TYPES) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng([b, s, k, t])
    source, target = draw.integers(3, types, (b, s)), draw.integers(2, types, (b, k, t))
    for row, real in zip(source, draw.integers(1, s + 1, b), strict=True):
        row[real:] = 0
    return source, target


def gap(expected: np.ndarray, found: np.ndarray) -> float:
    assert expected.shape == found.shape
    assert np.array_equal(expected == -np.inf, found == -np.inf)
    finite = expected > -np.inf
    return float(np.abs(expected[finite] - found[finite]).max())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_scores_as_in_pytorch(kind: str, tmp_path: Path) -> None:
    model = make_model(**KINDS[kind])
    write_graphs(model, tmp_path)
    exported = OnnxModel(tmp_path, threads=1)
    assert largest_difference(model, exported) < 1e-4
    source, target = random_ids(3, 9, 2, 11)
    assert gap(in_float64(model, source, target), step_through(exported, source, target)) < 1e-4


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Translator, OnnxModel, Path]:
    """A model of the paper's kind, and its graphs."""
    folder, model = tmp_path_factory.mktemp("paper"), make_model(norm="scale")
    write_graphs(model, folder)
    return model, OnnxModel(folder, threads=1), folder


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 5, 3), (5, 1, 1, 30), (2, 300, 1, 2), (1, 3, 1, 270)], ids=str)
def test_shapes_are_free(shape: tuple[int, int, int, int], paper: tuple[Translator, OnnxModel, Path]) -> None:
    """Also beyond the 256 positions that a model has ready."""
    model, exported, _ = paper
    source, target = random_ids(*shape)
    assert gap(in_float64(model, source, target), step_through(exported, source, target)) < 1e-4


def test_padding_changes_nothing(paper: tuple[Translator, OnnxModel, Path]) -> None:
    _, exported, _ = paper
    source, target = random_ids(1, 6, 2, 5)
    source[source == 0] = 9
    padded = np.concatenate([source, np.zeros((1, 4), dtype=np.int64)], axis=1)
    assert gap(step_through(exported, source, target), step_through(exported, padded, target)) < 1e-5


def test_greedy_search_by_hand_as_the_guide_tells_it(paper: tuple[Translator, OnnxModel, Path]) -> None:
    """With nothing but the two graphs; at the first step one place of zeros that is not visible."""
    model, exported, _ = paper
    source = np.array([[5, 9, 12, 3]])
    across = dict(zip(exported.cross, exported.encoder.run(None, {"source": source}), strict=True))
    stored = {name.replace("new", "own"): np.zeros((1, 4, 1, 6), dtype=np.float32) for name in exported.new}
    tokens = [2]
    for step in range(12):
        visible = np.ones((1, 1, max(step, 1) + 1), dtype=np.bool_)
        visible[:, :, 0] = step > 0
        given_ = {"tokens": np.array([tokens[-1:]]), "position": np.array([step]), "visible": visible}
        scores, *new = exported.decoder.run(None, {**given_, "source_real": source != 0, **across, **stored})
        assert gap(in_float64(model, source, np.array([[tokens]]))[:, :, -1], scores) < 1e-4
        for name, array in zip(exported.new, new, strict=True):
            name = name.replace("new", "own")
            stored[name] = np.concatenate([stored[name], array], axis=2) if step else array
        tokens.append(int(scores.argmax()))


def test_the_graphs_are_what_their_description_says(paper: tuple[Translator, OnnxModel, Path]) -> None:
    model, _, folder = paper
    for name, given_, got in (
        ("encoder.onnx", {"source": ["batch", "source"]}, {"cross_keys_1": ["batch", 4, "source", 6]}),
        (
            "decoder.onnx",
            {
                "tokens": ["batch", "beam"], "position": [1], "visible": ["batch", "beam", "past_and_beam"],
                "source_real": ["batch", "source"], "own_keys_0": ["batch", 4, "past", 6],
                "cross_values_1": ["batch", 4, "source", 6],
            },
            {"log_probabilities": ["batch", "beam", TYPES], "new_values_1": ["batch", 4, "beam", 6]},
        ),
    ):  # fmt: skip
        graph = onnx.load(folder / name)
        assert [(each.domain, each.version) for each in graph.opset_import] == [("", OPSET)]
        for described, expected in ((graph.graph.input, given_), (graph.graph.output, got)):
            shapes = {
                each.name: [axis.dim_param or axis.dim_value for axis in each.type.tensor_type.shape.dim]
                for each in described
            }
            assert expected.items() <= shapes.items()
    words = [each for each in graph.graph.initializer if list(each.dims) == [TYPES, model.settings.width]]
    assert len(words) == 1, "input and output share one table"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 1.3, 2.0, 3.0, 7.5, math.inf]))
def test_unit_length_holds_at_every_size(seed: int, p: float) -> None:
    draw = np.random.default_rng(seed)
    x = (draw.normal(size=(6, 5)) * 10.0 ** draw.integers(-30, 38, (6, 1))).astype(np.float32)
    x[0], x[1, :4] = 0.0, 0.0
    g = Graph("unit")
    g.output(layers.write_unit(g, g.input("x", np.float32, ["rows", 5]), p), "y", np.float32, ["rows", 5])
    found = run_graph(g, x=x)
    wide = x.astype(np.longdouble)
    top = np.abs(wide).max(1, keepdims=True)
    unit = np.divide(wide, top, out=np.zeros_like(wide), where=top > 0)
    length = np.ones_like(top) if p == math.inf else (np.abs(unit) ** p).sum(1, keepdims=True) ** (1 / p)
    expected = np.divide(unit, length, out=np.zeros_like(unit), where=length > 0)
    assert np.allclose(found, expected.astype(np.float64), rtol=0, atol=2e-6)


def test_int8_is_near_and_a_row_does_not_depend_on_its_company(tmp_path: Path) -> None:
    model = make_model(width=64, feed_forward=128, norm="scale")
    write_graphs(model, tmp_path, int8=True)
    exported = OnnxModel(tmp_path, threads=1)
    source, target = random_ids(4, 7, 2, 6)
    expected, found = in_float64(model, source, target), step_through(exported, source, target)
    finite = expected > -np.inf
    assert np.array_equal(finite, found > -np.inf)
    assert 1e-4 < (found[finite] - expected[finite]).std() < 0.1 * expected[finite].std()
    alone = step_through(exported, source[:1, : np.count_nonzero(source[0])], target[:1])
    assert gap(alone, found[:1]) < 1e-5


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 40))
def test_an_int8_product_is_its_rounded_numbers_multiplied(seed: int, inputs: int, outputs: int) -> None:
    draw = np.random.default_rng(seed)
    x = (draw.normal(size=(3, inputs)) * 10.0 ** draw.integers(-3, 4, (3, 1))).astype(np.float32)
    weight = draw.normal(size=(outputs, inputs)).astype(np.float32)
    x[0] = 0.0
    g = Graph("product", int8=True)
    product = layers.write_linear(g, g.input("x", np.float32, ["rows", inputs]), torch.from_numpy(weight), None)
    g.output(product, "y", np.float32, ["rows", outputs])
    found = run_graph(g, x=x)
    row, column = np.abs(x).max(1, keepdims=True) / 127.0, np.abs(weight).max(1) / 64.0
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    # each factor is off by half a step at most, and the other is at most the largest there is
    bound = inputs * row * column * (0.51 * 127 + 0.51 * 64 + 0.3)
    assert (np.abs(found - exact) <= bound + 1e-6).all()
    assert not found[0].any()


def test_weights_that_diverged_are_refused(tmp_path: Path) -> None:
    translator = make_translator()
    with torch.no_grad():
        translator.model.decoder[0].feed_forward.widen.weight[0, 0] = math.nan
    with pytest.raises(InputError, match="its weights have diverged"):
        write_folder(translator, tmp_path)


def test_what_the_graphs_do_not_say_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that the export passes over must not go unnoticed."""
    write_unit = layers.write_unit
    monkeypatch.setattr(layers, "write_unit", lambda g, x, p: write_unit(g, x, 2.0))
    with pytest.raises(InputError, match="differ from PyTorch by"):
        write_folder(make_translator(attention=Attention(p=3.0)), tmp_path)


def test_comparing_leaves_a_model_in_training_as_it_was(paper: tuple[Translator, OnnxModel, Path]) -> None:
    model, exported, _ = paper
    model.train()
    try:
        assert largest_difference(model, exported) < 1e-4
        assert model.training
    finally:
        model.eval()


SETTINGS = Train(model=Model(**SHAPE))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("exporting"), SETTINGS)


def test_a_folder_is_whole_and_takes_the_place_of_another(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "left").write_text("over")
    export_run("onnx", run, out)
    assert sorted(path.name for path in out.iterdir()) == [
        "decoder.onnx", "encoder.onnx", "tokenizer.json", "translator.json",
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    card = json.loads((out / "translator.json").read_text(encoding="utf-8"))
    assert (card["engine"], card["source"], card["target"]) == ("onnx", "gl", "en")
    assert card["details"]["opset"] == OPSET and card["precision"] == "float32"
    assert card["ids"] == {"pad": 0, "unknown": 1, "start": 2, "end": 3}
    assert (card["beam"], card["length_penalty"], card["extra_length"]) == (4, 0.6, 50)
    types = np.load(run.parent / "data" / "target_types.npy")
    assert card["forbidden_types"] == np.flatnonzero(~types).tolist() != []
    assert (out / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()


def test_int8_is_smaller(run: Path, tmp_path: Path) -> None:
    export_run("onnx", run, tmp_path / "float32")
    export_run("onnx", run, tmp_path / "int8", quantize="int8")
    assert json.loads((tmp_path / "int8" / "translator.json").read_text(encoding="utf-8"))["precision"] == "int8"
    weights = {}
    for name in ("float32", "int8"):
        graph = onnx.load(tmp_path / name / "encoder.onnx").graph
        weights[name] = sorted(len(each.raw_data) for each in graph.initializer)
    assert sum(weights["int8"]) < sum(weights["float32"])


def test_what_cannot_be_exported_leaves_nothing(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="quantize int4 is not known; use int8, or leave it out"):
        export_run("onnx", run, tmp_path / "out", quantize="int4")
    with pytest.raises(InputError, match="is no run folder"):
        export_run("onnx", tmp_path / "none", tmp_path / "out")
    assert not list(tmp_path.iterdir())
