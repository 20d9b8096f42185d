import pytest
import torch

from qknorm.config import Attention, Decoding, Dropout, Model
from qknorm.decoding.recorded import RecordedDecoder
from qknorm.decoding.translate import translate_ids
from qknorm.models.translator import Translator, start_of_scale

SETTINGS = [
    {},
    {"positions": "rotary", "kv_heads": 2},
    {"tie": "none", "fixnorm": False, "norm": "scale", "attention": Attention(qk_norm="none")},
    {"norm_position": "post", "attention": Attention(p=3.0)},
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize(
    "decoding", [Decoding(beam=4, length_penalty=0.0), Decoding(beam=1, extra_length=5), Decoding(beam=3)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_recorded_steps_find_what_plain_ones_find(options: dict[str, object], decoding: Decoding, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    settings = Model(
        width=32,
        feed_forward=64,
        encoder_layers=1,
        decoder_layers=2,
        heads=4,
        dropout=Dropout.everywhere(0.0),
        **options,
    )  # type: ignore[arg-type]
    model = Translator(50, settings, scale_init=start_of_scale(settings, 20)).to(device).eval()
    sources = [torch.randint(4, 50, (n,)).tolist() for n in (3, 9, 20, 4, 7, 40, 2, 5)]
    decoder = RecordedDecoder(model, torch.float32)
    for _ in range(2):  # the second time all recordings are there, and the weights have moved
        plain = translate_ids(model, sources, decoding)
        recorded = translate_ids(model, sources, decoding, make_stepper=decoder)
        assert [best.tokens for best, *_ in recorded] == [best.tokens for best, *_ in plain]
        for (mine, *_), (reference, *_) in zip(recorded, plain, strict=True):
            assert mine.score == pytest.approx(reference.score, abs=1e-4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
