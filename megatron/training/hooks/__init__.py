"""What happens around the steps: validation, logging, checkpoints, signals."""

from __future__ import annotations
