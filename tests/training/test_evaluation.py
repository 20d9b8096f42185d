"""Dev loss and dev BLEU against plain computations."""

import math

import pytest
import sacrebleu
import torch

from qknorm.config import Decoding, Dropout, Model, Prepare, Subwords
from qknorm.decoding.graphs import Graphs
from qknorm.decoding.translate import translate_ids
from qknorm.models.translator import Translator
from qknorm.scoring import score
from qknorm.scoring.repeated import RepeatedBleu
from qknorm.text.batching import collate, plan_batches
from qknorm.text.prepare import prepare
from qknorm.text.prepared import PreparedData
from qknorm.training import evaluation
from qknorm.training.evaluation import DevLoss, Evaluator
from qknorm.training.objective import label_smoothed_loss

SHAPE = {"width": 16, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 1, "heads": 2}
NOUNS = ["casa", "mesa", "porta", "cidade", "lingua"]


@pytest.fixture(scope="module", params=[False, True], ids=["raw", "pretokenized"])
def data(request, tmp_path_factory) -> PreparedData:
    folder = tmp_path_factory.mktemp("evaluation")
    for language, article in (("gl", "unha"), ("en", "a")):
        lines = [f"{article} {NOUNS[n % 5]} {' '.join(NOUNS[: n % 4])} {n} .\n" for n in range(80)]
        (folder / f"a.{language}").write_text("".join(lines))
    settings = Prepare(
        source="gl",
        target="en",
        train=(folder / "a.gl", folder / "a.en"),
        dev_pairs=8,
        test_pairs=8,
        subwords=Subwords(merges=30, pretokenized=request.param),
    )
    prepare(settings, folder / "out")
    return PreparedData.load(folder / "out")


def make_model(data: PreparedData) -> Translator:
    torch.manual_seed(0)
    allowed = torch.from_numpy(data.target_types.copy())
    allowed[3] = True
    settings = Model(**SHAPE, dropout=Dropout.everywhere(0.5, word=0.5))
    return Translator(data.tokenizer.size, settings, scale_init=5.0, allowed=allowed)


def loss_by_hand(model: Translator, data: PreparedData) -> float:
    dev, total, tokens = data.split("dev"), 0.0, 0
    model.eval()
    for i in range(len(dev)):
        source, target = dev.source[i].tolist(), dev.target[i].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([[*source, 3]]), torch.tensor([[2, *target]]))[0].double()
        for scores, wanted in zip(logits, [*target, 3], strict=True):
            if model.allowed[wanted]:
                total += float(scores.logsumexp(0) - scores[wanted])
                tokens += 1
    return total / tokens


@pytest.mark.parametrize("budget", [16, 64, 8_192])
def test_dev_loss_is_the_mean_over_tokens_however_they_are_batched(data, budget):
    model = make_model(data)
    expected = loss_by_hand(model, data)
    model.train()
    assert DevLoss(data.split("dev"), budget)(model) == pytest.approx(expected, rel=1e-5)
    assert model.training


def test_the_loss_is_to_the_bit_what_batch_by_batch_adds_up_to(data):
    model, dev = make_model(data).eval(), data.split("dev")
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in plan_batches(dev.source.lengths + 1, dev.target.lengths + 1, 64):
        rows = [int(i) for i in batch.sentences]
        arrays = collate([dev.source[i] for i in rows], [dev.target[i] for i in rows])
        source, target_in, target_out = (torch.from_numpy(array) for array in arrays)
        with torch.no_grad():
            losses = label_smoothed_loss(model(source, target_in), target_out, model.allowed, 0.0)
        sums += torch.stack([losses.plain, losses.tokens.float()])
    ready = DevLoss(dev, 64)
    assert ready(model) == ready(model) == DevLoss(dev, 64)(model) == float(sums[0] / sums[1].clamp(min=1))


