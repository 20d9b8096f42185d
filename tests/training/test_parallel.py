"""A model as a team trains it: what was saved goes back in, older checkpoints too."""

import pytest
import torch
from torch.torch_version import TorchVersion

from qknorm.config import Attention, Model
from qknorm.errors import InputError
from qknorm.models.translator import Translator
from qknorm.training import parallel
from qknorm.training.parallel import SpreadModel, Team

TINY = {"width": 16, "feed_forward": 24, "encoder_layers": 1, "decoder_layers": 1, "heads": 4}


def spread(p: float) -> SpreadModel:
    model = Translator(30, Model(**TINY, attention=Attention(p=p)), scale_init=5.0)
    return SpreadModel(model, model)


def test_checkpoints_from_before_p_was_in_them_go_back_in() -> None:
    first, second = spread(3.0), spread(3.0)
    saved = first.weights()
    fixed = [name for name in saved if name.endswith(".p_fixed")]
    assert len(fixed) == 3
    older = {name: value for name, value in saved.items() if name not in fixed}
    older = {name: value.reshape(()) if name.endswith("norm.scale") else value for name, value in older.items()}
    older["words.weight"] = older["words.weight"] + 1.0
    optimizer = torch.optim.SGD(second.inner.parameters(), lr=0.1)
    second.restore(older, {}, optimizer)
    now = second.weights()
    assert now.keys() == saved.keys()
    for name, value in now.items():
        torch.testing.assert_close(value, saved[name] if name in fixed else older[name].reshape(value.shape))
    with pytest.raises(InputError, match=r"it has \S+p_fixed, which the settings leave out"):
        spread(2.0).restore(saved, {}, optimizer)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"width": 32}, r"its \S+ has shape \(\d+, 16\) where the settings give \(\d+, 32\); undo"),
        ({"decoder_layers": 2}, r"it has no decoder\.\S+, which the settings ask for; undo"),
    ],
)
def test_weights_of_another_make_are_refused_with_what_differs(changed: dict[str, int], told: str) -> None:
    model = Translator(30, Model(**TINY | changed), scale_init=5.0)
    with pytest.raises(InputError, match=rf"does not fit the model: {told}"):
        SpreadModel(model, model).restore(spread(2.0).weights(), {}, torch.optim.SGD(model.parameters(), lr=0.1))


def test_fsdp_is_refused_where_pytorch_is_too_old_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.8.0+cpu"))
    team = Team(0, 2, torch.device("cpu"))
    with pytest.raises(InputError, match=r"fsdp needs PyTorch 2\.9 or newer, and this is 2\.8\.0\+cpu; give ddp"):
        parallel.spread(Translator(30, Model(**TINY), scale_init=5.0), team, "fsdp")
