"""A training pass of the language model through fused layers; `language_model.py` is the reference."""

from typing import TYPE_CHECKING

from torch import Tensor

from qknorm.config import LanguageModel as Settings
from qknorm.models import fused_layers
from qknorm.models.fused_layers import Part
from qknorm.models.fused_run import FusedRun, current_run

if TYPE_CHECKING:
    from qknorm.models.language_model import LanguageModel, Layer


def run_for(model: "LanguageModel") -> FusedRun | None:
    """The run to take part in: where one with fused layers is under way, in training."""
    run = current_run()
    return run if run is not None and run.layers and model.training and takes_part(model.settings) else None


def takes_part(settings: Settings) -> bool:
    """Whether fused layers are made for models of these settings."""
    return fused_layers.fits(settings.width)


def states(model: "LanguageModel", run: FusedRun, ids_bt: Tensor) -> Tensor:
    """The states that `LanguageModel` makes of whole windows, before they are multiplied by the output vectors."""
    positions = None if model.positions is None else model.positions[: ids_bt.shape[1]]
    share = model.dropout.p
    x = fused_layers.embed(run, ids_bt, model.words, None, positions, share, factor=1.0, fixnorm=False)
    parts = [part for layer in model.decoder for part in _parts(layer)]  # type: ignore[arg-type]
    return fused_layers.run_pre_norm(run, x, parts, model.norm)


def _parts(layer: "Layer") -> list[Part]:
    def attend_to_self(y: Tensor) -> Tensor:
        out: Tensor = layer.attention(y, y, y, need_weights=False, is_causal=True)[0]
        return out

    return [
        Part(layer.around_attention, attend_to_self, layer.attention.out_proj.bias),
        Part(layer.around_feed_forward, layer.feed_forward, layer.feed_forward.narrow.bias),
    ]