def test_a_loss_over_many_batches_is_not_recorded_as_one(data, monkeypatch):
    asked: list[bool] = []

    class Watched(Graphs):
        def __init__(self, device: torch.device, *, record: bool = True) -> None:
            super().__init__(device, record=record)
            asked.append(record)

    monkeypatch.setattr(evaluation, "Graphs", Watched)
    model, expected = make_model(data), []
    for most in (1_000, 1):
        monkeypatch.setattr(evaluation, "MOST_RECORDED_BATCHES", most)
        asked.clear()
        expected.append(DevLoss(data.split("dev"), 64)(model))
        assert asked[-1] == (most > 1)
    assert expected[0] == expected[1]


def test_an_evaluation_that_fails_leaves_the_model_in_its_mode(data):
    model, settings = make_model(data).train(), Decoding(beam=1, extra_length=2)
    with torch.no_grad():
        model.decoder[0].feed_forward.widen.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError):
        Evaluator(data, "dev", settings)(model)
    assert model.training


def test_a_loss_made_ready_once_follows_the_weights_and_the_model(data):
    loss, first, second = DevLoss(data.split("dev")), make_model(data), make_model(data)
    with torch.no_grad():
        second.output_bias.add_(torch.randn_like(second.output_bias))
    for model in (first, second, first):
        assert loss(model) == pytest.approx(loss_by_hand(model, data), rel=1e-5)
        with torch.no_grad():
            model.words.weight.add_(0.1 * torch.randn_like(model.words.weight))
        assert loss(model) == pytest.approx(loss_by_hand(model, data), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_evaluations_on_a_gpu_are_those_on_the_cpu_again_and_again(data):
    model, settings = make_model(data), Decoding(beam=3, extra_length=6)
    on_gpu, on_cpu = Evaluator(data, "dev", settings), Evaluator(data, "dev", settings)
    moved = make_model(data).cuda().train()
    for _ in range(4):
        expected, found = on_cpu(model.train()), on_gpu(moved)
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)
        assert found.translations == expected.translations
        assert found.bleu == expected.bleu
        assert moved.training
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
            for mine, theirs in zip(moved.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)


def test_an_evaluation_is_the_loss_and_the_bleu_of_what_is_really_translated(data):
    model, settings, dev = make_model(data), Decoding(beam=2, extra_length=4), data.split("dev")
    evaluation = Evaluator(data, "dev", settings)(model.train())
    found = translate_ids(model, [dev.source[i].tolist() for i in range(len(dev))], settings)
    assert evaluation.translations == [data.tokenizer.decode(best.tokens) for (best,) in found]
    assert evaluation.loss == pytest.approx(loss_by_hand(model, data), rel=1e-5)
    assert evaluation.perplexity == pytest.approx(math.exp(evaluation.loss))
    metric = "multi-bleu" if data.tokenizer.pretokenized else "bleu"
    assert evaluation.bleu == score(evaluation.translations, [dev.text("en")], metric)[0].value


def test_the_state_of_the_model_and_its_random_numbers_are_left_alone(data):
    model = make_model(data).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    Evaluator(data, "dev", Decoding(beam=1, extra_length=2))(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_only_the_first_sentences_are_translated_where_so_asked(data):
    model, settings = make_model(data), Decoding(beam=1, extra_length=2)
    some, every = (Evaluator(data, "dev", settings, sentences=count)(model) for count in (3, None))
    assert some.translations == every.translations[:3]
    assert some.loss == every.loss
    assert len(Evaluator(data, "dev", settings, sentences=1_000)(model).translations) == len(every.translations)


def test_bleu_counts_the_tokens_of_tokenised_text_and_sacrebleus_of_raw_text(data):
    references = ["a house is here , small .", "it 's a city by the sea ."]
    translations = ["a house is here , large .", "it 's a city by a sea ."]
    tokenize = "none" if data.tokenizer.pretokenized else "13a"
    expected = sacrebleu.corpus_bleu(translations, [references], tokenize=tokenize).score
    bleu = RepeatedBleu(references, tokenized=data.tokenizer.pretokenized, lang="en")
    assert bleu(translations) == pytest.approx(expected, abs=0.01)
    assert bleu(references) == pytest.approx(100)
