"""Training: a short loop on a backend's engine, and hooks around it."""

from __future__ import annotations
