"""What all engines share: batches of like length, padded as kernels like it, and the way from texts to translations."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_translate import LINES, MODEL, TOKENIZER

from qknorm.config import Decoding
from qknorm.decoding.recorded_search import SOURCE_STEP, RecordedSearch
from qknorm.decoding.results import Hypothesis
from qknorm.decoding.texts import AnyTranslator, padded_length, search_by_length
from qknorm.decoding.translate import translate_ids
from qknorm.specials import END, PAD


class Echo(AnyTranslator[dict]):
    """Says a sentence as it is, and once more backwards."""

    source, target, longest, tokenizer = "gl", "gl", 20, TOKENIZER

    def settings_for(self, asked, nbest, *, align):
        return dict(asked)

    def search(self, sources, settings, *, nbest, progress):
        self.settings = settings
        return [[Hypothesis(list(ids), -1.0, -1.0), Hypothesis(list(ids)[::-1], -2.0, -2.0)][:nbest] for ids in sources]


def test_an_engine_needs_no_more_than_settings_and_a_search():
    engine, long = Echo(), " ".join(LINES)
    assert engine.translate(["", *LINES]) == ["", *LINES]
    (found,) = engine.explain([long], nbest=2, beam=3, no_repeat_ngram=0)
    assert (found.text, found.score, len(found.alternatives)) == (long, -1.0, 2) and found.parts > 2
    assert engine.settings == {"beam": 3, "no_repeat_ngram": 0}  # what was not asked for is left alone
    engine.search = lambda *_, **__: [[Hypothesis(TOKENIZER.encode("  o  libro"), -1.0, -1.0)]]
    assert engine.translate(["o libro"]) == ["o libro"]  # spaces that a model doubled are nobody's
    with pytest.raises(TypeError, match="list of sentences"):
        engine.translate("o libro")
    with pytest.raises(NotImplementedError, match="Echo does not align"):
        engine.explain(LINES, align=True)


@given(
    st.lists(st.integers(0, 70), max_size=40), st.integers(1, 600), st.integers(1, 5), st.sampled_from([1, 8, 16, 32])
)
def test_batches_hold_every_source_with_its_end_within_the_budget(lengths, budget, beam, step):
    sources = [[number] * length for number, length in enumerate(lengths)]
    seen: list[int] = []

    def search_batch(chosen, length):
        longest = max(map(len, chosen))
        assert length % step == 0 and longest + 1 <= length < longest + 1 + step
        assert len(chosen) == 1 or len(chosen) * beam * length <= budget
        return [[Hypothesis(list(ids), 0.0, 0.0)] for ids in chosen]

    found = search_by_length(
        sources, search_batch, budget=budget, beam=beam, step=step, progress=lambda _, done, total: seen.append(done)
    )
    assert [best.tokens for (best,) in found] == sources
    assert seen[-1:] == [len([length for length in lengths if length])][: len(seen)] and seen == sorted(set(seen))


@pytest.mark.parametrize(("tokens", "length"), [(0, 16), (14, 16), (15, 16), (16, 32), (31, 32), (32, 48)])
def test_the_end_of_a_sentence_counts(tokens, length):
    assert padded_length(tokens, 16) == length
    assert padded_length(tokens, 1) == tokens + 1


class Listening(RecordedSearch):
    """Keeps what it is asked to search for."""

    def __call__(self, source, max_lengths, **options):
        self.asked = [*getattr(self, "asked", []), source]
        return super().__call__(source, max_lengths, **options)


@pytest.mark.parametrize("ngram", [0, 1])
def test_sources_of_a_recorded_search_have_lengths_that_recur(ngram):
    draw = torch.Generator().manual_seed(0)
    lengths = [15, 16, 31, 17, 3, 30, 12, 1, 16, 15]
    sources = [torch.randint(4, TOKENIZER.size, (length,), generator=draw).tolist() for length in lengths]
    settings = Decoding(beam=2, extra_length=3, batch_tokens=128, no_repeat_ngram=ngram)
    search = Listening(MODEL.eval(), torch.float32)
    found = translate_ids(MODEL, sources, settings, search=search)
    assert [tuple(each.shape) for each in search.asked] == [(2, 32), (2, 32), (2, 32), (4, 16)]
    for source in search.asked:
        assert source.shape[1] % SOURCE_STEP == 0 and source.numel() * settings.beam <= 128
        ends = (source == END).nonzero()
        assert ends[:, 0].tolist() == list(range(len(source)))  # one in each row, and nothing but padding after it
        assert all((row[end + 1 :] == PAD).all() for row, end in zip(source, ends[:, 1], strict=True))
    if not ngram:
        assert {extent[:3] for extent in search._made} == {(2, 2, 32), (4, 2, 16)}
    expected = translate_ids(MODEL, sources, settings)
    assert [best.tokens for (best,) in found] == [best.tokens for (best,) in expected]
    assert [best.score for (best,) in found] == pytest.approx([best.score for (best,) in expected], abs=1e-4)


def test_what_engines_share_does_not_import_pytorch():
    seen = "import sys, qknorm.decoding.texts; print(sorted({'torch', 'pydantic', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
