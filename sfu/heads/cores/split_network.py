"""Split a network before its last K components into a trunk (all before them) and a top.

A component lies between two nodes through which everything passes: a linear layer, a convolution, a residual block.
Components are found in the traced graph, so any traceable network will do. A normalisation belongs to the layer before.
"""

from __future__ import annotations

import copy
import itertools
import operator
from typing import NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional

from sfu.errors import ConfigError

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
_RECTIFIERS = (functional.relu, torch.relu)


class SplitNetwork(NamedTuple):
    """A network in two, from images to activations to outputs, and the top's components, the last first."""

    trunk: fx.GraphModule
    top: fx.GraphModule
    components: tuple[str, ...]


def split_network(network: nn.Module, layers: int, negative_slope: float = 0.0) -> SplitNetwork:
    """Split a copy of a classifier before its last K ``layers``; the slope is that of the top's rectifiers.

    Raises:
        ConfigError: The network cannot be traced, has fewer components, or normalises by its own batch.
    """
    network = copy.deepcopy(network).eval().requires_grad_(False)
    _require_eval_parity(network)
    try:
        graph = fx.Tracer().trace(network)
    except Exception as error:  # tracing raises what the network's own code raises
        raise ConfigError(
            f"{type(network).__name__} cannot be traced by torch.fx ({str(error).splitlines()[0][:120]}), so its last "
            "layers cannot be separated. Choose another backbone.name."
        ) from error
    found = _components(network, graph)[::-1]
    if not 1 <= layers <= len(found):
        names = ", ".join(name for name, _ in found)
        raise ConfigError(
            f"head.layers={layers}. {type(network).__name__} has 1 to {len(found)} components, from the end: {names}."
        )
    trunk_graph, top_graph = _cut(graph, found[layers - 1][1])
    top = _graph_module(network, top_graph)
    _rectify(top, negative_slope)
    return SplitNetwork(_graph_module(network, trunk_graph), top, tuple(name for name, _ in found[:layers]))


def _require_eval_parity(network: nn.Module) -> None:
    """Refuse a network in which, in evaluation mode, an example's outputs depend on the others in its batch."""
    for name, module in network.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise ConfigError(
                f"{name} of {type(network).__name__} normalises by its own batch even in evaluation mode "
                "(track_running_stats=False), so an example's outputs depend on others. Choose another backbone.name."
            )


def _components(network: nn.Module, graph: fx.Graph) -> list[tuple[str, fx.Node]]:
    """List the components in the order of the forward pass: the name of each, and the node before it."""
    found: list[tuple[str, fx.Node]] = []
    members: list[fx.Node] = []
    before: fx.Node | None = None
    for node, passes in _bottlenecks(graph):
        members.append(node)
        if not passes:
            continue
        owners = [owner for member in members if (owner := _owner(network, member)) is not None]
        if owners and before is not None:
            levels = zip(*(owner.split(".") for owner in owners), strict=False)
            common = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
            name = ".".join(level[0] for level in common) or owners[0]
            norms = all(isinstance(network.get_submodule(owner), _NORMS) for owner in owners)
            if not (found and (norms or name == found[-1][0])):
                found.append((name, before))
        before, members = node, []
    return found


def _bottlenecks(graph: fx.Graph) -> list[tuple[fx.Node, bool]]:
    """List every node but constants and the output, and whether all later ones depend on earlier ones through it."""
    nodes = [node for node in graph.nodes if node.op not in ("get_attr", "output")]
    place = {node: index for index, node in enumerate(nodes)}
    open_until, listed = -1, []
    for index, node in enumerate(nodes):
        whole = not any(user.target is operator.getitem for user in node.users)
        listed.append((node, whole and open_until <= index))
        last = max((place.get(user, len(nodes)) for user in node.users), default=index)
        open_until = max(open_until, last)
    return listed


def _owner(network: nn.Module, node: fx.Node) -> str | None:
    """Return the module whose parameters a node uses."""
    if node.op == "call_module":
        target = str(node.target)
        return target if any(True for _ in network.get_submodule(target).parameters()) else None
    constants = [used for used in node.all_input_nodes if used.op == "get_attr"]
    return str(constants[0].target).rpartition(".")[0] if constants else None


def _cut(graph: fx.Graph, last: fx.Node) -> tuple[fx.Graph, fx.Graph]:
    """Return the graph up to a node, and that of all later nodes with the constants they use."""
    nodes = list(graph.nodes)
    place = nodes.index(last) + 1
    behind = set(nodes[place:])
    trunk, top = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes[:place]:
        copies[node] = trunk.node_copy(node, copies.__getitem__)
    trunk.output(copies[last])
    copies = {last: top.placeholder("activations")}
    for node in nodes:
        if node in behind or (node.op == "get_attr" and any(user in behind for user in node.users)):
            copies[node] = top.node_copy(node, copies.__getitem__)
    return trunk, top


def _graph_module(network: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    made = fx.GraphModule(network, graph, type(network).__name__)
    made.graph.eliminate_dead_code()
    made.delete_all_unused_submodules()
    made.recompile()
    return made.eval()


def _rectify(top: fx.GraphModule, negative_slope: float) -> None:
    """Let no rectifier work in place, and make all leaky if there is a slope."""
    for name, module in list(top.named_modules()):
        if hasattr(module, "inplace"):
            module.inplace = False
        if negative_slope and isinstance(module, nn.ReLU):
            top.set_submodule(name, nn.LeakyReLU(negative_slope))
    for node in top.graph.nodes:
        if node.op == "call_function" and node.target in _RECTIFIERS:
            node.kwargs = {}
            if negative_slope:
                node.target, node.args = functional.leaky_relu, (node.args[0], negative_slope)
    top.recompile()
