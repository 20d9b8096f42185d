"""Transformers loads our folders, computes what we compute, and cuts text as we do."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import KINDS, make_model, make_translator, write_run
from hypothesis import given
from hypothesis import strategies as st

from foreign_models import library
from qknorm.config import Attention, Model, Train
from qknorm.decoding.translate import TextTranslator
from qknorm.errors import InputError
from qknorm.export import huggingface as exporter
from qknorm.export.check import log_probabilities
from qknorm.specials import END, PAD, START
from qknorm.text.cleaning import clean_line
from qknorm.text.demo_corpus import generate
from qknorm.text.subwords import Tokenizer

transformers = library("transformers")
import qknorm.huggingface as ours  # noqa: E402  it needs what `library` sees to

LINES = [pair[0] for pair in generate(24)]
Loaded = tuple[TextTranslator, Any, Any, Path]
ODD = ["", "  ", "<s> olá </s>\u00a0mundo  e\u0301 \x07x ▁a <unk> <pad>", "a\u2003b\x1cc\x85d", "ñ 漢字 🙂 \u200dx"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A random translator, and what transformers loads of its folder."""
    translator = make_translator()
    folder = tmp_path_factory.mktemp("huggingface")
    exporter.write_folder(translator, folder)
    return translator, transformers.AutoModelForSeq2SeqLM.from_pretrained(folder), load_tokenizer(folder), folder


def load_tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def batch(tokenizer: Any, lines: list[str] = LINES) -> Any:
    return tokenizer(lines, padding=True, return_tensors="pt", return_token_type_ids=False)


# ------------------------------------------------------------------ the model


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_computes_the_same(kind: str, tmp_path: Path) -> None:
    translator = make_translator(**KINDS[kind])
    exporter.write_folder(translator, tmp_path)
    model = exporter.load_model(tmp_path)
    state, expected = model.state_dict(), translator.model.state_dict()
    assert state.keys() == {f"translator.{name}" for name in expected}
    assert all(torch.equal(state[f"translator.{name}"], value) for name, value in expected.items())
    source, target = torch.randint(3, 60, (2, 2, 9))
    source[1, 5:] = PAD
    with torch.no_grad():
        found = model(source, decoder_input_ids=target).logits
        torch.testing.assert_close(found, translator.model(source, target))
        masked = torch.where(source == PAD, 5, source)  # what stands under a mask has no say
        torch.testing.assert_close(model(masked, attention_mask=source != PAD, decoder_input_ids=target).logits, found)


def test_saving_and_loading_again_changes_nothing(loaded: Loaded, tmp_path: Path) -> None:
    _, model, tokenizer, folder = loaded
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    for (name, value), (other, read) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other and torch.equal(value, read)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert [load_tokenizer(tmp_path)(line).input_ids for line in ODD] == [tokenizer(line).input_ids for line in ODD]


def test_positions_reach_as_far_as_asked_and_are_no_weights(loaded: Loaded) -> None:
    translator, model, *_ = loaded
    assert torch.equal(model.translator.positions[:256], translator.model.positions[:256])
    assert not any("positions" in name for name in model.state_dict())
    long = torch.full((1, 300), 5)
    with torch.no_grad():
        torch.testing.assert_close(model(long, decoder_input_ids=long).logits, translator.model(long, long))


def test_an_infinite_p_survives_its_config(tmp_path: Path) -> None:
    translator = make_translator(attention=Attention(p=math.inf))
    exporter.write_folder(translator, tmp_path)
    assert ours.QKNormConfig.from_pretrained(tmp_path).settings == translator.model.settings


def test_labels_make_a_loss_and_gradients(loaded: Loaded) -> None:
    translator, model, *_ = loaded
    sources, targets = [[5, 6, 8]], [[9, 10]]
    labels = torch.tensor([[9, 10, END, -100]])
    output = model(torch.tensor([[5, 6, 8, END]]), labels=labels)
    rows = log_probabilities(translator.model, sources, targets)[0]
    assert output.loss.item() == pytest.approx(-sum(rows) / 3, rel=1e-5)
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [[START, 9, 10, END]]
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()


def test_a_call_without_a_target_is_refused(loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="decoder_input_ids or labels"):
        loaded[1](torch.tensor([[5, END]]))
    with pytest.raises(ValueError, match="input_ids"):
        loaded[1](decoder_input_ids=torch.tensor([[START]]))


