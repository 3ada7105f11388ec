"""docs/your_model.md, word for word, as far as the libraries are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "your_model.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
BY_LIBRARY = {
    library: block
    for block in BLOCKS[1:]
    for library in ("timm", "transformers")
    if re.match(rf"(from|import) {library}\b", block)
}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What the block on torchvision leaves for the others."""
    names: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        torch.manual_seed(0)
        exec(BLOCKS[1], names)
        names["saved"] = torch.load("unlearned.pt")
    return names


def test_a_model_of_torchvision_is_unlearned_as_the_page_says(first, capsys):
    model, result = first["model"], first["result"]
    assert result.verdict == "applied"
    assert result.predicted_share > 0.5
    changed = {name for name, now in first["saved"].items() if not torch.equal(now, model.state_dict()[name])}
    assert changed == {"fc.weight", "fc.bias"}
    names = {**first, "loader": first["forget"]}
    exec(BLOCKS[0], names)  # the same in short, with an l2 that is estimated
    assert "l2_estimated" in names["result"].reasons


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_models_of_other_libraries_are_unlearned_as_the_page_says(library, first):
    pytest.importorskip(library)
    names = dict(first)
    exec(BY_LIBRARY[library], names)
    assert names["result"].verdict.startswith("applied")
    assert names["result"].model is not None
