"""What the tests of exports share: small random models of all kinds, with the tokenizer of real sentences."""

import math
from pathlib import Path

import torch

from qknorm.config import Attention, Decoding, Model, Train
from qknorm.decoding.translate import TextTranslator
from qknorm.models.translator import Translator, start_of_scale
from qknorm.text.demo_corpus import generate
from qknorm.text.subwords import Tokenizer

TYPES = 60
KINDS: dict[str, dict[str, object]] = {
    "the paper's": {"norm": "scale"},
    "p of 1": {"attention": Attention(p=1.0)},
    "p of 3, rotary before": {
        "attention": Attention(p=3.0), "positions": "rotary", "rotary_order": "before_norm", "kv_heads": 1,
    },
    "p of 3.5, rotary after": {"attention": Attention(p=3.5), "positions": "rotary", "kv_heads": 2, "tie": "target"},
    "p infinite, values too": {"attention": Attention(p=math.inf, normalize_values=True), "kv_heads": 2},
    "p learned": {"attention": Attention(p=2.5, p_learned=True, scale_per_head=True), "kv_heads": 2},
    "query over width": {"attention": Attention(cross_query_norm="width", scale_per_head=True)},
    "query over width, p of 3": {"attention": Attention(p=3.0, cross_query_norm="width")},
    "rms": {"attention": Attention(qk_norm="rms"), "norm": "rms", "positions": "rotary", "activation": "swiglu"},
    "layer, post": {"attention": Attention(qk_norm="layer"), "norm_position": "post", "activation": "gelu"},
    "scale, post": {"norm": "scale", "norm_position": "post", "positions": "sinusoid-slip", "tie": "target"},
    "dot products": {
        "attention": Attention(qk_norm="none"), "norm": "none", "tie": "none", "fixnorm": False,
        "language_vectors": False,
    },
}  # fmt: skip
SHAPE = {"width": 24, "feed_forward": 32, "encoder_layers": 2, "decoder_layers": 2, "heads": 4}


def make_model(types: int = TYPES, seed: int = 0, **changes: object) -> Translator:
    """A model whose every parameter is random, some of whose types may not be produced."""
    settings = Model(**{**SHAPE, **changes})  # type: ignore[arg-type]
    allowed = torch.ones(types, dtype=torch.bool)
    allowed[[0, 1, 2, 7]] = False
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Translator(types, settings, scale_init=start_of_scale(settings, 20), allowed=allowed).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def make_translator(seed: int = 0, longest: int = 40, **changes: object) -> TextTranslator:
    """A random translator with the subwords of the demo corpus."""
    lines = [line for pair in generate(400) for line in pair]
    tokenizer = Tokenizer.train(lines, 150, pretokenized=False)
    model = make_model(tokenizer.size, seed, **changes)
    with torch.no_grad():  # sentences of many lengths: the end competes with the rest
        model.output_bias[3] += 2.5
    return TextTranslator(model, tokenizer, "gl", "en", Decoding(extra_length=8), longest)


def write_run(folder: Path, settings: Train) -> Path:
    """A run with a checkpoint, though nothing was trained."""
    from qknorm.config import Prepare
    from qknorm.text.prepare import prepare
    from qknorm.text.prepared import PreparedData
    from qknorm.training.checkpoint import save_checkpoint
    from qknorm.training.run_folder import build_model, create_run

    pairs = folder / "pairs.tsv"
    pairs.write_text("".join(f"{gl}\t{en}\n" for gl, en in generate(120)), encoding="utf-8")
    prepare(Prepare(source="gl", target="en", train=(pairs,)), folder / "data")
    data = PreparedData.load(folder / "data")
    about = create_run(folder / "run", settings, data)
    allowed = torch.from_numpy(data.target_types.copy())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_checkpoint(folder / "run", 5, build_model(settings, about, allowed).state_dict(), {}, {})
    return folder / "run"
