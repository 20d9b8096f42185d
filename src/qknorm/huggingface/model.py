"""A translator behind the interface of Hugging Face transformers: config, model, caches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from qknorm.attention import KeyValueCache
from qknorm.config import Model
from qknorm.models.translator import DecoderCache, Memory, Translator
from qknorm.specials import END, PAD, START

IGNORED = -100
"""The label of positions that have nothing to learn, as everywhere in transformers."""


class QKNormConfig(PreTrainedConfig):
    """The settings of a translator (`model`, the group of that name in a run's settings), and facts of its run."""

    model_type = "qknorm"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 4
    model: dict[str, Any] | None = None
    scale_init: float | None = None
    source_language: str = ""
    target_language: str = ""
    longest: int = 512
    extra_length: int = 50
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = False  # within the translator they are, where its settings say so
    pad_token_id: int | None = PAD
    bos_token_id: int | None = START
    eos_token_id: int | list[int] | None = END
    decoder_start_token_id: int | None = START

    @property
    def settings(self) -> Model:
        """The settings as we read them, checked."""
        return Model.model_validate(self.model or {})

    @property
    def hidden_size(self) -> int:
        """Size of the vectors between sublayers."""
        return self.settings.width

    @property
    def num_attention_heads(self) -> int:
        """Attention heads."""
        return self.settings.heads

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the decoder, which are those that caches are for."""
        return self.settings.decoder_layers


class QKNormForConditionalGeneration(PreTrainedModel, GenerationMixin):
    """A `Translator` behind the interface of transformers."""

    config_class = QKNormConfig
    base_model_prefix = "translator"
    main_input_name = "input_ids"

    def __init__(self, config: QKNormConfig) -> None:
        super().__init__(config)
        self.translator = Translator(config.vocab_size, config.settings, scale_init=config.scale_init)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Positions are no weights, so that no file holds them; weights are drawn by the translator itself."""
        if isinstance(module, Translator):
            module.positions = module._position_table(len(module.positions)).to(module.words.weight)

    def get_input_embeddings(self) -> nn.Module:
        """The word vectors of the source."""
        return self.translator.words

    def get_encoder(self, *_: object, **__: object) -> nn.Module:
        """The part that `generate` calls once."""
        return _Encoder(self.translator)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """What the decoder reads to learn these labels: the start, and all of them but the last."""
        return F.pad(labels.masked_fill(labels == IGNORED, PAD), (1, -1), value=START)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: BaseModelOutput | Sequence[Tensor] | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **_: object,
    ) -> Any:
        """Logits of the token after each one of the target; −∞ for types that are never produced."""
        if encoder_outputs is None:
            if input_ids is None:
                raise ValueError("give input_ids, or encoder_outputs with attention_mask")
            encoder_outputs = _Encoder(self.translator)(input_ids, attention_mask)
        if labels is not None and decoder_input_ids is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if decoder_input_ids is None:
            raise ValueError("give decoder_input_ids or labels; generate makes translations")
        past = past_key_values
        if past is None and use_cache and labels is None:
            past = EncoderDecoderCache(DynamicCache(), DynamicCache())
        cache = None if past is None else _our_cache(past, len(self.translator.decoder))
        memory = read_memory(encoder_outputs[0], attention_mask, input_ids)
        states = self.translator.decode(decoder_input_ids, memory, cache)
        logits = self.translator.score(states, cache)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        output = Seq2SeqLMOutput(
            loss=loss, logits=logits, past_key_values=past, encoder_last_hidden_state=encoder_outputs[0]
        )
        return output.to_tuple() if return_dict is False else output


class _Encoder(nn.Module):
    """Reads sources for `generate`; it owns nothing."""

    def __init__(self, translator: Translator) -> None:
        super().__init__()
        self._translator = (translator,)  # within a tuple it is no part of this module

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: object) -> BaseModelOutput:
        source = input_ids if attention_mask is None else input_ids.masked_fill(attention_mask == 0, PAD)
        return BaseModelOutput(last_hidden_state=self._translator[0].encode(source).states)


def read_memory(states: Tensor, attention_mask: Tensor | None, input_ids: Tensor | None) -> Memory:
    """What the decoder reads: the encoder's states, and which of them are real by the mask, or else by the ids."""
    if attention_mask is not None:
        real = attention_mask != 0
    elif input_ids is not None:
        real = input_ids != PAD
    else:
        real = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    return Memory(states, real[:, None, None, :])


class _LayerCache(KeyValueCache):
    """One layer of a cache of transformers, as our attention uses it."""

    def __init__(self, cache: Cache, layer: int, *, fixed: bool) -> None:
        super().__init__(fixed=fixed)
        self._cache, self._layer = cache, layer
        self.length = int(cache.get_seq_length(layer))  # a fixed cache answers with its own counter

    @property
    def filled(self) -> bool:
        return self.fixed and self.length > 0

    def read(self) -> tuple[Tensor, Tensor]:
        layer = self._cache.layers[self._layer]
        return self._used(layer.keys, layer.values)

    def append(self, k_bhsd: Tensor, v_bhsd: Tensor) -> tuple[Tensor, Tensor]:
        self.length += k_bhsd.shape[2]
        return self._used(*self._cache.update(k_bhsd, v_bhsd, self._layer))

    def _used(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Caches of a fixed size have room at their end, which is not to be seen."""
        return keys[:, :, : self.length], values[:, :, : self.length]


def _our_cache(past: EncoderDecoderCache, layers: int) -> DecoderCache:
    ours = DecoderCache(layers)
    ours.own = [_LayerCache(past.self_attention_cache, i, fixed=False) for i in range(layers)]
    ours.across = [_LayerCache(past.cross_attention_cache, i, fixed=True) for i in range(layers)]
    # a place that lasts as long as the decoding does, for tables that are worked out once
    ours.words = past.__dict__.setdefault("word_tables", {})
    return ours
