"""Convolutions with one output place as a matrix product, without the taps that only meet padding.

A kernel of 3 x 3 on a map of 1 x 1 multiplies eight zeros for one pixel, and libraries compute the gradients of its
weights image by image. As one product, a gradient of the last three components of ResNet-18 at 32 pixels is 1.6 to 3
times as fast on a CPU (256 rows, 1 or 2 threads; ``scripts/bench_kernels.py``). From 2 x 2 places on it gains nothing.
Parameters keep their names and shapes. The weights of taps that only meet padding have a gradient of 0, as in any
convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class SmallMapConv(nn.Module):
    """A :class:`torch.nn.Conv2d` on maps of one size, for which it has a single output place."""

    def __init__(self, convolution: nn.Conv2d, height: int, width: int) -> None:
        """Share the parameters of ``convolution``; its input is ``height`` x ``width``."""
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias
        rows, columns = _live_taps(convolution, height, 0), _live_taps(convolution, width, 1)
        self._taps, self._pixels = (rows[0], columns[0]), (rows[1], columns[1])

    def forward(self, maps: Tensor) -> Tensor:
        """Map ``[B, I, H, W]`` to ``[B, O, 1, 1]``."""
        rows, columns = self._pixels
        pixels = maps[:, :, rows, columns].flatten(1)
        rows, columns = self._taps
        return functional.linear(pixels, self.weight[:, :, rows, columns].flatten(1), self.bias)[:, :, None, None]


def _live_taps(convolution: nn.Conv2d, size: int, axis: int) -> tuple[slice, slice]:
    """Return, along one axis, the taps that meet pixels and the pixels they meet at the one output place."""
    gap, padding = convolution.dilation[axis], convolution.padding[axis]
    assert isinstance(padding, int)
    first = -(-padding // gap)  # tap t meets pixel t * gap - padding
    last = min(convolution.kernel_size[axis] - 1, (size - 1 + padding) // gap)
    return slice(first, last + 1), slice(first * gap - padding, last * gap - padding + 1, gap)


def use_small_maps(top: nn.Module, example: Tensor) -> None:
    """Replace, in place, the convolutions that have one output place for images like ``example``."""
    sizes: dict[nn.Module, torch.Size] = {}

    def note(module: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        if made.shape[2:].numel() == 1:
            sizes[module] = given[0].shape[2:]

    convolutions = {name: module for name, module in top.named_modules() if _replaceable(module)}
    handles = [module.register_forward_hook(note) for module in convolutions.values()]
    with torch.no_grad():
        top(example)
    for handle in handles:
        handle.remove()
    for name, module in convolutions.items():
        if module in sizes:
            assert isinstance(module, nn.Conv2d)
            top.set_submodule(name, SmallMapConv(module, *sizes[module]))


def _replaceable(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d) or module.groups != 1 or isinstance(module.padding, str):
        return False
    return module.padding_mode == "zeros"
