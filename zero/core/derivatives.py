"""What autograd is asked for: the gradients of a loss, or a derivative that a script computes.

`torch.autograd.grad(out, x)` and `out.backward(inputs=[x])` run the same hooks as
`loss.backward()`, but give the model's parameters no gradient, so there is nothing to reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch._C._functorch import TransformType, get_interpreter_stack, peek_interpreter_stack
from torch.autograd.graph import Node, get_gradient_edge


def asks_for_other_gradients(params: Iterable[torch.Tensor]) -> bool:
    """Whether the backward that calls this from a hook gives no gradient to any of `params`,
    because its caller has named other tensors.

    A backward of a loss that does not depend on `params` is not one of these, because other ranks,
    whose loss does depend on them, rely on this one."""
    is_reached = torch._C._will_engine_execute_node
    try:
        return not (
            any(is_reached(_accumulator(param)) for param in params if param.requires_grad)
            or all(map(is_reached, _leaves(torch._C._current_autograd_node())))
        )
    except RuntimeError:
        # torch does not answer for a leaf whose gradient `torch.autograd.grad` returns.
        return True


def in_gradient_transform() -> bool:
    """Whether this call is inside of a transform of torch.func other than vmap, such as grad."""
    return peek_interpreter_stack() is not None and any(
        transform.key() != TransformType.Vmap for transform in get_interpreter_stack() or ()
    )


def _accumulator(param: torch.Tensor) -> Node:
    """The node that adds to `param.grad`."""
    # Nothing reads the values, and this is not part of what torch.func differentiates.
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableFuncTorch():
        return get_gradient_edge(param).node


def _leaves(root: Node) -> Iterator[Node]:
    """The nodes under `root` that add to the gradients of leaves."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
