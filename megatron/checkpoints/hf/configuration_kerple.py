"""Configuration of KERPLE-NeoX models in Hugging Face's form.

This file travels with every exported model: it needs transformers and its neighbours, nothing else.
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

    def __init__(
        self,
        vocab_size: int = 50304,
        norm_eps: float = 1e-5,
        iteration: int = 0,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.norm_eps = norm_eps
        self.iteration = iteration
        self.use_cache = use_cache
        for key, default in DEFAULTS.items():
            setattr(self, key, kwargs.pop(key, default))
        kwargs |= {
            "tie_word_embeddings": tie_word_embeddings,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        }
        super().__init__(**kwargs)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads
