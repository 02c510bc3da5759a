"""Loads a checkpoint's tensors into a model, strictly.

Every parameter is filled, and every tensor is used. The layers' weight loaders keep a rank's shard
of each tensor.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from opweave.layers.moe import FusedMoE
from opweave_engine.models.config import ModelConfig, WeightsError

# The name of a merged module -> the names that checkpoints give its parts -> what its loader calls
# them, such as {"gate_up_proj": {"gate_proj": 0, "up_proj": 1}}.
Merged = Mapping[str, Mapping[str, object]]
_STANDARD_DEVIATION = 0.02  # of random weights
_MAX_NAMES = 10  # names of each kind in an error
_MAX_NAME = 100  # characters of such a name


class WeightTarget(NamedTuple):
    """Destination of a checkpoint tensor: a parameter, and further arguments of its loader."""

    parameter: nn.Parameter
    shard: tuple[object, ...] = ()

    def fill(self, tensor: Tensor) -> None:
        """Load *tensor*, with the layer's loader or as a whole.

        Raises:
            ValueError: the tensor has the wrong shape, is not floating point, or has a one-byte
                dtype for a wider parameter: its scale would be ignored.
        """
        if tensor.is_complex() or tensor.dtype == torch.bool:
            raise ValueError(f"it has dtype {tensor.dtype}; weights are real numbers")
        narrow = tensor.dtype.itemsize == 1 < self.parameter.dtype.itemsize
        is_packed = tensor.dtype == self.parameter.dtype
        if not is_packed and (narrow or not tensor.is_floating_point()):
            raise ValueError(
                f"it has dtype {tensor.dtype}; quantized checkpoints are not supported"
            )
        loader = getattr(self.parameter, "weight_loader", None)
        if loader is not None:
            loader(self.parameter, tensor, *self.shard)
        elif tensor.shape == self.parameter.shape:
            self.parameter.data.copy_(tensor)
        else:
            raise ValueError(f"it is {tuple(tensor.shape)}, not {tuple(self.parameter.shape)}")


class FusedWeightTarget(NamedTuple):
    """Destination of a fused checkpoint tensor, with the names of the tensors that it replaces."""

    place: WeightTarget
    replaced: frozenset[str]


class CheckpointModel(nn.Module):
    """A model made of layers, with weights from Hugging Face checkpoints.

    Attributes:
        config_class: reads the configuration, for models whose first argument it is.
        merged: its merged modules.
        experts: the names of an expert's linear layers in checkpoints: gate, down, up.
        dense: the last part of the names of linear layers whose weight the model reads itself, so
            that it cannot be quantized.
        dtype: dtype of weights and activations.
    """

    config_class: ClassVar[type[ModelConfig]]
    merged: ClassVar[Merged] = {}
    dense: ClassVar[frozenset[str]] = frozenset()
    experts: ClassVar[tuple[str, str, str]] = ("gate_proj", "down_proj", "up_proj")
    dtype: torch.dtype

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        """Build the model for a parsed ``config.json``, without loading weights.

        Raises:
            ModelError: the configuration is invalid or not supported.
        """
        build: Callable[..., Self] = cls
        return build(cls.config_class.from_hf(config), dtype=dtype)

    def own_name(self, name: str) -> str:
        """Return this model's name of a module or tensor that a checkpoint calls *name*."""
        return name

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter with *tensors*, named as in checkpoints.

        Raises:
            WeightsError: tensors are missing, unexpected or do not fit; the message lists them.
        """
        fill(self.places(), tensors, self.fused_places())

    def fill_randomly(self, seed: int = 0) -> None:
        """Fill every parameter with normal random numbers, with a standard deviation of 0.02.

        They depend only on *seed* and the parameter's name, so replicated parameters are equal on
        all ranks.
        """
        for name, parameter in self.named_parameters():
            generator = torch.Generator(parameter.device)
            generator.manual_seed(seed + zlib.crc32(name.encode()))
            parameter.data.normal_(0.0, _STANDARD_DEVIATION, generator=generator)

    def places(self) -> dict[str, WeightTarget]:
        """Return the target of each checkpoint tensor, by name."""
        layers = {n: m for n, m in self.named_modules() if isinstance(m, FusedMoE)}
        places = {}
        for name, parameter in self.named_parameters():
            module, _, leaf = name.rpartition(".")
            parent, dot, last = module.rpartition(".")
            if module in layers:
                continue
            if last in self.merged.get(parent.rpartition(".")[2], {}):
                # The merged layer keeps the weights of this part in a child module.
                parent, dot, _ = parent.rpartition(".")
            for part, *shard in self.merged.get(last, {}).items() or [(last,)]:
                places[f"{parent}{dot}{part}.{leaf}"] = WeightTarget(parameter, tuple(shard))
        for name, layer in layers.items():
            places |= _expert_places(name, layer, self.experts)
        return places

    def fused_places(self) -> dict[str, FusedWeightTarget]:
        """Return the targets of tensors with all experts of a layer, by name."""
        places = {}
        gate, down, up = self.experts
        for name, layer in self.named_modules():
            if isinstance(layer, FusedMoE):
                for leaf, parts, place in (
                    ("gate_up_proj", (gate, up), WeightTarget(layer.w13_weight, ("w13",))),
                    ("down_proj", (down,), WeightTarget(layer.w2_weight, ("w2",))),
                ):
                    replaced = (
                        f"{name}.{expert}.{part}.weight"
                        for expert in range(layer.num_experts)
                        for part in parts
                    )
                    places[f"{name}.{leaf}"] = FusedWeightTarget(place, frozenset(replaced))
        return places


def _expert_places(
    name: str, layer: FusedMoE, parts: tuple[str, str, str]
) -> dict[str, WeightTarget]:
    """Return the targets of each expert's tensors; quantized experts have scales, too."""
    places = {}
    shards = {"w13": {"w1": parts[0], "w3": parts[2]}, "w2": {"w2": parts[1]}}
    for parameter_name, parameter in layer.named_parameters(recurse=False):
        projection, _, leaf = parameter_name.partition("_")
        for shard, part in shards[projection].items() if leaf != "bias" else ():
            for expert in range(layer.num_experts):
                places[f"{name}.{expert}.{part}.{leaf}"] = WeightTarget(parameter, (shard, expert))
    return places