# ------------------------------------------------------------------ generating


def test_greedy_generation_is_ours(loaded: Loaded) -> None:
    translator, model, tokenizer, _ = loaded
    found = model.generate(**batch(tokenizer), num_beams=1, max_length=20)
    for line, row in zip(LINES, found, strict=True):
        tokens = [token for token in row[1:].tolist() if token not in (PAD, END)]
        source = torch.tensor([[*translator.tokenizer.encode(line), END]])
        with torch.no_grad():
            log_p_tv = translator.model(source, torch.tensor([[START, *tokens]]))[0].log_softmax(-1)
        log_p_tv[0, END] = -math.inf
        chosen = row[1 : len(tokens) + 2].tolist()
        for log_p_v, token in zip(log_p_tv, chosen, strict=False):
            assert float(log_p_v[token]) > float(log_p_v.max()) - 1e-3


def test_caches_change_nothing(loaded: Loaded) -> None:
    _, model, tokenizer, _ = loaded
    inputs = batch(tokenizer, LINES[:6])
    options = {"max_length": 12, "output_scores": True, "return_dict_in_generate": True, "num_beams": 3}
    without = model.generate(**inputs, **options, use_cache=False)
    for caching in ({"use_cache": True}, {"cache_implementation": "static"}):
        found = model.generate(**inputs, **options, **caching)
        torch.testing.assert_close(found.sequences_scores, without.sequences_scores, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_generates(loaded: Loaded, dtype: torch.dtype) -> None:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(loaded[3], dtype=dtype)
    assert {tensor.dtype for tensor in model.buffers()} == {dtype, torch.bool}
    assert model.generate(**batch(loaded[2], LINES[:2]), max_length=8).shape == (2, 8)


def test_their_length_penalty_is_a_power_of_the_length(loaded: Loaded) -> None:
    """Log-probability over nᵅ, n the tokens with the end: what the guide says of the difference."""
    translator, model, tokenizer, _ = loaded
    options = {"max_length": 30, "output_scores": True, "return_dict_in_generate": True, "length_penalty": 0.6}
    found = model.generate(**batch(tokenizer), **options)
    checked = 0
    for line, row, score in zip(LINES, found.sequences, found.sequences_scores.tolist(), strict=True):
        if END not in row:
            continue
        checked += 1
        tokens = row[1 : row.tolist().index(END)].tolist()
        rows = log_probabilities(translator.model, [translator.tokenizer.encode(line)], [tokens])[0]
        assert score == pytest.approx(sum(rows) / len(rows) ** 0.6, abs=1e-3)
    assert checked


def our_score(translator: TextTranslator, line: str, tokens: list[int]) -> float:
    """By our length penalty; for two that tie all but exactly, rounding decides which of them is found."""
    source = translator.tokenizer.encode(line)
    row = log_probabilities(translator.model, [source], [tokens])[0]
    row = row if len(tokens) < len(source) + translator.settings.extra_length else row[:-1]
    return sum(row) / ((5 + len(row)) / 6) ** translator.settings.length_penalty


def test_our_search_gives_our_translations(loaded: Loaded) -> None:
    translator, model, tokenizer, _ = loaded
    found = model.generate(**batch(tokenizer), custom_generate=ours.search)
    told = tokenizer.batch_decode(found, skip_special_tokens=True)
    for text, row, line, expected in zip(told, found.tolist(), LINES, translator.explain(LINES), strict=True):
        tokens = row[1 : row.index(END)]
        assert text == expected.text or our_score(translator, line, tokens) == pytest.approx(expected.score, abs=1e-3)
    several = model.generate(**batch(tokenizer), custom_generate=ours.search, num_return_sequences=3, num_beams=5)
    assert len(several) == 3 * len(LINES)
    nothing = model.generate(**batch(tokenizer, ["", LINES[0]]), custom_generate=ours.search)
    assert tokenizer.batch_decode(nothing, skip_special_tokens=True)[0] == ""
    assert tokenizer.batch_decode(nothing, skip_special_tokens=True)[1] != ""
    short = model.generate(**batch(tokenizer), custom_generate=ours.search, max_new_tokens=2)
    assert short.shape[1] <= 4


def test_the_settings_of_the_run_are_those_of_generation(loaded: Loaded) -> None:
    translator, model, *_ = loaded
    settings, theirs = translator.settings, model.generation_config
    assert (theirs.num_beams, theirs.length_penalty) == (settings.beam, settings.length_penalty)
    assert theirs.max_length == 1 + translator.longest + settings.extra_length
    assert (theirs.decoder_start_token_id, theirs.eos_token_id, theirs.pad_token_id) == (START, END, PAD)


def test_the_pipeline_gives_our_translations(loaded: Loaded) -> None:
    from qknorm.huggingface.pipeline import TASK

    _, model, tokenizer, _ = loaded
    translate = transformers.pipeline(TASK, model=model, tokenizer=tokenizer)
    found = [each["translation_text"] for each in translate(LINES[:6])]
    searched = [model.generate(**batch(tokenizer, [line]), custom_generate=ours.search)[0] for line in LINES[:6]]
    assert found == [tokenizer.decode(row, skip_special_tokens=True) for row in searched]
    assert translate(LINES[0]) == [{"translation_text": found[0]}]
    assert [len(each) for each in translate(LINES[:2], num_return_sequences=2, num_beams=2, custom_generate=None)] == [
        2,
        2,
    ]
    assert translate(LINES[0], num_beams=1, custom_generate=None)[0]["translation_text"]


# ------------------------------------------------------------------ the tokenizer


@pytest.mark.parametrize("line", [*ODD, *LINES])
def test_text_becomes_the_same_ids(loaded: Loaded, line: str) -> None:
    translator, _, tokenizer, _ = loaded
    expected = translator.tokenizer.encode(clean_line(line))
    assert tokenizer(line).input_ids == [*expected, END]
    assert tokenizer.decode(expected, skip_special_tokens=True) == translator.tokenizer.decode(expected)


@pytest.fixture(scope="module")
def pretokenized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    path = tmp_path_factory.mktemp("pretokenized") / "tokenizer.json"
    tokenizer = Tokenizer.train(LINES, 60, pretokenized=True)
    tokenizer.save(path)
    return tokenizer, exporter.make_tokenizer(path, 50)


SPECIAL = " \t\n\x00\x07\x1c\x1f\x7f\x85\xa0\ufeff\u0301\u0327\u0308\u200b\u200d\u2003\u2028\u202f\u3000▁_<>/漢가ﬁ🙂"


@given(line=st.text(st.sampled_from(SPECIAL) | st.characters(max_codepoint=0x17F), max_size=30))
def test_any_text_becomes_the_same_ids(loaded: Loaded, pretokenized: tuple[Tokenizer, Any], line: str) -> None:
    for own, theirs in ((loaded[0].tokenizer, loaded[2]), pretokenized):
        ids = own.encode(clean_line(line))
        assert theirs(line).input_ids == [*ids, END]
        assert theirs.decode(ids, skip_special_tokens=True) == own.decode(ids)


# ------------------------------------------------------------------ the command


def test_a_run_is_exported_by_the_command(tmp_path: Path) -> None:
    from qknorm.cli import main
    from qknorm.training.run_folder import load_translator, read_run

    shape = {"width": 24, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 1, "heads": 4}
    run = write_run(tmp_path, Train(model=Model(**shape)))
    for _ in range(2):  # an export takes the place of an earlier one
        main(["export", str(run), "--to", "huggingface", "--output", str(tmp_path / "out")])
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qknorm" and (config["source_language"], config["target_language"]) == ("gl", "en")
    assert config["scale_init"] == read_run(run)[1].scale_init > 1
    model = exporter.load_model(tmp_path / "out")
    for name, value in load_translator(run, device="cpu").model.state_dict().items():
        assert torch.equal(model.translator.state_dict()[name], value)


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith("qknorm.huggingface")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InputError, match=r"pip install 'qknorm\[huggingface\]'"):
        __import__("qknorm.huggingface")


def test_a_model_of_their_making_is_ours() -> None:
    """A config alone makes a model with weights at random, ready to be trained."""
    settings = make_model().settings
    config = ours.QKNormConfig(vocab_size=60, model=settings.model_dump(mode="json"), scale_init=5.0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    assert set(model.translator.scales().values()) == {5.0}
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (24, 4, 2)
