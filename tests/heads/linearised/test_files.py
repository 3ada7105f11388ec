"""Linearised heads on disk, and the cores behind them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sfu.data.examples import find_entries
from sfu.data.images.images import ArrayImages
from sfu.data.settings import BackboneSettings
from sfu.errors import ArtifactError, ConfigError, SolverError
from sfu.heads.cores import pretrain as pretrain_module
from sfu.heads.cores.network import build_network
from sfu.heads.cores.preflight import bytes_per_example, preflight, with_batch_size
from sfu.heads.cores.pretrain import Public, pretrain
from sfu.heads.files import load_head
from sfu.heads.linearised import LinearisedHead
from sfu.heads.settings import LinearisedSettings, PretrainSettings
from sfu.store import Store, cache_dir
from tests.heads.linearised.tiny import CPU, tiny_case

SMALL = BackboneSettings(name="shufflenet_v2_x0_5", weights="none", size=32)


def network(layers: int = 1, **options):
    return build_network(SMALL, LinearisedSettings(layers=layers, **options), 3)


@pytest.fixture(scope="module")
def core():
    drawn = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return network().core(drawn, CPU)


def head_of(core) -> LinearisedHead:
    w = torch.randn(1, core.n_parameters).double()
    return LinearisedHead(w, torch.zeros_like(w), 1e-3, 50, core=core)


def test_a_head_comes_back_with_its_core_which_is_written_once(core, tmp_path):
    head = head_of(core)
    written = head.save(tmp_path / "original")
    assert [path.suffix for path in written] == [".safetensors", ".json", ".safetensors"]
    changed = written[2].stat().st_mtime_ns
    head.save(tmp_path / "retrained")
    assert len(list(tmp_path.glob("core-*.safetensors"))) == 1
    assert written[2].stat().st_mtime_ns == changed
    found = load_head(tmp_path / "original")
    assert torch.equal(found.parameters_CE, head.parameters_CE)
    assert (found.l2, found.n_train, found.loss, found.core.components) == (1e-3, 50, head.loss, ("fc",))
    features = torch.randn(5, head.n_features)
    torch.testing.assert_close(found.logits(features), head.logits(features))
    about = json.loads((tmp_path / "original.json").read_text())
    assert (about["kind"], about["core"]["architecture"], about["core"]["layers"]) == ("linearised", SMALL.name, 1)
    assert "gradient" not in load_file(tmp_path / "original.safetensors")


def test_a_core_of_another_architecture_or_other_weights_is_refused(core, tmp_path):
    written = head_of(core).save(tmp_path / "head")
    weights = load_file(written[2])
    whole = dict(weights)
    name = "fc.weight"
    weights[name] = weights[name] + 1
    save_file(weights, written[2])
    with pytest.raises(ArtifactError, match="does not hold the core that its name says"):
        load_head(tmp_path / "head")
    del whole[name]
    save_file(whole, written[2])
    with pytest.raises(ArtifactError, match=rf"does not fit this architecture: it lacks {name}"):
        load_head(tmp_path / "head")
    written[2].unlink()
    with pytest.raises(ArtifactError, match=r"the core .*missing"):
        load_head(tmp_path / "head")
    other = tiny_case(1).core
    with pytest.raises(ArtifactError, match="other weights, or another architecture"):
        load_head(tmp_path / "head", other)


def test_another_kind_and_a_foreign_architecture_are_refused(core, tmp_path):
    written = head_of(core).save(tmp_path / "head")
    about = json.loads(written[1].read_text())
    about["core"]["architecture"] = "os.system"
    written[1].write_text(json.dumps(about))
    with pytest.raises(ArtifactError, match=r"os\.system is not a classification model of torchvision"):
        load_head(tmp_path / "head")
    written[1].write_text(json.dumps(about | {"kind": "linear"}))
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_head(tmp_path / "head")
    written[1].write_text(json.dumps(about | {"kind": "convex"}))
    with pytest.raises(ArtifactError, match=r"kind=convex is unknown\. Choose one of linear, linearised"):
        load_head(tmp_path / "head")
    written[1].write_text(json.dumps(about | {"schema": 9}))
    with pytest.raises(ArtifactError, match="has schema 9, but this sfu reads schema 1, 2, 3, 4 of linearised heads"):
        load_head(tmp_path / "head")


def test_a_core_of_your_own_is_given_when_loading(tmp_path):
    case = tiny_case(2)
    head = head_of(case.core)
    assert len(head.save(tmp_path / "mine")) == 2
    with pytest.raises(ArtifactError, match=r"a core of your own, which is not saved\. Give it as `core`"):
        load_head(tmp_path / "mine")
    found = load_head(tmp_path / "mine", case.core)
    assert torch.equal(found.parameters_CE, head.parameters_CE)


# --- training a core


def public(count: int = 24) -> Public:
    drawn = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    pixels = torch.randint(0, 80, (count, 32, 32, 3), generator=drawn) + 60 * labels[:, None, None, None]
    images = ArrayImages(pixels.to(torch.uint8).numpy(), "test")
    return Public.of(images, labels, network())


SHORT = PretrainSettings(epochs=2, batch_size=12, lr=0.05)


def test_a_core_is_trained_once_for_every_number_of_layers(monkeypatch):
    made, told = network(), []
    before = made.digest()
    pretrain(made, public(), SHORT, CPU, class_layer_alone=False, say=told.append)
    assert told == ["training the core on 24 public images, 2 epochs"]
    assert made.digest() != before
    again = network(2)
    monkeypatch.setattr(pretrain_module.nn.functional, "cross_entropy", None)
    pretrain(again, public(), SHORT, CPU, class_layer_alone=False)
    assert again.digest() == made.digest()


def test_a_core_whose_training_was_stopped_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    whole = network()
    pretrain(whole, public(), SHORT, CPU, class_layer_alone=False)
    monkeypatch.setenv("SFU_CACHE", str(tmp_path / "other"))

    def stop(done: int, _: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(network(), public(), SHORT, CPU, class_layer_alone=False, progress=stop)
    cached = Store(cache_dir("cores")).entries()
    held, strange = (find_entries(cached, [frozenset([one])]) for one in (public().examples[5], bytes(32)))
    assert len(held.made_of_them) == len(cached) == 2  # the epoch, and the list of images that it names
    assert held.unknown == strange.unknown == strange.made_of_them == []
    resumed, told = network(), []
    pretrain(resumed, public(), SHORT, CPU, class_layer_alone=False, say=told.append)
    assert told == ["training the core on 24 public images, 2 epochs (from epoch 2)"]
    for name, tensor in whole.state().items():
        torch.testing.assert_close(resumed.state()[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["epochs", "shape", "missing", "nan", "momentum"])
def test_a_stopped_training_that_is_malformed_starts_again(monkeypatch, caplog, change):
    def stop(done: int, _: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(network(), public(), SHORT, CPU, class_layer_alone=False, progress=stop)
    store = Store(cache_dir("cores"))
    (entry,) = (entry for entry in store.entries() if (entry.folder / "tensors.safetensors").is_file())
    found, name = store.read_tensors(entry.key), "fc.weight"
    if change == "missing":
        del found[name]
    else:
        name = {"epochs": "epochs", "momentum": "momentum.0"}.get(change, name)
        found[name] = {"epochs": torch.tensor(99), "nan": found[name] * torch.nan}.get(change, torch.zeros(2))
    store.write_tensors(entry.key, found)
    told = []
    pretrain(network(), public(), SHORT, CPU, class_layer_alone=False, say=told.append)
    assert told == ["training the core on 24 public images, 2 epochs"]
    assert "is damaged and will be made again" in caplog.text


def test_the_class_layer_can_be_trained_alone():
    made = network()
    before = {name: tensor.clone() for name, tensor in made.state().items()}
    pretrain(made, public(), SHORT, CPU, class_layer_alone=True)
    changed = {name for name, tensor in made.state().items() if not torch.equal(tensor, before[name])}
    assert changed == {"fc.weight", "fc.bias"}


def test_a_core_that_diverges_says_so():
    wild = dataclasses.replace(SHORT, lr=1e12, epochs=4)
    with pytest.raises(SolverError, match=r"training the core diverged in epoch \d\. Lower head\.pretrain\.lr=1e\+12"):
        pretrain(network(), public(), wild, CPU, class_layer_alone=False)


# --- what it will need


def test_the_preflight_grows_with_the_batch_and_not_with_the_rows():
    core = tiny_case(2).core
    one, other = (preflight(dataclasses.replace(core, batch_size=b), 1000) for b in (10, 20))
    assert other.pass_bytes == 2 * one.pass_bytes
    assert preflight(dataclasses.replace(core, batch_size=10), 4000).pass_bytes == one.pass_bytes
    assert one.vector_bytes == 64 * core.n_parameters
    assert f"{core.n_parameters:,} linearised parameters in batches of 10" in str(one)
    assert bytes_per_example(core) > 8 * core.n_features


def test_a_batch_that_fits_the_device():
    core = tiny_case(2).core
    assert with_batch_size(core, 9).batch_size == 9
    assert with_batch_size(core, "auto").batch_size == 512
    assert with_batch_size(core, "auto", memory=8 * 3 * 7 * bytes_per_example(core)).batch_size == 7


def test_what_does_not_fit_is_refused_before_training():
    with pytest.raises(ConfigError, match=r"Lower head\.batch_size or head\.layers"):
        preflight(tiny_case(2).core, 100, memory=1000)
