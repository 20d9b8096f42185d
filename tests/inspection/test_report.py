"""Reports: exact to a unit in JSON, from runs, from captured calls of any model, and from the command."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from looks import READ, SOURCE, WRITTEN, make_look, random_rows, unpack_weights

from qknorm.cli import main
from qknorm.config import Attention as AttentionSettings
from qknorm.config import LanguageModel, Model, Prepare, Train, TrainLanguageModel
from qknorm.decoding.alignment import cross_attention_weights
from qknorm.errors import InputError
from qknorm.inspection import reading
from qknorm.inspection.figures import draw_report
from qknorm.inspection.measures import Measures
from qknorm.inspection.monitor import capture
from qknorm.inspection.reading import build_report, read_course
from qknorm.inspection.report import (
    MEASURES,
    SHOWN,
    UNITS,
    Attention,
    ModelLook,
    Report,
    Sentence,
    direction,
    group_attentions,
    sentence_of_calls,
    split_name,
)
from qknorm.text.characters import CharacterText
from qknorm.text.prepare import prepare
from qknorm.text.prepared import PreparedData
from qknorm.training.checkpoint import save_checkpoint
from qknorm.training.language_run import build_language_model, create_language_run
from qknorm.training.run_folder import build_model, create_run, load_translator, read_run

PAIRS = [(f"palabra{i % 9} gato{i} .", f"word{i % 9} cat{i} .") for i in range(60)]
TEXTS = ["palabra1 gato2 .", "gato7"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of random weights on the same data: QKNorm and dot products."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    prepare(Prepare(source="gl", target="en", train=(folder / "pairs.tsv",)), folder / "data")
    data = PreparedData.load(folder / "data")
    made = []
    for kind in ("lp", "none"):
        model = Model(
            width=16,
            feed_forward=16,
            encoder_layers=2,
            decoder_layers=2,
            heads=2,
            attention=AttentionSettings(qk_norm=kind),
        )
        run = folder / kind
        about = create_run(run, Train(model=model), data)
        torch.manual_seed(3)
        save_checkpoint(run, 5, build_model(Train(model=model), about).state_dict(), {}, {})
        lines = [
            {"kind": "step", "step": 1, "loss": 7.5, "learning_rate": 1e-3},
            {"kind": "step", "step": 5, "loss": 6.5, "learning_rate": 2e-3},
            {"kind": "evaluation", "step": 2, "dev_loss": 6.0, "dev_bleu": 1.5, "scales": {"encoder.0.self": 8.0}},
            {"kind": "evaluation", "step": 5, "dev_loss": None, "dev_bleu": 2.5, "scales": {"encoder.0.self": [7, 8]}},
            {"kind": "attention", "step": 5, "attention": {"encoder.0.self": {"largest_logit": [3.0, 9.0]}}},
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        made.append(run)
    return made


# ------------------------------------------------------------------ data


def test_json_is_exact_to_a_unit() -> None:
    report = Report([make_look("a"), make_look("b", seed=1)], "Título", ["note"])
    plain = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (plain["title"], plain["notes"]) == (report.title, report.notes)
    for ours, theirs in zip(report.models, plain["models"], strict=True):
        assert (ours.name, ours.facts) == (theirs["name"], theirs["facts"])
        assert [asdict(panel) for panel in ours.panels] == theirs["panels"]
        for one, other in zip(ours.sentences, theirs["sentences"], strict=True):
            for name in ("text", "tokens", "translation", "reference"):
                assert getattr(one, name) == other[name]
            weights = unpack_weights(other)
            for before, after in zip(one.attentions, other["attentions"], strict=True):
                np.testing.assert_allclose(weights[before.name], before.weights, atol=0.5 / UNITS + 1e-12)
                for name in ("name", "queries", "keys", "measures"):
                    assert getattr(before, name) == after[name]


def test_weights_that_are_no_numbers_or_no_weights_pack_within_bounds() -> None:
    odd = np.array([[[np.nan, 1.0000001, -1e-9, 0.12345]]])
    sentence = Sentence("", {"query": ["a"], "keys": list("abcd")}, [Attention("layer.0", "query", "keys", odd)])
    plain = Report([ModelLook("m", [sentence])]).to_json()["models"][0]["sentences"][0]
    assert unpack_weights(plain)["layer.0"].tolist() == [[[0.0, 1.0, 0.0, 0.1234]]]


def test_weights_must_fit_tokens() -> None:
    with pytest.raises(ValueError, match=r"encoder\.0\.self has weights"):
        Sentence("a b", {"text": ["a", "b"]}, [Attention("encoder.0.self", "text", "text", np.zeros((1, 2, 3)))])


def test_reports_are_of_one_or_two_models_over_the_same_sentences() -> None:
    look = make_look("a")
    with pytest.raises(ValueError, match="not 3"):
        Report([look, look, look])
    with pytest.raises(ValueError, match="same sentences"):
        Report([look, make_look("b", [("x", "y")])])


def test_measures_over_sentences_are_means_and_the_largest_logit_the_largest() -> None:
    look = make_look("a")
    name = look.attentions[0]
    first, second = (sentence.attention(name).measures for sentence in look.sentences)
    over_all = look.measures(name)
    assert over_all["entropy"] == pytest.approx(
        [(a + b) / 2 for a, b in zip(first["entropy"], second["entropy"], strict=True)]
    )
    assert over_all["largest_logit"] == [
        max(both) for both in zip(first["largest_logit"], second["largest_logit"], strict=True)
    ]
    first["entropy"][0], second["entropy"][0], first["entropy"][1] = None, float("nan"), None
    assert look.measures(name)["entropy"][:2] == [None, second["entropy"][1]]


def test_every_measure_has_a_label_and_a_meaning() -> None:
    assert set(MEASURES) == set(Measures.names()) > set(SHOWN)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("encoder.0.self", ("encoder self", 0)),
        ("decoder.11.cross", ("decoder cross", 11)),
        ("model.layers.3.self_attn", ("model layers self attn", 3)),
        ("attention", ("attention", 0)),
        ("", ("attention", 0)),
    ],
)
def test_names_have_a_kind_and_a_layer(name: str, split: tuple[str, int]) -> None:
    assert split_name(name) == split


def test_attentions_over_other_tokens_are_another_group() -> None:
    """As in encoders that pool: the same kind of name, but no head of one is to be compared with those of the other."""
    attentions = [
        Attention("layer.0", "long", "long", random_rows(np.random.default_rng(0), 2, 4, 4)),
        Attention("layer.1", "short", "short", random_rows(np.random.default_rng(0), 2, 2, 2)),
    ]
    sentence = Sentence("", {"long": list("abcd"), "short": list("ab")}, attentions)
    assert list(group_attentions(sentence).values()) == [["layer.0"], ["layer.1"]]
    assert len(Report([ModelLook("m", [sentence])]).to_json()["models"][0]["groups"]) == 2


@pytest.mark.parametrize(
    ("text", "way"), [("שלום עולם </s>", "rtl"), ("مرحبا", "rtl"), ("Ola 12", "ltr"), ("123 .", "ltr"), ("", "ltr")]
)
def test_direction_of_a_text(text: str, way: str) -> None:
    assert direction(text.split()) == way


# ------------------------------------------------------------------ from calls


def test_calls_of_any_model_make_a_report() -> None:
    model = torch.nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True).eval()
    with capture(model) as calls:
        model(torch.randn(2, 5, 16), torch.randn(2, 3, 16))
    sentence = sentence_of_calls({"source": list("abcde"), "target": list("xyz")}, calls)
    sides = {one.name: (one.queries, one.keys, one.weights.shape) for one in sentence.attentions}
    assert sides == {
        "encoder.layers.0.self_attn": ("source", "source", (2, 5, 5)),
        "decoder.layers.0.self_attn": ("target", "target", (2, 3, 3)),
        "decoder.layers.0.multihead_attn": ("target", "source", (2, 3, 5)),
    }
    np.testing.assert_allclose(sentence.attentions[2].weights.sum(axis=-1), 1, atol=1e-6)
    report = Report([ModelLook("torch", [sentence])])
    assert report.to_json()["models"][0]["sentences"][0]["text"] == "a b c d e"


def test_calls_without_tokens_count_positions_and_repeated_calls_are_numbered() -> None:
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    model = torch.nn.ModuleDict({"attention": layer})
    x = torch.randn(1, 3, 8)
    with capture(model) as calls:
        layer(x, x, x)
        layer(x, x, x)
    sentence = sentence_of_calls(None, calls)
    assert [one.name for one in sentence.attentions] == ["attention", "attention call 2"]
    assert list(sentence.tokens.values()) == [["1", "2", "3"]]
    with pytest.raises(ValueError, match="4 tokens were given where attention has 3 queries and 3 keys; give as many"):
        sentence_of_calls(list("abcd"), calls)
    with capture(model) as calls:
        layer(x[:, 2:], x, x)  # as with a cache: the last query alone
    assert list(sentence_of_calls(list("abc"), calls).tokens.values()) == [["a", "b", "c"], ["1"]]


# ------------------------------------------------------------------ from runs


def test_a_translation_run_is_read_as_it_translates(runs: list[Path]) -> None:
    report = build_report(runs, TEXTS, device="cpu")
    assert [model.name for model in report.models] == ["lp", "none"]
    assert [model.facts["attention"] for model in report.models] == ["QKNorm", "dot products"]
    translator = load_translator(runs[0], device="cpu")
    for text, sentence in zip(TEXTS, report.models[0].sentences, strict=True):
        assert (sentence.text, sentence.reference) == (text, None)
        assert sentence.translation == translator.translate([text])[0]
        assert sentence.tokens[SOURCE][-1] == sentence.tokens[WRITTEN][-1] == "</s>"
        assert sentence.tokens[READ] == ["<s>", *sentence.tokens[WRITTEN][:-1]]
        expected = cross_attention_weights(
            translator.model, translator.tokenizer.encode(text), translator.tokenizer.encode(sentence.translation)
        )
        if expected.shape[2] == len(sentence.tokens[WRITTEN]):  # random models write what encodes otherwise
            np.testing.assert_allclose(sentence.attention("decoder.1.cross").weights, expected[1].numpy(), atol=1e-6)
        assert set(sentence.attention("encoder.0.self").measures) >= {"entropy", "saturation", "largest_logit"}


def test_forced_models_read_the_references(runs: list[Path]) -> None:
    report = build_report(runs, TEXTS, references=["word1 cat2 .", "cat7"], force=True, device="cpu")
    for model in report.models:
        assert "".join(token.removeprefix("·") for token in model.sentences[1].tokens[WRITTEN]) == "cat7</s>"
        assert model.sentences[1].translation is None
    weights = report.models[0].sentences[0].attention("decoder.0.cross").weights
    translator = load_translator(runs[0], device="cpu")
    ids = [translator.tokenizer.encode(text) for text in (TEXTS[0], "word1 cat2 .")]
    np.testing.assert_allclose(weights, cross_attention_weights(translator.model, *ids)[0].numpy(), atol=1e-6)


def test_a_language_model_reads_characters(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc cab\nbca " * 30)
    text = CharacterText.load(tmp_path / "text.txt")
    settings = TrainLanguageModel(model=LanguageModel(layers=2, heads=2, width=8, context=6))
    about = create_language_run(tmp_path / "run", settings, text)
    save_checkpoint(tmp_path / "run", 1, build_language_model(settings, about).state_dict(), {}, {})
    report = build_report([tmp_path / "run"], ["cab\nabc", "a"], device="cpu")
    model = report.models[0]
    assert model.facts["task"] == "language model" and "2 layers" in model.facts["size"]
    assert model.sentences[0].tokens == {"text": list("cab\nab")}, "as many characters as its context holds"
    assert "text 1 has 7 tokens; the first 6" in report.notes[0]
    weights = model.sentences[0].attentions[0].weights
    assert weights.shape == (2, 6, 6) and (np.triu(weights, k=1) == 0).all()
    with pytest.raises(InputError, match="text 1 is empty"):
        build_report([tmp_path / "run"], [""], device="cpu")


def test_long_sentences_are_cut_with_a_note(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_TOKENS", 3)
    monkeypatch.setattr(reading._cut, "__defaults__", (3,))
    report = build_report(runs[:1], ["gato gato gato gato"], device="cpu")
    assert len(report.models[0].sentences[0].tokens[SOURCE]) == 4
    assert re.match(r"sentence 1 has \d+ tokens; the first 3 of them are shown", report.notes[0])


def test_an_empty_sentence_is_its_end_alone(runs: list[Path]) -> None:
    report = build_report(runs[:1], [""], device="cpu")
    assert report.models[0].sentences[0].tokens[SOURCE] == ["</s>"]
    json.dumps(report.to_json(), allow_nan=False)


def test_a_broken_model_is_looked_at_too(runs: list[Path], tmp_path: Path) -> None:
    settings, about = read_run(runs[0])
    broken = build_model(settings, about)
    torch.nn.init.constant_(broken.encoder[1].attention.in_proj_weight, torch.nan)
    shutil.copytree(runs[0], tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    save_checkpoint(tmp_path / "run", 5, broken.state_dict(), {}, {})
    report = build_report([tmp_path / "run"], TEXTS, device="cpu")
    assert report.notes[0].startswith("nothing could be translated")
    assert report.notes[1] == (
        "encoder.1.self, heads 1 and 2: logits are no finite numbers; look at an earlier checkpoint"
    )
    json.dumps(report.to_json(), allow_nan=False)
    draw_report(report, tmp_path / "figures")


def test_the_course_of_a_training(runs: list[Path]) -> None:
    panels = {
        panel.title: {one.name: (one.steps, one.values) for one in panel.series} for panel in read_course(runs[0])
    }
    assert panels == {
        "Dev BLEU": {"dev": ([2, 5], [1.5, 2.5])},
        "Loss": {"training": ([1, 5], [7.5, 6.5]), "dev": ([2], [6.0])},
        "Scale g": {"encoder.0.self": ([2, 5], [8.0, 7.5])},
        "Learning rate": {"learning rate": ([1, 5], [1e-3, 2e-3])},
        "Largest |logit|": {"encoder.0.self": ([5], [9.0])},
    }


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    thin = reading._thinned("a", [(step, step / 2) for step in range(1001)])
    assert len(thin.steps) <= reading.MOST_POINTS and thin.steps[-1] == 1000 and thin.values[-1] == 500


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"texts": []}, "no sentence to look at"),
        ({"texts": ["a"], "references": ["a", "b"]}, "1 sentences have 2 references"),
        ({"texts": ["a"], "force": True}, "no references"),
    ],
)
def test_bad_requests(options: dict, words: str, runs: list[Path]) -> None:
    with pytest.raises(InputError, match=words):
        build_report(runs, **options)


# ------------------------------------------------------------------ the command


def test_the_command_shows_writes_and_draws(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, figures = tmp_path / "out.html", tmp_path / "figures"
    words = ["--split", "dev", "--count", "2", "--device", "cpu"]
    main(["inspect", *map(str, runs), *words, "--html", str(page), "--figures", str(figures), "--format", "svg"])
    out = capsys.readouterr().out
    assert "decoder.1.cross" in out and "saturation" in out and "over 2 sentences" in out
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert {path.name for path in figures.iterdir()} == {
        "heads.svg",
        "logits.svg",
        "map.svg",
        "measures.svg",
        "scales.svg",
    }


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--text", "a", "--split", "dev"], "give one of --text and --split, not both"),
        (["--count", "0"], "--count is 0"),
        (["--text", "a", "--force"], "--force needs references"),
        (["--split", "nothing"], "nothing"),
        (["--input", "missing.txt"], "missing.txt"),
        (
            ["--text", "gato7", "--device", "cpu", "--figures", "nowhere", "--attention", "encoder.7.self"],
            "has no encoder.7.self; it has encoder",
        ),
        (["--text", "a", "--names", "one", "two"], "--names has 2 names for 1 runs"),
        (["second", "--text", "a", "--names", "one", "one"], "--names calls two runs one;"),
        (["--text", "a", "--count", "5"], "--count is of --input or --split"),
        (["--text", "a", "--data", "d"], "--data has sentences for --split alone"),
        (["--input", "missing.txt", "--data", "d"], "--data has sentences for --split alone"),
        (["--format", "svg", "--html", "a.html"], "--format is of the pictures that --figures draws"),
        (["--attention", "encoder.0.self"], "--attention is of the pictures that --figures draws"),
    ],
)
def test_the_command_refuses(
    words: list[str], complaint: str, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(runs[0]), *words])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_command_wants_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, complaint in (([], "name a run folder"), ([str(tmp_path)], "no run folder")):
        with pytest.raises(SystemExit):
            main(["inspect", *words])
        assert complaint in capsys.readouterr().err
