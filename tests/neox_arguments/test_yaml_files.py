"""YAML files, several of them, --override and --set."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.yaml_files import dump_yaml, parse_yaml, read_layer
from tests.neox_arguments.samples import write


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yml"
    path.write_text(
        "{num-layers: 2, hidden-size: 32, num-attention-heads: 4, seq-length: 64, "
        "seq-length-val: 2048, train-iters: 5, train_micro_batch_size_per_gpu: 1, pos-emb: alibi, "
        "bf16: {enabled: true}, optimizer: {type: Adam, params: {lr: 0.1, eps: 1.0e-7}}}"
    )
    return path


def other(base: Path, text: str) -> Path:
    path = base.parent / "other.yml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", ["1e-4", "-1E5", "1_000", "017", "yes", "~", "<<", "a: b", ""])
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    written = dump_yaml({"wandb_run_name": text, "stop_strings": [text]})
    assert parse_yaml(written, "again") == {"wandb_run_name": text, "stop_strings": [text]}


def test_different_value_in_two_files_names_both(base: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_files([base, other(base, "{seq_length_val: 16384, eval_iters: 5}")])
    for fragment in ("seq_length_val", "2048", "16384", "base.yml", "other.yml", "--override"):
        assert fragment in str(caught.value)


def test_a_later_file_of_one_length_wins_as_in_the_official_evaluation(base: Path) -> None:
    overlay = other(base, "seq-length-val: 16384")
    assert NeoXArgs.from_files([base, overlay]).model.seq_length_val == 16384
    with pytest.raises(ConfigError, match=r"train_iters is 5 in .*other\.yml"):
        NeoXArgs.from_files([base, other(base, "train_iters: 77")])
    folder = base.parent / "lengths"
    folder.mkdir()
    (folder / "short.yml").write_text("train_iters: 77")
    args = NeoXArgs.from_files([base, folder / "short.yml"])
    assert args.optimization.train_iters == 77


def test_alias_conflicts_with_the_key_it_stands_for(base: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint_factor"):
        NeoXArgs.from_files(
            [base, other(base, "{save-interval: 5}")],
            overrides=[],
            sets=["seed=1", "checkpoint_factor=5"],
        ).replace(save_interval=6)


def test_equal_values_in_two_files_are_fine(base: Path) -> None:
    args = NeoXArgs.from_files([base, other(base, "{train_iters: 5, fp16: {type: bfloat16}}")])
    assert args.optimization.train_iters == 5


def test_same_key_twice_in_one_file(base: Path) -> None:
    with pytest.raises(ConfigError, match="twice"):
        NeoXArgs.from_files([base, other(base, "{save: a, save: b}")])
    with pytest.raises(ConfigError, match="twice"):
        NeoXArgs.from_files([base, other(base, "{data-path: a, data_path: b}")])


def test_override_file_wins_and_mappings_merge(base: Path) -> None:
    above = other(base, "{seq_length_val: 16384, optimizer: {params: {lr: 0.2}}}")
    args = NeoXArgs.from_files([base], overrides=[above])
    assert args.model.seq_length_val == 16384
    assert args.optimization.lr == 0.2
    assert args.optimization.optimizer.params.eps == 1e-7


def test_set_wins_over_override(base: Path) -> None:
    args = NeoXArgs.from_files(
        [base],
        overrides=[other(base, "seq_length_val: 16384")],
        sets=["seq-length-val=128", "optimizer.params.lr=1e-4", "eval_lengths=[64, 128]", "load="],
    )
    assert args.model.seq_length_val == 128
    assert args.optimization.lr == 1e-4
    assert args.optimization.optimizer.type == "adam"
    assert args.evaluation.eval_lengths == [64, 128]
    assert args.checkpoint.load is None


@pytest.mark.parametrize(
    ("sets", "betas"),
    [
        (["optimizer.type=lion"], (0.9, 0.99)),
        (["optimizer.type=lion", "optimizer.params.betas=[0.8, 0.9]"], (0.8, 0.9)),
        (["optimizer.params.betas=[0.8, 0.9]", "optimizer.type=lion"], (0.9, 0.99)),
        (["optimizer.type=AdamW"], (0.9, 0.95)),
    ],
)
def test_another_optimizer_has_its_own_defaults(
    base: Path, sets: list[str], betas: tuple[float, float]
) -> None:
    """Adam's betas in the file are not Lion's; the learning rate stays."""
    adam = ["optimizer={type: Adam, params: {lr: 0.003, betas: [0.9, 0.95]}}"]
    params = NeoXArgs.from_files([base], sets=[*adam, *sets]).optimization.optimizer.params
    assert (params.lr, params.betas) == (0.003, betas)


def test_two_precisions_in_one_command_are_refused(base: Path) -> None:
    sets = ["fp16.enabled=true", "bf16.enabled=true"]
    with pytest.raises(ConfigError, match=r"--set fp16.enabled and --set bf16.enabled choose"):
        NeoXArgs.from_files([base], sets=sets)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_set_precision_replaces_the_blocks_of_files(base: Path, precision: str) -> None:
    args = NeoXArgs.from_files([base], sets=[f"precision={precision}"])
    assert args.optimization.precision == precision
    again = NeoXArgs.from_files([base], sets=[f"precision={precision}", "fp16.enabled=true"])
    assert again.optimization.precision == "fp16"


@pytest.mark.parametrize(
    ("assignment", "fragment"),
    [
        ("train_iters", "key=value"),
        ("=3", "empty"),
        ("trainiters=3", "Did you mean train_iters"),
        ("optimizer..lr=3", "empty"),
        ("hidden_size.x=3", "hidden_size"),
        ("train_iters=[", "YAML"),
        ("train_iters=many", "train_iters"),
        ("optimizer.params.learning=1", "optimizer.params.learning"),
    ],
)
def test_wrong_set(base: Path, assignment: str, fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        NeoXArgs.from_files([base], sets=[assignment])


def test_scientific_notation_without_a_dot_is_a_number(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yml", "optimizer: {params: {lr: 6e-4}}\nmin_lr: 1e-5\n")
    base = write(
        tmp_path, "b.yml", "num_layers: 1\nhidden_size: 8\nnum_attention_heads: 1\nseed: 1e3"
    )
    args = NeoXArgs.from_files([path, base])
    assert (args.optimization.lr, args.optimization.min_lr, args.runtime.seed) == (6e-4, 1e-5, 1000)


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"\xff\xfe\x00bad", "UTF-8"),
        (b"- a\n- b\n", "mapping"),
        (b"just text", "mapping"),
        (b"1: 2\n", "text key"),
        (b"a: [", "YAML"),
        (b"a: &x [*x]\n", "aliases"),
        (b"seed: 1\nseed: 2\n", "twice"),
        (b"seed: !!python/object/apply:os.system ['true']\n", "YAML"),
        (b"seed: !!binary aGk=\n", "bytes"),
        (b"deepspeed_extra_args: " + b"[" * 3000 + b"]" * 3000, "nested"),
        (b'wandb_group: "\\ud800"\n', "Unicode"),
        (b"seed: " + b"9" * 6000, "YAML"),
    ],
)
def test_files_that_are_not_configs(tmp_path: Path, content: bytes, fragment: str) -> None:
    path = tmp_path / "odd.yml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=fragment) as caught:
        NeoXArgs.from_files([path])
    assert "odd.yml" in str(caught.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    write(tmp_path, "small.yml", "{}")
    with pytest.raises(ConfigError, match=r"Did you mean .*small\.yml"):
        NeoXArgs.from_files([tmp_path / "smal.yml"])
    with pytest.raises(ConfigError, match="directory"):
        NeoXArgs.from_files([tmp_path])


def test_a_syntax_error_names_the_file_and_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("a: [1\nb: 2")
    with pytest.raises(ConfigError, match=r"a\.yml: not valid YAML: .*line 2, column 2") as raised:
        read_layer(tmp_path / "a.yml")
    assert "unicode string" not in str(raised.value)
