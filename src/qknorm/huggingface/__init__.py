"""Our translators as models of Hugging Face transformers: importing this makes its Auto classes know them.

`qknorm export RUN --to huggingface` writes a folder that AutoModelForSeq2SeqLM and AutoTokenizer load from then on.
`generate` with num_beams=1 gives our translations. With a beam it ranks by its own length penalty, log-probability over
nᵅ, and keeps beams in its own way; `custom_generate=search` is our search and our penalty, ((5 + n)/6)ᵅ.
"""

from qknorm.attention.adopting.torchvision import tolerate_any_torchvision
from qknorm.errors import InputError

tolerate_any_torchvision()
try:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast

    from qknorm.huggingface.model import QKNormConfig, QKNormForConditionalGeneration
    from qknorm.huggingface.search import search
except ImportError as error:
    raise InputError(
        f"this needs transformers 5.22 or newer, which could not be imported ({error}); get it with "
        f"pip install 'qknorm[huggingface]'"
    ) from None

__all__ = ["QKNormConfig", "QKNormForConditionalGeneration", "search"]

AutoConfig.register(QKNormConfig.model_type, QKNormConfig, exist_ok=True)
AutoModelForSeq2SeqLM.register(QKNormConfig, QKNormForConditionalGeneration, exist_ok=True)
AutoTokenizer.register(QKNormConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
