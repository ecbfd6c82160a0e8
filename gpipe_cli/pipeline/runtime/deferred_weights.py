"""The backward of a micro-batch in two halves: the gradients of inputs (I), and later those of weights (W).

The previous stage waits only for the gradients of inputs, so a schedule can do W where a stage would be idle. Departs
from the paper, which does not split it; the split comes from zero-bubble pipelines (Qi et al. 2023, arXiv:2401.10241).

Layers need no change. The autograd graph is searched for convolutions and matrix products whose weight nothing else
uses. In I they compute only the gradient of their input; their input and the gradient of their output are kept. From
these W computes the weight gradients, by the calls that autograd would make, and passes them to autograd, which casts
them, calls hooks and adds them to `.grad`: I and W give the same bits as B. All else (batch norm, embeddings, tied or
parametrized weights, compiled layers, users' functions) is computed in I, by autograd as usual.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gpipe_cli.system.accelerator import is_accelerator

Compute: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]

_MIN_BYTES_PER_CALL = 32 << 20  # of gradients in a call of autograd's engine, which no plan counts
_LEAF = "AccumulateGrad"
_TRANSPOSES_AND_CASTS = ("TBackward0", "ToCopyBackward0")  # nodes that may be between a weight and its use
_REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"  # torch refuses this node in a backward with `inputs=`


@dataclass(eq=False, slots=True)
class DeferredWeight:
    """A convolution or matrix product whose weight and bias gradients are still to be computed."""

    edges: Sequence[GradientEdge]  # the edges of the graph that these gradients are fed into
    compute: Compute  # computes these gradients from `input` and `gradient`
    input: torch.Tensor
    gradient: torch.Tensor | None = None  # the output's gradient, once I has computed it

    @property
    def saved(self) -> Sequence[torch.Tensor]:
        return (self.input,) if self.gradient is None else (self.input, self.gradient)


def backward_inputs(
    roots: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor | None],
    on_saved: Callable[[torch.Tensor], None] = lambda gradient: None,
    *,
    tied: Collection[torch.Tensor] = (),
    retain_graph: bool = False,
) -> list[DeferredWeight]:
    """I: `torch.autograd.backward` except for the weights that can wait, returned in the order autograd reaches them.

    `on_saved` is called with the output gradient of each of these convolutions and products as soon as it is kept.
    `tied` are weights that are also used outside the graph of `roots`.
    """
    other_uses = [get_gradient_edge(weight).node for weight in tied]
    deferrable, leaves = _find_deferrable([root.node for root in roots], other_uses)
    if not deferrable:
        torch.autograd.backward(roots, gradients, retain_graph)
        return []
    deferred: list[DeferredWeight] = []

    def save_gradient(weight: DeferredWeight, given: Sequence[torch.Tensor | None]) -> None:
        if given[0] is not None:
            weight.gradient = given[0]
            deferred.append(weight)
            on_saved(given[0])

    hooks = [node.register_prehook(partial(save_gradient, weight)) for node, weight in deferrable.items()]
    # with the deferrable nodes, so that they run even where nothing wants the gradient of their input
    wanted = [GradientEdge(node, 0) for node in (*leaves, *deferrable)]
    torch.autograd.backward(roots, gradients, retain_graph, inputs=wanted)
    for hook in hooks:
        hook.remove()
    return deferred


def backward_weights(deferred: list[DeferredWeight]) -> None:
    """W: compute the gradients of the deferred weights and add them to `.grad`. Empties the list.

    On an accelerator, autograd's engine passes each call to another thread and waits for it, which takes the host as
    long as several launches: one call adds up many gradients. On a CPU a call costs little, and a gradient that is
    added immediately is still in the cache.
    """
    deferred.reverse()
    edges, gradients, size = list[GradientEdge](), list[torch.Tensor](), 0
    while deferred:
        weight = deferred.pop()
        assert weight.gradient is not None
        min_bytes = _MIN_BYTES_PER_CALL if is_accelerator(weight.gradient.device) else 0
        with torch.no_grad():
            computed = weight.compute(weight.input, weight.gradient)
        edges += weight.edges
        gradients += computed
        size += sum(gradient.nbytes for gradient in computed)
        del weight, computed  # frees what it has kept
        if size >= min_bytes or not deferred:
            torch.autograd.backward(edges, gradients)
            edges, gradients, size = [], [], 0


def _find_deferrable(
    roots: Sequence[Node], other_uses: Sequence[Node]
) -> tuple[dict[Node, DeferredWeight], list[Node]]:
    """The nodes whose weights can wait, and all leaves but these weights; leaves `other_uses` also have other uses."""
    uses = dict.fromkeys(roots, 1)
    products, leaves = list[tuple[Node, Any]](), list[Node]()
    to_visit = list(uses)
    while to_visit:
        node = to_visit.pop()
        kind, edges = type(node).__name__, node.next_functions
        if kind == _LEAF:  # only such a node has a variable
            leaves.append(node)
        elif kind in _PRODUCTS:
            products.append((node, edges))
        elif kind == _REENTRANT_CHECKPOINT:
            return {}, []
        for following, _ in edges:
            if following is not None:
                uses_before = uses.get(following, 0)
                uses[following] = uses_before + 1
                if not uses_before:
                    to_visit.append(following)
    for node in other_uses:
        uses[node] = uses.get(node, 0) + 1
    deferrable = dict[Node, DeferredWeight]()
    deferred_leaves = set[Node]()
    for node, edges in products:
        weights = [_weight_behind(edge[0], uses) for edge in edges]
        if (product := _PRODUCTS[type(node).__name__](node, weights)) is not None:
            places, input, compute = product
            deferrable[node] = DeferredWeight([GradientEdge(*edges[place]) for place in places], compute, input)
            deferred_leaves.update(leaf for place in places if (leaf := weights[place]) is not None)
    return deferrable, [leaf for leaf in leaves if leaf not in deferred_leaves]


def _weight_behind(node: Node | None, uses: Mapping[Node, int]) -> Node | None:
    """The leaf that `node` leads to, if it is a parameter's and nothing else uses it."""
    while node is not None and uses[node] == 1:
        kind = type(node).__name__
        if kind == _LEAF:  # only such a node has a variable
            return node if isinstance(node.variable, nn.Parameter) else None  # type: ignore[attr-defined]
        node = node.next_functions[0][0] if kind in _TRANSPOSES_AND_CASTS else None
    return None


