"""The optimizers by name, Lion, classes of the user's own, and what each of them keeps."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.backends.optimizers import LINEAR, Lion, build_optimizer, measured_state_bytes
from megatron.errors import ConfigError
from megatron.model.sizes import ModelSizes, optimizer_bytes
from megatron.mpu.parallel_layers import declare
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.deepspeed_config import OPTIMIZERS, OptimizerBlock
from megatron.training.optimizer import parameter_groups
from tests.training.cases import ON_TWO, layout, run_cases, tiny_config, write_data
from tests.training.runs import finish, losses, run, run_config, start_run

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
DECAY = 0.1
# DeepSpeed compiles its own at first use, which takes minutes.
BUILT = [pytest.param(name, marks=pytest.mark.slow) for name in ("fused_adam", "cpu_adam")]
OWN = "tests.backends.own_optimizer:SlowMomentum"


def named_parameters(seed: int = 0) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (7, 5), "bias": (7,), "r1": (4,), "2.attention.qk_layernorm.weight": (2, 3)}
    found = {k: nn.Parameter(torch.randn(s, generator=generator)) for k, s in shapes.items()}
    declare(found["2.attention.qk_layernorm.weight"], decay=False)
    return list(found.items())


def take_steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["adam", "adamw", "cpu_torch_adam", *BUILT])
def test_every_adam_takes_the_steps_of_adamw(kind: str) -> None:
    ours, theirs = named_parameters(), named_parameters()
    mine = [parameter for _, parameter in ours]
    plain = [parameter for _, parameter in theirs]
    take_steps(build_optimizer(kind, parameter_groups(ours, DECAY), SETTINGS), mine)
    reference = [
        {"params": plain[:1], "weight_decay": DECAY},
        {"params": plain[1:], "weight_decay": 0.0},
    ]
    take_steps(torch.optim.AdamW(reference, **SETTINGS, foreach=False), plain)
    for own, expected in zip(mine, plain, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def test_lion_takes_the_steps_of_its_paper() -> None:
    ours, theirs = named_parameters(), named_parameters()
    take_steps(Lion([p for _, p in ours], lr=0.01, weight_decay=DECAY), [p for _, p in ours])
    generator = torch.Generator().manual_seed(1)
    values = [p.detach().clone().double() for _, p in theirs]
    momenta = [torch.zeros_like(value) for value in values]
    for _ in range(6):
        for value, momentum in zip(values, momenta, strict=True):
            gradient = torch.randn(value.shape, generator=generator).double()
            update = torch.sign(0.9 * momentum + 0.1 * gradient)
            value -= 0.01 * (update + DECAY * value)
            momentum.copy_(0.99 * momentum + 0.01 * gradient)
    for (_, own), expected in zip(ours, values, strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-6)


def test_muon_takes_torchs_steps_and_keeps_its_state_over_a_reload() -> None:
    """Muon's of the matrix of a linear layer, AdamW's of all others."""
    ours, theirs = named_parameters(), named_parameters()
    for found in (ours, theirs):
        declare(found[0][1], split=0)
    mine, plain = ([p for _, p in found] for found in (ours, theirs))
    groups = parameter_groups(ours, DECAY, linear_apart=True)
    assert [(group["name"], len(group["params"])) for group in groups] == [
        (LINEAR, 1),
        ("plain", 3),
    ]
    optimizer = build_optimizer("muon", groups, {**SETTINGS, "momentum": 0.9})
    take_steps(optimizer, mine)
    again = build_optimizer("muon", groups, {**SETTINGS, "momentum": 0.9})
    again.load_state_dict(optimizer.state_dict())
    for group in again.param_groups:
        group["lr"] = 0.02  # as the scheduler sets it
    take_steps(again, mine)
    muon = torch.optim.Muon(
        plain[:1], lr=0.01, weight_decay=DECAY, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(plain[1:], **SETTINGS, weight_decay=0.0)
    for rate in (0.01, 0.02):
        generator = torch.Generator().manual_seed(1)
        muon.param_groups[0]["lr"] = adam.param_groups[0]["lr"] = rate
        for _ in range(6):
            for parameter in plain:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            muon.step()
            adam.step()
    for own, expected in zip(mine, plain, strict=True):
        torch.testing.assert_close(own, expected)


def test_muons_one_state_of_a_matrix_is_counted() -> None:
    def needed(kind: str) -> int:
        block = {"type": kind, "params": {"lr": 0.1}}
        args = NeoXArgs.from_dict(tiny_config("data", optimizer=block))
        return ModelSizes(args).memory(1).optimizer

    hidden, layers = 32, 2
    assert needed("Adam") - needed("Muon") == 4 * 12 * hidden**2 * layers


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (layout(zero=1), "zero_optimization.stage 1"),
        (layout(mp=2), "model_parallel_size = 2"),
        ({"precision": "bf16"}, "precision bf16, which takes ZeRO 1"),
    ],
)
def test_what_muon_does_not_combine_with_is_named(settings: dict[str, Any], named: str) -> None:
    block = {"type": "Muon", "params": {"lr": 0.1}}
    with pytest.raises(ConfigError, match=f"optimizer.type = muon with {named}"):
        NeoXArgs.from_dict(tiny_config("data", optimizer=block, **settings))


def test_8bit_adam_without_its_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="needs the package bitsandbytes"):
        build_optimizer("adam8bit", [{"params": [nn.Parameter(torch.ones(2))]}], SETTINGS)
    lion = tiny_config("data", use_bnb_optimizer=True, optimizer={"type": "Lion", "params": {}})
    with pytest.raises(ConfigError, match="only Adam has 8-bit states"):
        NeoXArgs.from_dict(lion)
    adam = NeoXArgs.from_dict({**lion, "optimizer": {"type": "Adam", "params": {}}})
    count = ModelSizes(adam.replace(use_bnb_optimizer=False)).memory(1).optimizer // 8
    assert ModelSizes(adam).memory(1).optimizer == 2 * count


def test_8bit_adam_gets_adams_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(Adam8bit=lambda groups, **options: (groups, options))
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(optim=package))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", package)
    assert build_optimizer("adam8bit", [], SETTINGS) == ([], SETTINGS)  # type: ignore[comparison-overlap]


def test_8bit_adam_of_the_package_steps_as_adam() -> None:
    """Its states are bytes; on a CPU too. Skipped where bitsandbytes is not installed."""
    pytest.importorskip("bitsandbytes", reason="not installed: bitsandbytes")
    torch.manual_seed(0)
    start = torch.randn(64, 128)
    ours, exact = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = build_optimizer("adam8bit", [{"params": [ours], "weight_decay": DECAY}], SETTINGS)
    adam = torch.optim.AdamW([exact], **SETTINGS, weight_decay=DECAY)
    for _ in range(5):
        ours.grad = torch.randn_like(start)
        exact.grad = ours.grad.clone()
        optimizer.step()
        adam.step()
    kinds = {value.dtype for value in optimizer.state[ours].values() if torch.is_tensor(value)}
    assert torch.uint8 in kinds
    moved, expected = ours.detach() - start, exact.detach() - start
    assert float((moved - expected).norm() / expected.norm()) < 0.05


def test_deepspeeds_adam_without_a_compiler_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.ops import adam

    def no_compiler(self: object, *args: object, **options: object) -> None:
        raise RuntimeError("c++: command not found")

    monkeypatch.setattr(adam.DeepSpeedCPUAdam, "__init__", no_compiler)
    with pytest.raises(ConfigError, match=r"cpu_adam.*c\+\+: command not found.*type: Adam"):
        build_optimizer("cpu_adam", parameter_groups(named_parameters(), 0.0), SETTINGS)


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS.keys() - {"fused_adam", "cpu_adam"}))
def test_the_listed_states_are_what_the_optimizer_keeps(kind: str) -> None:
    for given in ({"momentum": 0.9} if kind == "sgd" else {}, {}):
        block = OptimizerBlock.model_validate({"type": kind, "params": given})
        params = block.params.model_dump(exclude_none=True)
        parameter = nn.Parameter(torch.ones(3, 2))
        parameter.grad = torch.ones(3, 2)
        optimizer = build_optimizer(kind, [{"params": [parameter]}], params)
        optimizer.step()
        state = optimizer.state[parameter]
        kept = [key for key, v in state.items() if v is not None and key != "step"]
        assert sorted(kept) == sorted(block.states or ())
        measured = measured_state_bytes(partial(build_optimizer, kind, params=params))
        assert measured == optimizer_bytes(block) == 4 * len(kept)


def test_a_class_gets_what_it_takes_and_its_states_are_counted() -> None:
    import tests.backends.own_optimizer  # noqa: F401 - the user has imported it

    def config(**params: Any) -> NeoXArgs:
        block = {"type": OWN, "params": {"lr": 0.1, **params}}
        return NeoXArgs.from_dict(tiny_config("data", optimizer=block))

    args = config(pull=0.25)
    assert args.to_dict()["optimizer"] == {"type": OWN, "params": {"lr": 0.1, "pull": 0.25}}
    assert NeoXArgs.from_dict(args.to_dict()) == args
    adam = NeoXArgs.from_dict(tiny_config("data", optimizer={"type": "Adam", "params": {}}))
    # Two states of four bytes, as Adam; a third one is counted too.
    assert ModelSizes(args).memory(1).optimizer == ModelSizes(adam).memory(1).optimizer
    third = ModelSizes(config(third=True)).memory(1).optimizer
    assert third == ModelSizes(args).memory(1).optimizer * 3 // 2
    with pytest.raises(ConfigError, match=r"optimizer.params.speed: .*SlowMomentum.*lr, pull"):
        ModelSizes(config(speed=1.0)).memory(1)


def test_a_class_that_a_file_of_a_run_names_is_not_imported(tmp_path: Path) -> None:
    """The rule of pos_emb: allowed_code."""
    folder = tmp_path / "global_step3"
    folder.mkdir()
    name = "stranger_module:Evil"
    (folder / "model.yml").write_text(f'"optimizer": {{"type": "{name}"}}\n"num_layers": 2\n')
    with pytest.raises(ConfigError, match=r"names a class to import.*--allow-kernel stranger"):
        NeoXArgs.from_files([folder / "model.yml"])


# Trained, saved, resumed and resharded: Lion, and a class of the user's own.

KINDS = {
    "lion": {"type": "Lion", "params": {"lr": 0.003}},
    "own": {"type": OWN, "params": {"lr": 0.05, "pull": 0.2}},
}
LAYOUTS = {
    "dp2_zero1": ON_TWO["dp2_zero1"],
    "dp2_zero3": ON_TWO["dp2_zero3"],
    "mp2": ON_TWO["mp2"],
    "pp2": ON_TWO["pp2"],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("optimizers")
    data = write_data(directory)
    cases: dict[int, dict[str, Any]] = {1: {}, 2: {}, 3: {}}
    for kind, block in KINDS.items():
        for name, how in {"one": layout(), **LAYOUTS}.items():
            config = tiny_config(data, optimizer=block, **how)
            part = cases[1 if name == "one" else 2]
            part[f"{kind}-{name}"] = {"config": config, "steps": 4}
        saved, whole = str(directory / f"{kind}-saved"), str(directory / f"{kind}-whole")
        first = tiny_config(data, optimizer=block, **LAYOUTS["dp2_zero1"])
        case = {"config": first, "steps": 2, "save": saved, "export": whole}
        cases[2][f"{kind}-first"] = case
        cases[2][f"{kind}-second"] = {"config": first, "steps": 2, "resume": saved}
        for name in ("mp2", "dp2_zero3"):
            moved = tiny_config(data, optimizer=block, **LAYOUTS[name])
            cases[2][f"{kind}-to-{name}"] = {"config": moved, "steps": 2, "resume": whole}
        alone = tiny_config(data, optimizer=block, training_backend="torch")
        cases[3][f"{kind}-to-torch"] = {"config": alone, "steps": 2, "resume": whole}
    found = run_cases(cases[2], directory, 2) | run_cases(cases[1], directory, 1)
    return found | run_cases(cases[3], directory / "torch", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_takes_the_same_steps(results: dict[str, Any], kind: str) -> None:
    alone = results[f"{kind}-one"]["losses"]
    assert alone[-1] < alone[0]
    for name in LAYOUTS:
        assert results[f"{kind}-{name}"]["losses"] == pytest.approx(alone, rel=1e-4), name


@pytest.mark.parametrize("kind", KINDS)
def test_its_states_are_resumed_and_resharded(results: dict[str, Any], kind: str) -> None:
    whole = results[f"{kind}-dp2_zero1"]
    second = results[f"{kind}-second"]
    assert second["losses"] == whole["losses"][2:]
    assert second["fingerprints"] == whole["fingerprints"]
    for name in ("mp2", "dp2_zero3", "torch"):
        moved = results[f"{kind}-to-{name}"]["losses"]
        assert moved == pytest.approx(whole["losses"][2:], rel=1e-4), name


def test_another_optimizers_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    data, save = write_data(tmp_path), tmp_path / "run"
    config = run_config(data, save, train_iters=2, training_backend="torch")
    run(config, tmp_path)
    other = {**config, "train_iters": 4, "optimizer": KINDS["lion"]}
    other["allow_changed"] = ["optimizer"]
    codes, outputs = finish(start_run(other, tmp_path))
    assert codes == [2] and "another optimizer: adam, where optimizer.type is lion" in outputs[0]
    run({**other, "no_load_optim": True}, tmp_path)
    assert sorted(losses(save)) == [1, 2, 3, 4]
