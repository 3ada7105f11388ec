"""A small residual network in float64, its tangent, and everything about it by dense p x p algebra."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from sfu.heads.base import Head
from sfu.heads.cores.core import Core
from sfu.heads.cores.split_network import split_network
from sfu.heads.settings import LinearisedSettings
from sfu.heads.train import train_head
from sfu.losses.base import Loss, make_loss
from sfu.request import ForgetRequest

CPU = torch.device("cpu")
N, C, SIDE, FORGET = 60, 3, 4, 24


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.conv2(self.relu(self.bn1(self.conv1(x)))) + x)


class Tiny(nn.Module):
    def __init__(self, channels: int = 2, classes: int = C) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.layer = nn.Sequential(Block(channels), Block(channels))
        self.pool = nn.AvgPool2d(2)
        self.fc = nn.Linear(channels * (SIDE // 2) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.layer(self.norm(self.stem(x)))), 1))


def tiny_network() -> Tiny:
    torch.manual_seed(3)
    network = Tiny().double()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return network.eval()


@dataclass
class Case:
    """A trained head and the same by dense algebra: J is ``[N, C, p]``."""

    core: Core
    features: Tensor
    labels: Tensor
    jacobian: Tensor
    fixed: Tensor
    loss: Loss
    l2: float
    forget: Tensor
    keep: Tensor

    def train(self, index: Tensor | None = None, **changes: object) -> Head:
        rows = slice(None) if index is None else index
        config = replace(LinearisedSettings(l2=self.l2, tolerance=1e-11, max_iterations=3000), **changes)
        return train_head(
            self.features[rows], self.labels[rows], C, config, self.loss, seed=0, device=CPU, dtype=torch.float64,
            core=self.core,
        )  # fmt: skip

    def hessian(self, index: Tensor) -> Tensor:
        J = self.jacobian[index].flatten(0, 1)
        return J.T @ J / len(index) + self.l2 * torch.eye(J.shape[1]).double()

    def gradient(self, index: Tensor, w: Tensor) -> Tensor:
        J = self.jacobian[index]
        slope = (
            self.fixed[index] + J @ w.reshape(-1) - self.loss.target_scale * torch.eye(C).double()[self.labels[index]]
        )
        return torch.einsum("nc,ncp->p", slope, J) / len(index) + self.l2 * w.reshape(-1)

    def optimum(self, index: Tensor) -> Tensor:
        zero = torch.zeros(self.core.n_parameters).double()
        return -torch.linalg.solve(self.hessian(index), self.gradient(index, zero))

    def request(self, head: Head | None = None) -> ForgetRequest:
        return ForgetRequest(head or self.train(), self.features[self.forget], self.labels[self.forget])


def tiny_case(layers: int = 2, l2: float = 1e-2, batch_size: int = 40, scale: float = 5.0, slope: float = 0.0) -> Case:
    network = tiny_network()
    split = split_network(network, layers, slope)
    drawn = torch.Generator().manual_seed(1)
    labels = torch.arange(N) % C
    images = torch.randn(N, 1, SIDE, SIDE, generator=drawn).double() + 0.5 * labels[:, None, None, None]
    activations = split.trunk(images)
    core = Core.of(split.top, activations[:4], batch_size=batch_size, components=split.components).to(CPU)
    parameters = {name: tensor.detach() for name, tensor in split.top.named_parameters()}
    found = jacrev(lambda p: functional_call(split.top, p, (activations,)))(parameters)
    jacobian = torch.cat([found[name].flatten(2) for name in parameters], 2)
    order = torch.randperm(N, generator=drawn)
    with torch.no_grad():
        fixed = split.top(activations)
    return Case(
        core, activations.flatten(1), labels, jacobian, fixed, make_loss("quadratic", target_scale=scale), l2,
        order[:FORGET], order[FORGET:],
    )  # fmt: skip
