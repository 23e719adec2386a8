"""Engines as operators of torch's: its rules, and one node of a graph for tensors on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.engines import attention, operators, triton_attention, triton_runtime
from megatron.engines.call import OPERANDS
from tests.engines.test_call import EVERY_TERM, Draw


def operator(name: str) -> Any:
    return getattr(torch.ops.kerple, f"{name}_{operators._VERSION}").default


def test_operators_keep_torchs_rules() -> None:
    """Schemas, fake tensors (shapes and strides) and autograd, by torch's own checker."""
    x = Draw(heads=4, tables="bias+weight", terms=EVERY_TERM, q_len=40, k_len=50).arguments
    x["seed"] = torch.tensor(3)
    assert set(OPERANDS) <= set(x)
    tensors = [x.get(name) for name in OPERANDS]
    torch.library.opcheck(operator("tiled_attention"), (*tensors, 33, 0.25, 0.1, True))


def on_a_gpu() -> dict[str, Tensor]:
    """Tensors that say they are on a GPU. A CPU build of torch gives them no autograd."""
    q = torch.empty(2, 4, 70, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.empty(2, 2, 90, 64, device="cuda", dtype=torch.bfloat16)
    return {"q": q, "k": k, "v": k.clone(), "bias": torch.empty(4, 97, device="cuda")}


@pytest.mark.skipif(triton_runtime.unavailable() is not None, reason="Triton is not installed")
def test_the_triton_engine_is_one_node_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "_unsuitable_device", lambda _: None)
    monkeypatch.setattr(triton_attention.triton_runtime, "interpreted", lambda: False)
    torch._dynamo.reset()
    nodes: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    attend = torch.compile(partial(attention, engine="triton"), fullgraph=True, backend=note)
    with FakeTensorMode():
        tensors = on_a_gpu()
        out = attend(**tensors)
        assert out.is_cuda and out.shape == tensors["q"].shape and out.dtype == torch.bfloat16
    assert [node for node in nodes if "getitem" not in node] == [
        f"kerple.triton_attention_{operators._VERSION}.default"
    ]


def test_its_gradients_are_one_operator_with_their_shapes_on_the_gpu() -> None:
    with FakeTensorMode():
        tensors = on_a_gpu()
        operands = [tensors.get(name) for name in OPERANDS]
        settings = (None, 0.125, 0.0, True)
        out, lse = operator("triton_attention")(*operands, *settings)
        assert out.transpose(1, 2).is_contiguous() and lse.shape == (8, 128)
        needed = [x is not None for x in operands]
        backward = operator("triton_attention_backward")
        grads = backward(out, lse, torch.empty_like(out), needed, *operands, *settings)
        for x, grad in zip(operands, grads, strict=True):
            assert grad.is_cuda and grad.shape == (torch.Size([0]) if x is None else x.shape)
            assert x is None or grad.dtype == x.dtype
