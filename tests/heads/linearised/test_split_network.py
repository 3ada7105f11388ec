from __future__ import annotations

import pytest
import torch
from torch import nn

from sfu.errors import ConfigError
from sfu.heads.cores.core import Core
from sfu.heads.cores.small_maps import SmallMapConv, use_small_maps
from sfu.heads.cores.split_network import split_network
from tests.heads.linearised.tiny import SIDE, Tiny, tiny_network

NAMES = ["fc", "layer.1", "layer.0", "stem"]


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_trunk_and_top_are_the_network_and_components_count_from_the_end(layers):
    network, images = tiny_network(), torch.randn(5, 1, SIDE, SIDE).double()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    split = split_network(network, layers)
    assert list(split.components) == NAMES[:layers]
    torch.testing.assert_close(split.top(split.trunk(images)), network(images), rtol=0, atol=0)
    assert {**split.trunk.state_dict(), **split.top.state_dict()}.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_components_of_models_of_torchvision():
    from torchvision import models

    with torch.device("meta"):
        found = {
            name: split_network(models.get_model(name, weights=None), 3).components
            for name in ("resnet18", "vgg11_bn", "vit_b_16", "densenet121")
        }
    assert found == {
        "resnet18": ("fc", "layer4.1", "layer4.0"),
        "vgg11_bn": ("classifier.6", "classifier.3", "classifier.0"),
        "vit_b_16": ("heads.head", "encoder.layers.encoder_layer_11", "encoder.layers.encoder_layer_10"),
        "densenet121": ("classifier", "features.denseblock4", "features.transition3.conv"),
    }


@pytest.mark.parametrize("layers", [0, -1, 5])
def test_too_many_layers_or_none_are_refused_with_the_names_of_those_there_are(layers):
    with pytest.raises(
        ConfigError, match=rf"head\.layers={layers}\. Tiny has 1 to 4 components, from the end: fc, layer\.1, layer"
    ):
        split_network(tiny_network(), layers)


def test_a_network_that_normalises_by_its_batch_is_refused():
    network = tiny_network()
    network.layer[1].bn1 = nn.BatchNorm2d(2, track_running_stats=False).double()
    with pytest.raises(ConfigError, match=r"layer\.1\.bn1 of Tiny normalises by its own batch even in evaluation"):
        split_network(network, 2)


def test_a_top_whose_rows_depend_on_each_other_is_refused():
    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    with pytest.raises(ConfigError, match="depend on the others in its batch"):
        Core.of(Centred(3, 2), torch.randn(4, 3))


def test_a_network_that_cannot_be_traced_is_refused():
    class Branching(Tiny):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    with pytest.raises(ConfigError, match=r"Branching cannot be traced by torch\.fx"):
        split_network(Branching(), 1)


def test_leaky_rectifiers_are_those_of_the_top_alone():
    network, images = tiny_network(), torch.randn(5, 1, SIDE, SIDE).double()
    plain, leaky = split_network(network, 2), split_network(network, 2, negative_slope=0.2)
    assert not any(isinstance(module, nn.LeakyReLU) for module in leaky.trunk.modules())
    activations = leaky.trunk(images)
    assert torch.equal(activations, plain.trunk(images))
    assert not torch.equal(leaky.top(activations), plain.top(activations))
    for block in network.layer[1:]:
        block.relu = nn.LeakyReLU(0.2)
    torch.testing.assert_close(
        leaky.top(activations), network.fc(network.pool(network.layer[1](activations)).flatten(1))
    )


@pytest.mark.parametrize(
    ("height", "width", "kernel", "options"),
    [
        (1, 1, 3, {"padding": 1}),
        (2, 1, 3, {"padding": 1, "stride": 2}),
        (2, 2, 3, {"padding": 1, "stride": 2}),
        (3, 3, 3, {"padding": 1, "stride": 3}),
        (1, 1, 3, {"padding": 2, "dilation": 2}),
        (3, 4, 3, {"padding": 2, "dilation": 2, "stride": 5}),
        (2, 1, (2, 1), {"padding": 0}),
        (1, 1, 1, {}),
    ],
)
def test_convolutions_of_one_output_place_are_the_same_function(height, width, kernel, options):
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, kernel, **options).double()
    quick = SmallMapConv(plain, height, width)
    maps = torch.randn(6, 3, height, width).double().requires_grad_()
    found, wanted = quick(maps), plain(maps)
    assert wanted.shape[2:] == (1, 1)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), [maps, plain.weight, plain.bias]),
        torch.autograd.grad((wanted * weights).sum(), [maps, plain.weight, plain.bias]), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, other)


def test_small_maps_are_used_where_they_fit_and_names_stay():
    network = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 4, 2, stride=2))
    images, names = torch.randn(3, 2, 4, 4), list(network.state_dict())
    wanted = network(images)
    use_small_maps(network, images)
    assert [type(module) for module in network] == [nn.Conv2d, nn.Conv2d, SmallMapConv]
    assert list(network.state_dict()) == names
    torch.testing.assert_close(network(images), wanted)
