"""Names: what can be registered, how, and what is wrong with the rest."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opweave.config import CompilationConfig, compilation_config
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


# Layers of another package in the place of ours.


class Scale(CustomOp):
    name = "scale"

    def __init__(self, by: float = 2.0, **options: Any) -> None:
        super().__init__(**options)
        self.by = by

    @classmethod
    def describe(cls) -> str:
        return cls.__name__

    def forward_native(self, x: Tensor) -> Tensor:
        return x * self.by


class MyScale(Scale):
    def __init__(self, by: float = 2.0, **options: Any) -> None:
        super().__init__(by, **options)
        self.mine = True

    def forward_oot(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward_oot(x)
        return result + 1


class Gate(PluggableLayer):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))


class MyGate(Gate):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.mine = True


FORMS: dict[str, Callable[[Any], Any]] = {
    "bare": Scale.register_oot,
    "called": Scale.register_oot(),
    "class name, by position": CustomOp.register_oot("Scale"),
    "class name": CustomOp.register_oot(name="Scale"),
    "registered name, by position": CustomOp.register_oot("scale"),
    "all at once": lambda cls: CustomOp.register_oot(_decorated_op_cls=cls, name="Scale"),
    "all at once, registered name": lambda cls: CustomOp.register_oot(cls, "scale"),
    "on another class, by name": MyScale.register_oot(name="Scale"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_register_a_replacement(form: str) -> None:
    CustomOp.register("scale")(Scale)
    assert FORMS[form](MyScale) is MyScale
    assert list(op_registry_oot.values()) == [MyScale]
    built = Scale(3.0)
    assert type(built) is MyScale
    assert (built.by, built.mine) == (3.0, True)
    assert replacement(Scale).describe() == "MyScale"


def test_a_pluggable_layer_is_replaced_as_well() -> None:
    @Gate.register_oot
    class DummyGate(MyGate):
        pass

    gate = Gate(4)
    assert type(gate).__name__ == "DummyGate"
    assert gate.mine
    assert gate.weight.shape == (4,)


def test_exactly_the_class_is_replaced() -> None:
    class Sub(Scale):
        pass

    Scale.register_oot(MyScale)
    assert type(Sub()) is Sub
    assert type(MyScale()) is MyScale
    CustomOp.register("scale")(Scale)
    op_registry_oot["scale"] = op_registry_oot.pop("Scale")
    assert type(Scale()) is MyScale
    assert type(Sub()) is Sub  # it inherits the name, but is not what was registered


def test_a_replacement_may_have_the_same_class_name() -> None:
    original = Scale

    def other_module() -> type[Scale]:
        class Scale(original):  # type: ignore[misc, valid-type]
            pass

        return Scale

    ours = original.register_oot(other_module())
    assert type(original()) is ours
    assert type(ours()) is ours


def test_custom_ops_speaks_of_the_replacement_by_the_same_name() -> None:
    CustomOp.register("scale")(Scale)
    CustomOp.register_oot("Scale")(MyScale)
    assert MyScale.name == Scale.name == "scale"
    with compilation_config(CompilationConfig(custom_ops="-scale")) as config:
        assert not Scale.enabled()
        assert not MyScale.enabled()
        Scale()
    assert config.disabled_custom_ops == {"scale": 1}


@pytest.mark.parametrize("platform", ["dummy"], indirect=True)
def test_forward_oot_can_fall_back(platform: str) -> None:
    Scale.register_oot(MyScale)
    assert torch.equal(Scale(3.0)(torch.ones(2)), torch.full((2,), 4.0))


def test_one_replacement_only() -> None:
    class Other(Scale):
        pass

    Scale.register_oot(MyScale)
    with pytest.raises(DuplicateLayerError, match=r"MyScale replaces 'Scale'.*Other cannot"):
        Scale.register_oot(Other)
    CustomOp.register("scale")(Scale)
    CustomOp.register_oot("scale")(Other)
    with pytest.raises(DuplicateLayerError, match="two replacements"):
        Scale()


def test_twice_the_same_is_said_to_be_that() -> None:
    Scale.register_oot(MyScale)
    with pytest.raises(DuplicateLayerError, match="The same is registered twice"):
        Scale.register_oot(MyScale)


def test_another_class_of_that_name_is_not_replaced() -> None:
    CustomOp.register("scale")(Scale)
    Scale.register_oot(MyScale)
    other = type("Scale", (CustomOp,), {"forward_native": lambda self, x: x})
    assert type(other()) is other
    assert type(Scale()) is MyScale


def test_a_replacement_derives_from_what_it_replaces() -> None:
    class Stranger(CustomOp):
        pass

    with pytest.raises(ReplacementError, match=r"Stranger cannot replace .*Scale.*not a subclass"):
        Scale.register_oot(Stranger)
    CustomOp.register("scale")(Scale)
    for key in ("scale", "Scale"):
        with pytest.raises(ReplacementError, match=r"Derive it from [\w.]*\.Scale,"):
            CustomOp.register_oot(key)(Stranger)
    assert op_registry_oot == {}
    CustomOp.register_oot("Late")(Stranger)  # registered before what it is to replace

    class Late(CustomOp):
        pass

    with pytest.raises(ReplacementError, match=r"Stranger cannot replace .*Late"):
        Late()


@pytest.mark.parametrize("kind", [CustomOp, PluggableLayer])
def test_it_is_said_what_is_replaced(kind: Any) -> None:
    with pytest.raises(ReplacementError, match=r"does not say what .* @RMSNorm.register_oot"):
        kind.register_oot(MyScale if kind is CustomOp else MyGate)
    with pytest.raises(ReplacementError, match="does not say what"):
        kind.register_oot()
    with pytest.raises(LayerNameError, match="'a b'"):
        kind.register_oot("a b")(MyScale)


def test_what_was_built_before_stays_what_it_is() -> None:
    early = Scale(5.0)
    Scale.register_oot(MyScale)
    for copied in (copy.deepcopy(early), copy.copy(early), pickle.loads(pickle.dumps(early))):
        assert type(copied) is Scale
        assert torch.equal(copied(torch.ones(1)), torch.full((1,), 5.0))
