"""Names: what can be registered, how, and what is wrong with the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opweave.layers import (
    CustomOp,
    DuplicateLayerError,
    InvalidLayerError,
    LayerNameError,
    PluggableLayer,
    ReplacementError,
    op_registry,
    op_registry_oot,
    replacement,
)

pytestmark = pytest.mark.usefixtures("registries")

KINDS = [CustomOp, PluggableLayer]


class Double(CustomOp):
    def forward_native(self, x: Tensor) -> Tensor:
        return x * 2


class Block(PluggableLayer):
    pass


@pytest.fixture(autouse=True)
def _nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let neither class keep a name that a test gives it."""
    for layer in (Double, Block):
        monkeypatch.setattr(layer, "name", "", raising=False)
        monkeypatch.delattr(layer, "name")


@pytest.mark.parametrize("kind", KINDS)
def test_register(kind: type[Any]) -> None:
    layer = type("Layer", (kind,), {})
    assert kind.register("a_name")(layer) is layer
    assert layer.name == "a_name"
    assert op_registry["a_name"] is layer
    assert kind.op_registry is op_registry  # one table for both
    assert kind.op_registry_oot is op_registry_oot


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_a_name_stands_for_one_layer_of_either_kind(first: type[Any], second: type[Any]) -> None:
    @first.register("taken")
    class First(first):  # type: ignore[misc]
        pass

    class Second(second):  # type: ignore[misc]
        pass

    with pytest.raises(DuplicateLayerError) as caught:
        second.register("taken")(Second)
    for part in ("Duplicate op name: 'taken'", "First", "Second", "register_oot"):
        assert part in str(caught.value)
    assert op_registry["taken"] is First
    assert not hasattr(Second, "name")


@pytest.mark.parametrize("name", ["all", "none", "", "+op", "a,b", "a b", "a-b", 3, None])
def test_names_that_custom_ops_could_not_speak_of(name: Any) -> None:
    with pytest.raises(LayerNameError, match="identifier"):
        CustomOp.register(name)(Double)


@pytest.mark.parametrize("thing", [print, 3, Double(), "Double"])
def test_only_classes(thing: Any) -> None:
    with pytest.raises(TypeError, match="Decorator can only be applied to classes"):
        CustomOp.register("thing")(thing)
    with pytest.raises(TypeError, match="Decorator can only be applied to classes"):
        CustomOp.register_oot(name="thing")(thing)
    assert "thing" not in op_registry | op_registry_oot


@pytest.mark.parametrize("cls", [int, nn.Linear, Block])
def test_only_classes_of_the_kind(cls: Any) -> None:
    with pytest.raises(InvalidLayerError, match=f"{cls.__name__} is not a CustomOp"):
        CustomOp.register("thing")(cls)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replacement_may_be_of_any_kind(kind: Any) -> None:
    class Plain:
        pass

    class Mixer(PluggableLayer):
        pass

    class Linear(nn.Linear):
        pass

    for base in (Plain, Mixer, Linear):
        mine = type(f"My{base.__name__}", (base,), {})
        kind.register_oot(_decorated_op_cls=mine, name=base.__name__)
        assert replacement(base) is mine
    assert type(Mixer()).__name__ == "MyMixer"
    CustomOp.register("double")(Double)
    with pytest.raises(ReplacementError, match="not a subclass"):
        kind.register_oot(Plain, name="double")


def test_any_class_of_the_kind_opens_the_door() -> None:
    @Double.register("own_name")
    class Other(CustomOp):
        pass

    assert op_registry["own_name"] is Other


def test_a_subclass_has_its_parents_name_until_it_has_its_own() -> None:
    CustomOp.register("parent")(Double)

    class Child(Double):
        pass

    assert Child.name == "parent"
    CustomOp.register("child")(Child)
    assert (Child.name, Double.name) == ("child", "parent")


def test_a_nameless_class_works(config: Any) -> None:
    assert not hasattr(Double, "name")
    assert Double.enabled()
    assert torch.equal(Double()(torch.ones(2)), torch.full((2,), 2.0))
    assert config.enabled_custom_ops == {"Double": 1}


def test_forward_native_is_asked_for() -> None:
    @CustomOp.register("empty")
    class Empty(CustomOp):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty has no forward_native.*Define it"):
        Empty()(torch.ones(1))
