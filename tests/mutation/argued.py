"""Mutants that no test can see, because they change no result: each with the reason."""

from __future__ import annotations

ARGUED: dict[str, str] = {
    "checkpoints/hf/modeling_kerple.py: Attention.forward: cos is not None and sin is not None -> "
    "(cos is not None or sin is not None)": "_angles gives both or neither; the type checker asks",
    "checkpoints/hf/scores_kerple.py: attend_in_blocks: 1 -> (2)": (
        "the least number of rows in a block: the result does not depend on the blocks"
    ),
    "checkpoints/neox_run.py: _of_zero: True -> (False)": (
        "zip's strict: one vector is made for each group, the lengths are equal"
    ),
    "checkpoints/safe_files.py: _checked_archive: 0 -> (1)": (
        "the size of no pickle at all, only compared with a limit of megabytes"
    ),
    "checkpoints/store.py: CheckpointStore.verify: other < step -> (other <= step)": (
        "the step itself is not in the list"
    ),
    "data/gpt_dataset.py: split_bounds: 0 -> (1)": (
        "every boundary and the rounding error that is subtracted from it move by one"
    ),
    "engines/cpu_torch.py: _Heads.forward: 0.0 -> (1.0) (2)": (
        "any finite number: the scores of a row that sees nothing are -inf, its probabilities 0"
    ),
    "engines/dropout.py: _mixed: 64 -> (65)": (
        "a factor as an unsigned number: torch multiplies modulo 2^64 either way"
    ),
    "data/index_cache.py: : 20 -> (21)": (
        "a limit of memory for a forged header: 1 or 2 MB, where a header has some hundred bytes"
    ),
    "data/index_cache.py: _header: True -> (False) (3)": (
        "the order of keys in a header, which is read as a mapping"
    ),
    "data/preprocess.py: Encoder._encode_conversations: True -> (False) (3)": (
        "zip's strict: one list is made for each column"
    ),
    'data/preprocess.py: _tokenize: bar.set_postfix_str(f"{speed:.1f} MB text/s", refresh=False) '
    "-> pass": "the text beside a progress bar",
    "data/preprocess.py: available_cores: 1 -> (2)": (
        "for a system that tells neither its cores nor this process's"
    ),
    "engines/triton_features.py: with_features: line - start -> (line + start)": (
        "more zeros behind a table of which the copies take the first `line + copies` entries"
    ),
    "engines/triton_softmax.py: softmax_backward_kernel: 1 -> (2)": (
        "the end of a walk over keys: one more block at most, all of it beyond the row and masked"
    ),
    "training/optimizer.py: wsd_rate: step <= warmup -> (step < warmup)": (
        "at the last step of the warmup both branches give the peak"
    ),
}