_Product: TypeAlias = tuple[Sequence[int], torch.Tensor, Compute]
"""A node's edges that can wait (by index), its input, and the function that computes the gradients of these edges."""


def _convolution(node: Any, weights: Sequence[Node | None]) -> _Product | None:
    """The same kernel computes a convolution's weight and bias gradients, so either both wait or neither does."""
    bias = node.next_functions[2][0] is not None
    if weights[1] is None or (bias and weights[2] is None):
        return None
    weight = node._saved_weight
    # the kernel does not read the weight's values, and keeping it would keep the copy that autocast made
    like = partial(torch.empty_strided, weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
    names = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    settings = [getattr(node, f"_saved_{name}") for name in names]
    places = (1, 2) if bias else (1,)

    def compute(input: torch.Tensor, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        computed = torch.ops.aten.convolution_backward(gradient, input, like(), *settings, (False, True, bias))
        return [computed[place] for place in places]

    return places, node._saved_input.detach(), compute


def _product_and_sum(node: Any, weights: Sequence[Node | None]) -> _Product | None:
    """`addmm`: a bias plus the product of input and weight."""
    if weights[2] is None or node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    shape = None if weights[0] is None else node.next_functions[0][0]._input_metadata[0].shape
    return (2,) if shape is None else (2, 0), node._saved_mat1.detach(), _product_weights(node, shape)


def _product(node: Any, weights: Sequence[Node | None]) -> _Product | None:
    """`mm`: the product of input and weight."""
    if weights[1] is None:
        return None
    return (1,), node._saved_self.detach(), _product_weights(node, None)


def _product_weights(node: Any, bias: Sequence[int] | None) -> Compute:
    """A function for the gradients of weight and bias (`bias` is its shape). It multiplies in the order that torch uses
    for the weight's strides (`mm_mat2_grad` in torch/csrc/autograd/FunctionsManual.cpp)."""
    sizes, strides = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
    transposed = strides[0] == 1 and strides[1] == sizes[0]

    def compute(input: torch.Tensor, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        weight = gradient.t().mm(input.conj()).t() if transposed else input.t().conj().mm(gradient)
        return (weight,) if bias is None else (weight, gradient.sum_to_size(bias))

    return compute


_PRODUCTS: dict[str, Callable[[Any, Sequence[Node | None]], _Product | None]] = {
    "ConvolutionBackward0": _convolution,
    "AddmmBackward0": _product_and_sum,
    "MmBackward0": _product,
}
