"""A pipeline of transformers that translates: its own translation task is gone since version 5.

Importing this registers the task "qknorm-translation", so that `transformers.pipeline(TASK, folder)` makes one.
"""

from typing import Any

from torch import Tensor
from transformers import AutoModelForSeq2SeqLM
from transformers.pipelines import PIPELINE_REGISTRY, Pipeline

from qknorm.huggingface import search

TASK = "qknorm-translation"


class QKNormTranslationPipeline(Pipeline):
    """`transformers.pipeline(TASK, folder)`: one text or a list in, [{"translation_text": …}, …] out, by our search.

    What else is given goes to `generate`, such as num_beams; custom_generate=None has transformers search.
    """

    _load_tokenizer = True

    def _sanitize_parameters(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {}, options, {}

    def __call__(self, inputs: Any, **options: Any) -> Any:
        found = super().__call__(inputs, **options)
        if isinstance(inputs, list) and all(len(each) == 1 for each in found):  # as translation pipelines always did
            return [each[0] for each in found]
        return found

    def preprocess(self, text: str) -> Any:
        return self.tokenizer(text, return_tensors="pt", return_token_type_ids=False)

    def _forward(self, inputs: Any, **options: Any) -> Any:
        return self.model.generate(**inputs, **{"custom_generate": search, **options})

    def postprocess(self, sequences: Tensor) -> list[dict[str, str]]:
        texts = self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
        return [{"translation_text": text} for text in texts]


PIPELINE_REGISTRY.register_pipeline(TASK, pipeline_class=QKNormTranslationPipeline, pt_model=AutoModelForSeq2SeqLM)
