"""train.py on a rank whose config differs: `KERPLE_TEST_RANK_1` holds what rank 1 has otherwise."""

from __future__ import annotations

import json
import os
import sys

from megatron.neox_arguments import NeoXArgs
from megatron.training.entry import run_and_report

args = NeoXArgs.from_files([sys.argv[1]])
if os.environ["RANK"] == "1":
    args = args.replace(**json.loads(os.environ["KERPLE_TEST_RANK_1"]))
sys.stdout.flush()
code = run_and_report(args)
sys.stdout.flush()
os._exit(code)
