"""The pictures of the docs can be drawn again, and every method that acts on scores has one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron.model.position_names import POSITIONAL_EMBEDDINGS

ROOT = Path(__file__).parents[2]
TOGETHER = {
    "kerple_power_original": "alibi",
    "bam_ssmax": "bam",
    "kerple_inkling": "inkling",
    "xpos": "rotary",
}


def test_draws_a_picture_for_every_method_and_the_docs_show_it(tmp_path: Path) -> None:
    script = ROOT / "tools" / "draw_kernel_docs.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True, cwd=tmp_path)
    ours = {
        TOGETHER.get(name, name)
        for name, cls in POSITIONAL_EMBEDDINGS.items()
        if cls.kind not in ("input", "none") and cls.__module__.startswith("megatron.")
    }
    drawn = {path.stem for path in tmp_path.glob("*.png") if path.stat().st_size > 5000}
    assert drawn == ours | {"families"}
    page = (ROOT / "docs" / "positional_embeddings.md").read_text(encoding="utf-8")
    for name in drawn:
        assert f"images/kernels/{name}.png" in page
        assert (ROOT / "docs" / "images" / "kernels" / f"{name}.png").is_file()
