"""Every method of the catalogue trains, resumes, splits over two ranks, generates with a cache, is
exported and is drawn: one tiny model each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.hf.folder import write_hf
from megatron.commands import run
from megatron.generation.pretrained import load_pretrained
from megatron.model.position_names import positional_embedding_class
from megatron.neox_arguments.catalogue import METHODS
from tests.training.cases import layout, run_cases, tiny_config, write_data

STEPS = 3
# limits below the length of a sequence, 16, so that both sides of each are trained
OPTIONS = {"inkling_features": 3, "inkling_distances": 7, "fire_threshold": 6}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position": 48,
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"pos_emb": name} for name in METHODS},
    "longrope": {"pos_emb": "rotary", "rope_scaling": LONGROPE},
    "clipped, randomized_positions": {
        "pos_emb": "rotary",
        "rope_scaling": {"type": "clipped", "clipped_pairs": 2},
        "randomized_positions": 48,
    },
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one and two processes found, and where: three steps, and the last of them resumed."""
    root = tmp_path_factory.mktemp("every_method")
    data = write_data(root)

    def config(name: str, **changes: Any) -> dict[str, Any]:
        return tiny_config(data, max_position_embeddings=48, **OPTIONS, **CASES[name], **changes)

    alone, two = dict[str, Any](), dict[str, Any]()
    for name in CASES:
        whole = {"config": config(name), "steps": STEPS, "background": [2, str(root / name)]}
        alone[name] = whole
        alone[f"{name}, resumed"] = {
            "config": config(name), "steps": 1, "resume": str(root / name),
        }  # fmt: skip
        split = {"config": config(name, **layout(mp=2)), "steps": STEPS}
        two[f"{name}, split"] = {**split, "save": str(root / f"{name}-split")}
    found = run_cases(alone, root, 1) | run_cases(two, root, 2)
    return {**found, "root": root}


@pytest.mark.parametrize("name", CASES)
def test_every_method(name: str, trained: dict[str, Any], tmp_path: Path) -> None:
    whole, resumed, split = (trained[f"{name}{way}"] for way in ("", ", resumed", ", split"))
    assert whole["unchanged"] == [[False]] * STEPS and whole["skipped"] == [[False]] * STEPS
    if name != "sinusoidal":  # its vectors are fifty times a token's at first: three steps are few
        assert whole["losses"][-1] < whole["losses"][0], "nothing was learned"
    assert resumed["losses"] == whole["losses"][2:]
    assert resumed["fingerprints"] == whole["fingerprints"]
    for key in ("losses", "grad_norms"):
        assert split[key] == pytest.approx(whole[key], rel=2e-5)

    root: Path = trained["root"] / f"{name}-split"
    model = load_pretrained(root)
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, cache = model(tokens), model.new_cache()
        pieces = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 9), (9, 10), (10, 20))]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-5)

    (tmp_path / "hf").mkdir()
    write_hf(read_checkpoint(root), tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        torch.testing.assert_close(exported(tokens).logits, expected, rtol=1e-4, atol=1e-4)

    method = positional_embedding_class(CASES[name]["pos_emb"])
    drawn = method.kind not in ("input", "none")
    assert run("plot_kernels", [str(root), "--out", str(tmp_path)]) == (0 if drawn else 2)
    assert bool(list(tmp_path.glob("*.png"))) == drawn
