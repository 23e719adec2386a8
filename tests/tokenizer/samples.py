"""A text with what tokenizers stumble over."""

from __future__ import annotations

HARD = "Ünïcödé 你好 🤖\r\n\tdef f(x):  return x**2  # it's 'quoted' \x00 done \n\n\n"
