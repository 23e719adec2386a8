"""Hugging Face: importing this registers KERPLE-NeoX with transformers' Auto classes."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megatron.checkpoints.hf.configuration_kerple import KerpleNeoXConfig
from megatron.checkpoints.hf.modeling_kerple import KerpleNeoXForCausalLM, KerpleNeoXModel

__all__ = ["KerpleNeoXConfig", "KerpleNeoXForCausalLM", "KerpleNeoXModel"]

AutoConfig.register(KerpleNeoXConfig.model_type, KerpleNeoXConfig, exist_ok=True)
AutoModel.register(KerpleNeoXConfig, KerpleNeoXModel, exist_ok=True)
AutoModelForCausalLM.register(KerpleNeoXConfig, KerpleNeoXForCausalLM, exist_ok=True)
