"""What CTranslate2 computes is what PyTorch does, and what it cannot compute is refused."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import make_model, make_translator, write_run

import qknorm
from qknorm.config import Attention, Model, Train
from qknorm.decoding.translate import TextTranslator
from qknorm.errors import InputError
from qknorm.export import ctranslate2 as exporter
from qknorm.export import export_run
from qknorm.export.card import read_card
from qknorm.export.check import largest_difference, log_probabilities
from qknorm.export.ctranslate2_engine import CTranslate2Translator
from qknorm.specials import END
from qknorm.text.demo_corpus import generate

pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")

WIDTH = Attention(cross_query_norm="width")
KINDS: dict[str, dict[str, object]] = {
    "the paper's": {"norm": "scale"},
    "layer": {},
    "rms, swiglu": {"norm": "rms", "activation": "swiglu"},
    "post, gelu": {"norm_position": "post", "activation": "gelu"},
    "rotary": {"positions": "rotary", "kv_heads": 2},
    "rotary before": {"positions": "rotary", "rotary_order": "before_norm", "language_vectors": False},
    "slip, not tied": {"positions": "sinusoid-slip", "tie": "none", "fixnorm": False, "kv_heads": 1},
    "scale fixed, uneven stacks": {
        "attention": Attention(cross_query_norm="width", scale_learned=False), "encoder_layers": 1, "decoder_layers": 3,
    },
    "dot products": {"attention": Attention(qk_norm="none"), "norm": "scale"},
    "dot products, a scale a head": {
        "attention": Attention(qk_norm="none", scale_per_head=True, scale_learned=True), "kv_heads": 2,
    },
    "one head": {"heads": 1, "attention": Attention()},
}  # fmt: skip
PAIRS = generate(24)
Exported = tuple[TextTranslator, Path]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A random translator and its folder."""
    translator = make_translator(attention=WIDTH)
    folder = tmp_path_factory.mktemp("ctranslate2")
    exporter.write_folder(translator, folder)
    return translator, folder


def encoded(translator: TextTranslator) -> tuple[list[list[int]], ...]:
    tokenizer = translator.tokenizer
    return tuple([tokenizer.encode(line) for line in side] for side in zip(*PAIRS, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_pytorch(kind: str, tmp_path: Path) -> None:
    translator = make_translator(**{"attention": WIDTH, **KINDS[kind]})
    exporter.write_folder(translator, tmp_path)
    sources, targets = encoded(translator)
    found = CTranslate2Translator(tmp_path, threads=1).log_probabilities(sources, targets)
    assert largest_difference(log_probabilities(translator.model, sources, targets), found) < 1e-4


def test_a_norm_head_by_head_would_show(exported: Exported) -> None:
    translator, folder = exported
    sources, targets = encoded(translator)
    other = make_model(translator.model.vocabulary)
    other.load_state_dict(translator.model.state_dict())
    found = CTranslate2Translator(folder, threads=1).log_probabilities(sources, targets)
    assert largest_difference(log_probabilities(other, sources, targets), found) > 1e-2


def first_end(translator: TextTranslator, source: list[int]) -> float:
    """The probability that a translation ends at once, which CTranslate2 rules out before it takes the softmax."""
    return math.exp(log_probabilities(translator.model, [source], [[]])[0][0])


def test_hypotheses_have_the_scores_they_say(exported: Exported) -> None:
    translator, folder = exported
    engine = CTranslate2Translator(folder, threads=1)
    sources, _ = encoded(translator)
    for source, hypotheses in zip(sources, engine.search(sources, engine.card, nbest=4, progress=None), strict=True):
        assert len(hypotheses) == 4
        assert [each.score for each in hypotheses] == sorted((each.score for each in hypotheses), reverse=True)
        for each in hypotheses:
            limit = len(source) + engine.card.extra_length
            row = log_probabilities(translator.model, [source], [each.tokens])[0]
            row = row if len(each.tokens) < limit else row[:-1]
            expected = sum(row) - math.log1p(-first_end(translator, source))
            assert each.log_probability == pytest.approx(expected, abs=1e-3)
            assert each.score == pytest.approx(each.log_probability / ((5 + len(row)) / 6) ** 0.6)


def test_greedy_takes_the_likeliest_token_every_time(exported: Exported) -> None:
    translator, folder = exported
    engine = CTranslate2Translator(folder, threads=1)
    sources, _ = encoded(translator)
    lines = [pair[0] for pair in PAIRS]
    assert all(engine.explain(lines, beam=1)[i].text for i in range(len(lines)))
    for source, (best,) in zip(
        sources, engine.search(sources, replace(engine.card, beam=1), nbest=1, progress=None), strict=True
    ):
        ids = torch.tensor([[*source, END]]), torch.tensor([[2, *best.tokens]])
        with torch.no_grad():
            log_p_tv = translator.model(*ids)[0].log_softmax(-1)
        log_p_tv[0, END] = -math.inf
        ended = len(best.tokens) < len(source) + engine.card.extra_length
        chosen = [*best.tokens, END] if ended else best.tokens
        for log_p_v, token in zip(log_p_tv, chosen, strict=False):
            assert float(log_p_v[token]) > float(log_p_v.max()) - 1e-3


def test_a_beam_finds_what_ours_finds(exported: Exported) -> None:
    """All 200 where this was written; the two searches may part where hypotheses finish early."""
    translator, folder = exported
    lines = [pair[0] for pair in generate(200)]
    found = CTranslate2Translator(folder, threads=1).translate(lines)
    assert sum(one == other for one, other in zip(found, translator.translate(lines), strict=True)) >= 190


def test_every_sentence_has_its_own_limit(tmp_path: Path) -> None:
    translator = make_translator(attention=WIDTH)
    with torch.no_grad():
        translator.model.output_bias[END] = -50.0  # it never ends by itself
    exporter.write_folder(translator, tmp_path)
    engine = CTranslate2Translator(tmp_path, threads=1)
    sources = [encoded(translator)[0][0][:n] for n in (1, 4, 9)]
    found = engine.search(sources, engine.card, nbest=1, progress=None)
    assert [len(best.tokens) for (best,) in found] == [n + engine.card.extra_length for n in (1, 4, 9)]


def test_forbidden_types_are_never_produced(exported: Exported) -> None:
    translator, folder = exported
    engine = CTranslate2Translator(folder, threads=1)
    sources, _ = encoded(translator)
    found = engine.search(sources, engine.card, nbest=4, progress=None)
    produced = {token for hypotheses in found for each in hypotheses for token in each.tokens}
    assert produced and not produced & set(engine.card.forbidden_types)


def test_it_answers_like_our_own_translator(exported: Exported) -> None:
    translator, folder = exported
    engine = CTranslate2Translator(folder, threads=1)
    odd = ["", "  ", "unha \x07 casa", "ñ 漢字 🙂", "</s> <s>", "longa " * 90]
    told = []
    found = engine.explain(odd, nbest=2, progress=lambda *step: told.append(step))
    ours = translator.explain(odd, nbest=2)
    assert [len(each.alternatives) for each in found] == [len(each.alternatives) for each in ours]
    assert [each.parts for each in found] == [each.parts for each in ours] and found[5].parts > 1
    assert found[0].text == found[1].text == ""
    assert told[-1][1] == told[-1][2]
    assert engine.translate([]) == []
    with pytest.raises(InputError, match="alpha must be between 0"):
        engine.explain(["unha casa"], length_penalty=11)
    grams = engine.search(encoded(translator)[0][:6], engine.card, nbest=1, progress=None)
    once = engine.search(encoded(translator)[0][:6], replace(engine.card, no_repeat_ngram=1), nbest=1, progress=None)
    assert all(len(set(best.tokens)) == len(best.tokens) for (best,) in once)
    assert any(len(set(best.tokens)) < len(best.tokens) for (best,) in grams)


def test_int8_is_smaller_and_near(exported: Exported, tmp_path: Path) -> None:
    translator, folder = exported
    before = {name: value.clone() for name, value in translator.model.state_dict().items()}
    exporter.write_folder(translator, tmp_path, quantize="int8")
    assert all(torch.equal(before[name], value) for name, value in translator.model.state_dict().items())
    assert read_card(tmp_path, "ctranslate2").precision == "int8"
    assert (tmp_path / "model.bin").stat().st_size < (folder / "model.bin").stat().st_size
    sources, targets = encoded(translator)
    found = CTranslate2Translator(tmp_path, threads=1).log_probabilities(sources, targets)
    rows = log_probabilities(translator.model, sources, targets)
    near = [abs(a - b) for row, others in zip(rows, found, strict=True) for a, b in zip(row, others, strict=True)]
    near = [each for each in near if math.isfinite(each)]
    assert sum(near) / len(near) < 0.15


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": Attention()}, "cross-query-norm width"),
        ({"attention": Attention(p=3.0, cross_query_norm="width")}, "p is 3"),
        ({"attention": Attention(p=math.inf, cross_query_norm="width")}, "p is inf"),
        ({"attention": Attention(p_learned=True)}, "p is learned"),
        ({"attention": Attention(scale_per_head=True, cross_query_norm="width")}, "scale_per_head"),
        ({"attention": Attention(normalize_values=True)}, "normalize_values"),
        ({"attention": Attention(qk_norm="rms")}, "qk_norm is rms"),
        ({"attention": Attention(qk_norm="layer")}, "qk_norm is layer"),
        ({"attention": WIDTH, "norm": "none"}, "model.norm is none"),
    ],
)
def test_what_it_cannot_compute_is_refused_with_a_way_out(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    reason = exporter.refusal(Model(width=24, heads=4, **changes))
    assert reason is not None and words in reason and "onnx" in reason
    if words.startswith("cross"):
        with pytest.raises(InputError, match=r"CTranslate2 cannot compute this model: .*head by head"):
            exporter.write_folder(make_translator(**changes), tmp_path)
        assert not any(tmp_path.iterdir())


def test_a_run_is_exported_and_translated_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from qknorm.cli import main

    shape = {"width": 24, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 1, "heads": 4}
    run = write_run(tmp_path, Train(model=Model(**shape, attention=WIDTH)))
    lines = tmp_path / "in.gl"
    lines.write_text("a casa é grande .\n\nboas tardes\n", encoding="utf-8")
    main(["export", str(run), "--to", "ctranslate2", "--quantize", "int8"])
    folder = tmp_path / "run-ctranslate2"
    written = tmp_path / "out.en"
    main(["translate", str(folder), "--engine", "ctranslate2", "--input", str(lines), "--output", str(written)])
    engine = CTranslate2Translator(folder)
    assert written.read_text(encoding="utf-8").splitlines() == engine.translate(
        ["a casa é grande .", "", "boas tardes"]
    )
    (folder / "model.bin").write_bytes((folder / "model.bin").read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot be loaded by CTranslate2"):
        CTranslate2Translator(folder)
    with pytest.raises(InputError, match="quantize int4 is not known"):
        export_run("ctranslate2", run, tmp_path / "other", quantize="int4")


def test_it_translates_where_there_is_no_torch(exported: Exported) -> None:
    folder = exported[1]
    program = (
        "import sys, types; sys.modules['torch'] = None\n"
        # the package itself offers attention, and so imports torch when asked for it
        f"package = types.ModuleType('qknorm'); package.__path__ = {list(qknorm.__path__)!r}\n"
        "sys.modules['qknorm'] = package\n"
        "from qknorm.export.ctranslate2_engine import CTranslate2Translator\n"
        f"print(CTranslate2Translator({str(folder)!r}, threads=1).translate([{PAIRS[0][0]!r}])[0])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == CTranslate2Translator(folder, threads=1).translate([PAIRS[0][0]])[0].strip()


def test_without_the_package_it_says_how_to_get_it(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(InputError, match=r"pip install 'qknorm\[ctranslate2\]'"):
        CTranslate2Translator(Path(exported[1]))
