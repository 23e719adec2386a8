"""evaluate.py in two processes, of which the second dies before the results are gathered."""

from __future__ import annotations

import os
import sys
from typing import Any

from megatron.evaluation import evaluator
from megatron.neox_arguments import NeoXArgs


def measure(args: NeoXArgs, ranks: Any, device: str) -> int:
    if ranks.rank == 1:
        os._exit(9)
    ranks.map(list, [1, 2])
    return 0


evaluator._evaluate = measure
sys.exit(evaluator.run_evaluation(NeoXArgs.from_files([sys.argv[1]])))
