"""Configuration of KERPLE-NeoX models in Hugging Face's form.

Every exported model contains this file: it needs transformers and the files beside it, no other.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig

from .keys_kerple import DEFAULTS, NAMES


class KerpleNeoXConfig(PretrainedConfig):
    """A GPT-NeoX decoder whose positions are functions of distance.

    Its attributes are the model's keys (keys_kerple.py lists them with their defaults), and each
    can be read and set under GPT-NeoX's name too. `pos_emb` names the positional embedding
    (kerple_log, kerple_power, alibi, rpe, rotary, ...); `train_length` is the length trained at;
    only `learned` positions are limited, by `max_position_embeddings`.
    """

    model_type = "kerple_neox"
    keys_to_ignore_at_inference = ("past_key_values",)
    attribute_map: ClassVar[dict[str, str]] = NAMES

    def __init__(self, vocab_size: int = 50304, **kwargs: Any) -> None:
        own = {"norm_eps": 1e-5, "iteration": 0, "use_cache": True}
        self.vocab_size = vocab_size
        keys = {key: kwargs.pop(key, default) for key, default in (DEFAULTS | own).items()}
        keys["head_dim"] = keys["head_dim"] or keys["hidden_size"] // keys["num_attention_heads"]
        for key, value in keys.items():
            setattr(self, key, value)
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        super().__init__(**{"tie_word_embeddings": False, **tokens, **kwargs})
