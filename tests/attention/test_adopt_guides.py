"""What the guides on unstable training and on theory say and run."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foreign_models import library
from qknorm import initial_scale

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))


@pytest.fixture(scope="module")
def theory() -> Any:
    return __import__("theory")


def test_the_slope_of_softmax_is_its_jacobian(theory: Any) -> None:
    z = torch.randn(5, 7, dtype=torch.float64) * 3
    rows = torch.stack([torch.autograd.functional.jacobian(lambda row: row.softmax(-1), row) for row in z])
    torch.testing.assert_close(theory.softmax_slope(z.softmax(-1)), rows.norm(dim=(-2, -1)), rtol=1e-12, atol=0)
    far_apart = torch.tensor([[200.0, 0.0, 0.0]], dtype=torch.float64).softmax(-1)  # 1 − w is lost in rounding here
    assert theory.softmax_slope(far_apart).item() == pytest.approx(math.sqrt(8) * math.exp(-200), rel=1e-9)


@pytest.mark.parametrize("length", [2, 79, 4096])
def test_the_top_weight_in_closed_form(theory: Any, length: int) -> None:
    logits = torch.zeros(length, dtype=torch.float64)
    logits[0] = g = initial_scale(length)
    assert theory.top_weight(g, length, 0.0) == pytest.approx(logits.softmax(0)[0].item(), rel=1e-12)
    assert theory.top_weight(math.log(length**2 - length), length, 0.0) == pytest.approx(length / (length + 1))
    assert theory.top_weight(g, length, -1.0) > theory.top_weight(g, length, 0.0)


def test_inits_are_as_large_as_theory_has_it(theory: Any) -> None:
    for name, measured, expected, normed in theory.measure_inits():
        assert measured == pytest.approx(expected, rel=0.05), name
        assert normed == pytest.approx(theory.G * theory.LENGTH / math.sqrt(theory.HEAD), rel=0.05), name


@pytest.mark.slow
def test_the_sweep_runs(tmp_path: Path) -> None:
    script = ROOT / "examples" / "unstable_training.py"
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert {*record["final_loss"]} == {"dot product", "dot product, warm-up", "QKNorm"} == {*record["looks"]}
    bound = max(look["logit"] for look in record["looks"]["QKNorm"])
    assert bound < 25 < max(look["logit"] for look in record["looks"]["dot product"])
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".png", ".png"]
    assert re.search(r"loss on the calibration batch: [\d.e-]+ before, [\d.e-]+ after", done.stdout)


def test_python_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "guides" / "unstable-training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    library("transformers")
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "unstable-training.md", "exec"), names)


def test_the_guide_knows_what_a_torchvision_of_another_build_makes_of_an_import() -> None:
    text = " ".join((ROOT / "docs" / "guides" / "unstable-training.md").read_text(encoding="utf-8").split())
    told = "Could not import module 'LlamaConfig'"
    assert (
        f'"{told}"' in text and "`pip uninstall torchvision`" in text and "`pip install 'qknorm[huggingface]'`" in text
    )
    assert text.index("install the one that goes with your torch") < text.index("`pip uninstall torchvision`")
    library("transformers")
    code = "from transformers import LlamaConfig"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or ("torchvision" in done.stderr and told in done.stderr), done.stderr