def fill(
    where: Mapping[str, WeightTarget],
    tensors: Iterable[tuple[str, Tensor]],
    fused: Mapping[str, FusedWeightTarget] = MappingProxyType({}),
) -> None:
    """Load each of *tensors*, by name, into its target.

    Args:
        where: the targets, which must all be filled.
        tensors: the tensors of a checkpoint.
        fused: targets that replace several of *where*.

    Raises:
        WeightsError: tensors are missing, given twice, unexpected or do not fit; the message lists
            them.
    """
    missing, twice, unexpected, unfit = set(where), [], [], []
    for name, tensor in tensors:
        if name in fused:
            place, filled = fused[name]
        elif name in where:
            place, filled = where[name], frozenset([name])
        else:
            unexpected.append(shown_name(name))
            continue
        if not filled <= missing:
            twice.append(name)
        missing -= filled
        try:
            place.fill(tensor)
        except ValueError as error:  # loaders raise it for a wrong shape
            unfit.append(f"{name}: {str(error).removesuffix('.')}")
    check_fit(
        {
            "missing": sorted(missing),
            "given twice": twice,
            "unexpected": unexpected,
            "do not fit": unfit,
        }
    )


def check_fit(problems: Mapping[str, Sequence[str]]) -> None:
    """Raise WeightsError if there are *problems*: the names of tensors, by the problem."""
    lines = [f"{len(names)} {kind}: {_some(names)}" for kind, names in problems.items() if names]
    if lines:
        raise WeightsError(f"The checkpoint's tensors do not fit the model. {'; '.join(lines)}.")


def _some(names: Sequence[str]) -> str:
    hidden = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {hidden} more" if hidden > 0 else "")


def shown_names(names: Sequence[str]) -> str:
    """Return the first of *names* for an error, and the number of the others."""
    return _some([shown_name(name) for name in names])


def shown_name(name: str) -> str:
    """Return *name* from a file as a single printable line for errors."""
    text = name if name.isprintable() else repr(name)
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}…"
