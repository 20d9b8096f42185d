"""A run folder for Hugging Face transformers: config, weights, tokenizer and how to generate."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Regex, normalizers, processors
from tokenizers import Tokenizer as Backend

from qknorm.decoding.translate import TextTranslator
from qknorm.export.card import TOKENIZER, write_card
from qknorm.export.describing import describe
from qknorm.specials import END, PAD, START
from qknorm.text.subwords import SPECIALS

_CONTROLS = r"[\x{0}-\x{8}\x{E}-\x{1B}\x{7F}-\x{84}\x{86}-\x{9F}\x{FEFF}]"
_SPACES = r"[\x{9}-\x{D}\x{1C}-\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}]+"
"""What `clean_line` drops, and what it makes one space of."""


def write_folder(translator: TextTranslator, folder: Path) -> None:
    """Fills a folder that exists with config, weights, tokenizer and translator.json."""
    model = make_model(translator)
    with _without_bars():
        model.save_pretrained(folder)
    translator.tokenizer.save(folder / TOKENIZER)
    make_tokenizer(folder / TOKENIZER, translator.longest).save_pretrained(folder)
    write_card(folder, describe(translator, "huggingface"))


def make_model(translator: TextTranslator) -> Any:
    """The translator's model as transformers sees it, with the same weights."""
    from qknorm.huggingface import QKNormConfig, QKNormForConditionalGeneration

    ours, settings = translator.model, translator.settings
    config = QKNormConfig(
        vocab_size=ours.vocabulary,
        model=ours.settings.model_dump(mode="json"),
        scale_init=ours.scale_init,
        source_language=translator.source,
        target_language=translator.target,
        longest=translator.longest,
        extra_length=settings.extra_length,
    )
    model = QKNormForConditionalGeneration(config).eval()
    model.translator.load_state_dict(ours.state_dict())
    model.generation_config.update(
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
        decoder_start_token_id=START,
        num_beams=settings.beam,
        length_penalty=settings.length_penalty,
        no_repeat_ngram_size=settings.no_repeat_ngram,
        min_new_tokens=1,
        max_length=1 + translator.longest + settings.extra_length,
    )
    return model


def make_tokenizer(path: Path, longest: int) -> Any:
    """Our tokenizer.json as transformers sees it: it cleans lines as we do, and adds the end."""
    from transformers import PreTrainedTokenizerFast

    backend = Backend.from_file(str(path))
    cleaning = [
        normalizers.Replace(Regex(_CONTROLS), ""),
        normalizers.Replace("▁", "_"),
        normalizers.NFC(),
        normalizers.Replace(Regex(_SPACES), " "),
        normalizers.Strip(),
    ]
    own = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([*cleaning, *own])
    pad, unknown, start, end = SPECIALS
    backend.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        unk_token=unknown,
        bos_token=start,
        eos_token=end,
        model_max_length=longest + 1,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # text that spells one out is just text
    )


def load_model(folder: Path) -> Any:
    """The model of an exported folder, as AutoModelForSeq2SeqLM loads it."""
    from transformers import AutoModelForSeq2SeqLM

    import qknorm.huggingface  # noqa: F401  makes transformers know it

    with _without_bars():
        return AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True).eval()


@contextmanager
def _without_bars() -> Iterator[None]:
    """Within it, transformers shows no progress: there is no more than a moment of it."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
