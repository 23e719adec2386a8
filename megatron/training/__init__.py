"""Training: a short loop on DeepSpeed's engine, hooks around it, checkpoints that survive."""

from __future__ import annotations
