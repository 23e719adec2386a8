"""The exported config, as transformers and as GPT-NeoX call its keys."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig

from megatron.checkpoints.hf import KerpleNeoXConfig
from megatron.neox_arguments.model_keys import hugging_face_keys


def test_a_key_answers_to_both_names_and_survives_saving(tmp_path: Path) -> None:
    config = KerpleNeoXConfig(num_hidden_layers=3, pos_emb="kerple_power", kerple_share="per_layer")
    assert config.num_layers == 3
    config.gpt_j_residual = True
    assert config.use_parallel_residual
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is KerpleNeoXConfig
    for key in hugging_face_keys():
        assert getattr(again, key.key) == getattr(again, key.name) == getattr(config, key.name)
    assert (again.num_layers, again.pos_emb, again.kerple_share) == (3, "kerple_power", "per_layer")


def test_heads_are_tied_only_if_the_config_says_so() -> None:
    assert KerpleNeoXConfig().tie_word_embeddings is False
    assert KerpleNeoXConfig(tie_word_embeddings=True).tie_word_embeddings is True
