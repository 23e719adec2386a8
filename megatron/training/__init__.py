"""Training: a short loop on DeepSpeed's engine, and hooks around it."""

from __future__ import annotations
