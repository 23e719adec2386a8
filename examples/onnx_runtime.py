"""Text from an ONNX file with onnxruntime, tokenizers and numpy alone.

python tools/convert_checkpoint.py RUN FOLDER --to onnx
python examples/onnx_runtime.py FOLDER "def main" 100
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime
import tokenizers


def main(folder: Path, prompt: str, count: int) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    past = {
        each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), np.float32)
        for each in session.get_inputs()[1:]
    }
    written = tokenizer.encode(prompt).ids
    tokens = written
    for _ in range(count):
        logits, *present = session.run(None, {"input_ids": np.array([tokens]), **past})
        past = dict(zip(past, present, strict=True))
        tokens = [int(logits[0, -1].argmax())]
        written = written + tokens
    print(tokenizer.decode(written))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
