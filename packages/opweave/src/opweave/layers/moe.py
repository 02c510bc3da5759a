"""Mixture of experts: routing, experts, and their placement on ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opweave.ir import ops
from opweave.ir.ops.fused_experts import Routed, expert_activation, route
from opweave.layers import linear_methods, registry
from opweave.layers.custom_op import CustomOp
from opweave.layers.moe_routing import ExpertPlacement, GroupedTopk, Router, RoutingFunction
from opweave.layers.parallel import current_tensor_parallel, fill

# Loads the weights of one expert or of all experts, whole or sharded.


SHARDS = {"w13": ("w1", "w3", "w13"), "w2": ("w2",)}


def load_expert(
    expert: Tensor,
    loaded: Tensor,
    shard_id: str,
    placement: ExpertPlacement,
    *,
    gated: bool,
    interleaved: bool,
) -> None:
    """Fill the parameter of one expert, or the part *shard_id* of it.

    Args:
        expert: this rank's ``(rows, hidden)``, ``(hidden, intermediate)``, or bias.
        loaded: the tensor of a checkpoint: for all ranks, or this rank's shard.
        shard_id: ``"w1"``: gate, or the only projection; ``"w3"``: up; ``"w13"``: both; ``"w2"``:
            down.
        placement: the placement of this rank.
        gated: whether there is a gate.
        interleaved: the rows of gate and up alternate, in *expert* and in a *loaded* ``"w13"``.

    Raises:
        WeightLoadError: the shape of *loaded* does not fit.
        LayerArgumentError: ``"w3"`` without a gate.
    """
    if shard_id == "w3" and not gated:
        raise registry.LayerArgumentError(
            "shard_id='w3', but these experts have no gate: 'w1' is all there is."
        )
    parts: list[tuple[Tensor, Tensor]] = [(expert, loaded)]
    dim: int | None = 0
    if shard_id == "w2":
        dim = 1 if expert.ndim == 2 else None
    elif gated and shard_id != "w13":
        second = int(shard_id == "w3")
        parts = [(expert[second::2] if interleaved else expert.chunk(2)[second], loaded)]
    elif gated and not interleaved:
        parts = list(zip(expert.chunk(2), loaded.chunk(2), strict=True))
    label, advice = f"{shard_id} of an expert", "Weights (in, out) need is_transposed=True."
    for target, source in parts:
        fill(target, source, label, dim, placement.tp_rank, placement.tp_size, advice)


# The strategy of a :class:`FusedMoE`: weight format and computation.


@dataclass(frozen=True)
class ExpertShapes:
    """The sizes of one rank's weights.

    Attributes:
        num_experts: number of experts of this rank.
        rows: the rows of ``w13`` per expert: gate and up together, if there is a gate.
        intermediate_size: this rank's part of the intermediate dimension.
        hidden_size: size of a token's hidden state.
        has_bias: whether both products have a bias.
        dtype, device: dtype and device of the parameters.
    """

    num_experts: int
    rows: int
    intermediate_size: int
    hidden_size: int
    has_bias: bool
    dtype: torch.dtype
    device: torch.device | str | None


class FusedMoEMethod(CustomOp):
    """Base class of the strategies.

    Call it as ``method(layer, x, topk_weights, topk_ids)``; ``apply`` is that of ``nn.Module``. It
    returns this rank's part of the weighted sum, ``(T, hidden)``, for *x* ``(T, hidden)``,
    *topk_weights* ``(T, K)``, float32, and *topk_ids* ``(T, K)``, int32, the experts' ids on all
    ranks. Several layers may share a method, because it does not store anything about a layer.
    """

    @property
    def method_name(self) -> str:
        """The name of the method in reports."""
        return type(self).__name__

    @property
    def quant_config(self) -> object | None:
        """The quantization of the weights, or None."""
        return None

    def create_weights(self, layer: FusedMoE, shapes: ExpertShapes) -> None:
        """Register the uninitialized parameters on *layer*."""
        raise NotImplementedError(f"{self.method_name} creates no weights.")

    def process_weights_after_loading(self, layer: FusedMoE) -> None:
        """Convert the loaded weights to the format of the computation. A no-op by default."""

    def apply_monolithic(self, layer: FusedMoE, x: Tensor, router_logits: Tensor) -> Tensor:
        """Route the tokens and apply the experts, for kernels that do both; two calls by default.

        Args:
            layer: the layer with the weights and the router.
            x: ``(T, hidden)``.
            router_logits: ``(T, E)``.
        """
        output: Tensor = self(layer, x, *layer.select_experts(x, router_logits))
        return output


class FusedMoEQuantConfig(Protocol):
    """Chooses the method of a layer."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the method for the layer called *prefix*; None: not quantized."""


# Experts with weights in the dtype of the activations.


@CustomOp.register("unquantized_fused_moe")
class UnquantizedFusedMoEMethod(FusedMoEMethod):
    """``ir.ops.fused_experts`` with the layer's weights.

    ``forward_native`` calls the op too: its native implementation computes every expert for every
    token, which defines the result but is too slow to run a model.
    """

    def create_weights(self, layer: FusedMoE, shapes: ExpertShapes) -> None:
        """Create ``w13_weight``, ``w2_weight`` and the biases, as in ``fused_experts``."""
        count, size, hidden = shapes.num_experts, shapes.intermediate_size, shapes.hidden_size
        parameter_shapes = {
            "w13_weight": (count, shapes.rows, hidden),
            "w2_weight": (count, hidden, size),
            "w13_bias": (count, shapes.rows) if shapes.has_bias else None,
            "w2_bias": (count, hidden) if shapes.has_bias else None,
        }
        for name, shape in parameter_shapes.items():
            parameter = None
            if shape is not None:
                empty = torch.empty(shape, dtype=shapes.dtype, device=shapes.device)
                parameter = nn.Parameter(empty, requires_grad=False)
            layer.register_parameter(name, parameter)

    def forward_native(
        self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """Return this rank's part of the weighted sum; see :class:`FusedMoEMethod`."""
        on_input = layer.apply_router_weight_on_input
        return _fused_experts(layer, x, topk_weights, topk_ids, layer.expert_map, on_input)


def _fused_experts(
    layer: FusedMoE,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    expert_map: Tensor | None = None,
    on_input: bool = False,
) -> Tensor:
    """Call ``ir.ops.fused_experts`` with the weights of *layer*."""
    output: Tensor = ops.fused_experts(
        x,
        layer.w13_weight,
        layer.w2_weight,
        weights,
        ids,
        layer.activation,
        expert_map,
        layer.w13_bias,
        layer.added_w2_bias,
        on_input,
        **layer.activation_options,
    )
    return output


# A mixture of experts as a layer: routing, experts, shared experts, the sum over ranks.


ParameterMapping = tuple[str, str, int, str]


@registry.PluggableLayer.register("fused_moe")
class FusedMoE(registry.PluggableLayer):
    """Top-k mixture of experts: routes each token and sums the experts' outputs.

    Routing is an op of :mod:`opweave.ir.ops.moe_routing`. The layer's method computes the experts
    with ``ir.ops.fused_experts``. The layer is sharded over the current tensor-parallel group: each
    expert over all ranks, or, with *ep_size*, over the ranks of one of *ep_size* subgroups, each
    with its own experts.

    Args:
        num_experts: number of experts on all ranks.
        top_k: number of experts per token.
        hidden_size: size of a token's hidden state.
        intermediate_size: size between an expert's two products, on all ranks.
        params_dtype: dtype of the weights; by default torch's default dtype.
        reduce_results: sum the results over the ranks; False: the caller does so with
            :meth:`all_reduce`.
        renormalize: divide a token's weights by their sum.
        use_grouped_topk: choose groups of experts first; needs *num_expert_group* and *topk_group*.
        quant_config: chooses the method, see :class:`FusedMoEQuantConfig`; None: unquantized.
        ep_size: number of expert-parallel groups of ranks, each with its own experts.
        prefix: the layer's name in the model, for *quant_config*.
        custom_routing_function: ``f(hidden_states, logits, top_k, renormalize)`` returns the
            weights and the experts.
        scoring_func: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.
        routed_scaling_factor: final factor of the routing weights.
        e_score_correction_bias: ``(num_experts,)``, added to the scores for the choice of experts,
            but not to the weights. A parameter of the model; the layer does not register it.
        apply_router_weight_on_input: multiply the token instead of the result by the weight; for
            ``top_k == 1``.
        activation: the activation of ``ir.ops.fused_experts``; *alpha*, *beta* and *limit* are its
            constants.
        has_bias: both products have a bias.
        expert_placement_strategy: the assignment of experts to subgroups: ``"linear"`` or
            ``"round_robin"``.
        shared_experts: a module that is called with the tokens, and whose result is added. With
            several ranks, it must return its rank's partial sum (``reduce_results=False``).
        device: device of the weights; by default torch's default device.

    Raises:
        ShardingError: the experts cannot be divided equally among the ranks.
        LayerArgumentError: an option is unknown, or requires another one.
    """

    w13_weight: nn.Parameter
    w2_weight: nn.Parameter
    w13_bias: nn.Parameter | None
    w2_bias: nn.Parameter | None
    expert_map: Tensor | None

    def __init__(
        self, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int,
        params_dtype: torch.dtype | None = None, reduce_results: bool = True,
        renormalize: bool = True, use_grouped_topk: bool = False,
        num_expert_group: int | None = None, topk_group: int | None = None,
        quant_config: FusedMoEQuantConfig | None = None, ep_size: int = 1, prefix: str = "",
        custom_routing_function: RoutingFunction | None = None, scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0, e_score_correction_bias: Tensor | None = None,
        apply_router_weight_on_input: bool = False, activation: str = "silu",
        has_bias: bool = False, *, alpha: float | None = None, beta: float | None = None,
        limit: float | None = None, expert_placement_strategy: str = "linear",
        shared_experts: nn.Module | None = None, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.parallel = current_tensor_parallel()
        self.placement = ExpertPlacement.of(
            num_experts, self.parallel, ep_size, expert_placement_strategy
        )
        self.num_experts, self.top_k = num_experts, top_k
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.reduce_results, self.prefix = reduce_results, prefix
        self.apply_router_weight_on_input = apply_router_weight_on_input
        if apply_router_weight_on_input and top_k != 1:
            raise registry.LayerArgumentError(
                f"apply_router_weight_on_input is for top_k=1; this layer has top_k={top_k}."
            )
        self.activation = activation
        # Constants of the activation; None: the activation's default.
        self.activation_options = {"alpha": alpha, "beta": beta, "limit": limit}
        self.grouped_topk = None
        if use_grouped_topk:
            if num_expert_group is None or topk_group is None:
                raise registry.LayerArgumentError(
                    "use_grouped_topk needs num_expert_group and topk_group; found "
                    f"num_expert_group={num_expert_group}, topk_group={topk_group}."
                )
            groups, scaling = (num_expert_group, topk_group), routed_scaling_factor
            self.grouped_topk = GroupedTopk(top_k, renormalize, *groups, scoring_func, scaling)
        self.router = Router(
            top_k,
            renormalize,
            scoring_func,
            routed_scaling_factor,
            e_score_correction_bias,
            self.grouped_topk,
            custom_routing_function,
        )
        self.shared_experts = shared_experts
        expert_map = self.placement.expert_map(device)
        self.register_buffer("expert_map", expert_map, persistent=False)
        self._expert_shapes = self._shapes(has_bias, params_dtype, device)
        self.quant_method = _method(self, quant_config)
        if quant_config is None and linear_methods.weights_are_deferred():
            self._create_weights(replace(self._expert_shapes, device="meta"))
        else:
            self._create_weights(self._expert_shapes)

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """Return ``(T, hidden_size)`` in the dtype of *hidden_states*.

        Args:
            hidden_states: ``(T, hidden_size)``, the dtype of the weights.
            router_logits: ``(T, num_experts)``.

        Raises:
            LayerArgumentError: the logits have another shape.
        """
        logits_shape = (*hidden_states.shape[:-1], self.num_experts)
        if tuple(router_logits.shape) != logits_shape:
            raise registry.LayerArgumentError(
                f"fused_moe {self.prefix!r}: router_logits must have shape {logits_shape}, one for "
                f"each token and expert; found {tuple(router_logits.shape)}."
            )
        routed = self.quant_method.apply_monolithic(self, hidden_states, router_logits)
        return self._finished(hidden_states, routed)

    def set_quant_method(self, method: FusedMoEMethod) -> None:
        """Keep the weights as *method* does; they are uninitialized afterwards."""
        for name, _ in list(self.named_parameters(recurse=False)):
            del self._parameters[name]
        self.quant_method = method
        self._create_weights(self._expert_shapes)

    def _create_weights(self, shapes: ExpertShapes) -> None:
        self.quant_method.create_weights(self, shapes)
        for parameter in self.parameters(recurse=False):
            parameter.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def select_experts(self, hidden_states: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights ``(T, top_k)``, float32, and experts ``(T, top_k)``, int32."""
        return self.router(hidden_states, router_logits)

    def all_reduce(self, output: Tensor) -> Tensor:
        """Sum a result over the ranks."""
        return self.parallel.all_reduce(output) if self.parallel.size > 1 else output

    @property
    def added_w2_bias(self) -> Tensor | None:
        """``w2_bias`` on the first rank of each expert's shards, which adds it, else None."""
        return self.w2_bias if self.placement.tp_rank == 0 else None

    @torch.no_grad()
    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: Tensor,
        shard_id: str,
        expert_id: int | None = None,
        is_transposed: bool = False,
    ) -> bool:
        """Fill a parameter of this layer from a checkpoint. Each parameter has this loader.

        Args:
            param: ``w13_weight``, ``w2_weight`` or one of their biases.
            loaded_weight: ``(out, in)`` for one expert, ``(experts, out, in)`` for all; a bias
                without the last dimension. The tensor for all ranks, or this rank's shard.
            shard_id: ``"w1"``: the gate; ``"w3"``: the up projection; ``"w13"``: both, concatenated
                (interleaved for ``"swigluoai"``); ``"w2"``: the down projection.
            expert_id: the id of the expert on all ranks; None: *loaded_weight* has all experts.
            is_transposed: weights are ``(in, out)``.

        Returns:
            Whether the weight belongs to this rank: False for an expert of another rank.

        Raises:
            WeightLoadError: the shape does not fit.
            LayerArgumentError: the parameter, the shard or the expert does not belong to this
                layer.
        """
        target = self._target(param, shard_id)
        dims = param.ndim - (expert_id is not None)
        if loaded_weight.ndim != dims:
            whose = "all experts" if expert_id is None else "one expert"
            raise registry.WeightLoadError(
                f"{target} of {whose} must have {dims} dimensions; found shape "
                f"{tuple(loaded_weight.shape)}. Pass expert_id if, and only if, the tensor is that "
                "of a single expert."
            )
        loaded = loaded_weight.mT if is_transposed and "weight" in target else loaded_weight
        local = self.placement.local_experts
        if expert_id is None:
            if loaded.shape[0] not in (self.num_experts, len(local)):
                raise registry.WeightLoadError(
                    f"{target} has {loaded.shape[0]} experts in the checkpoint; the layer has "
                    f"{self.num_experts}, of which {len(local)} on this rank."
                )
            whole = loaded.shape[0] == self.num_experts
            sources = {e: loaded[e if whole else place] for place, e in enumerate(local)}
        elif 0 <= expert_id < self.num_experts:
            sources = {expert_id: loaded} if expert_id in local else {}
        else:
            raise registry.LayerArgumentError(
                f"expert_id={expert_id}, but there are {self.num_experts} experts."
            )
        for expert, source in sources.items():
            load_expert(
                param[local.index(expert)],
                source,
                shard_id,
                self.placement,
                gated=expert_activation(self.activation).gated,
                interleaved=self.activation == "swigluoai",
            )
        return bool(sources)

    @staticmethod
    def make_expert_params_mapping(
        ckpt_gate_proj_name: str, ckpt_down_proj_name: str, ckpt_up_proj_name: str, num_experts: int
    ) -> list[ParameterMapping]:
        """Return ``(parameter, part of a checkpoint's name, expert, shard)`` for every expert.

        To get the name of the parameter, replace the second by the first in the name of a
        checkpoint's tensor. Pass the others to its weight loader.
        """
        names = (
            ("w1", ckpt_gate_proj_name),
            ("w2", ckpt_down_proj_name),
            ("w3", ckpt_up_proj_name),
        )
        return [
            ("experts.w2_" if shard == "w2" else "experts.w13_", f"experts.{e}.{name}.", e, shard)
            for e in range(num_experts)
            for shard, name in names
        ]

    def extra_repr(self) -> str:
        here = len(self.placement.local_experts)
        return (
            f"{self.num_experts} experts, {here} of them here, top {self.top_k}, "
            f"{self.hidden_size} x {self.intermediate_size}, {self.activation}"
        )

    def _finished(self, hidden_states: Tensor, routed: Tensor) -> Tensor:
        if self.shared_experts is not None:
            routed = routed + self.shared_experts(hidden_states)
        return self.all_reduce(routed) if self.reduce_results else routed

    def _shapes(
        self, has_bias: bool, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> ExpertShapes:
        size, ranks = self.intermediate_size, self.placement.tp_size
        if size % ranks:
            raise registry.ShardingError(
                f"intermediate_size={size} cannot be divided over the {ranks} ranks that share an "
                "expert; use a number of ranks that divides it, or a larger ep_size."
            )
        size //= ranks
        return ExpertShapes(
            num_experts=len(self.placement.local_experts),
            rows=2 * size if expert_activation(self.activation).gated else size,
            intermediate_size=size,
            hidden_size=self.hidden_size,
            has_bias=has_bias,
            dtype=dtype or torch.get_default_dtype(),
            device=device,
        )

    def _target(self, param: nn.Parameter, shard_id: str) -> str:
        """Return the name of *param*, which must contain the shard *shard_id*."""
        for name, parameter in self.named_parameters(recurse=False):
            if parameter is not param:
                continue
            shards = SHARDS.get(name.partition("_")[0], ())
            if shard_id not in shards:
                raise registry.LayerArgumentError(
                    f"shard_id={shard_id!r} of {name} is not one of {', '.join(shards)}."
                )
            return name
        raise registry.LayerArgumentError(
            f"a parameter of shape {tuple(param.shape)} is not a parameter of this layer: "
            f"{', '.join(dict(self.named_parameters(recurse=False)))}."
        )


def _method(layer: FusedMoE, quant_config: FusedMoEQuantConfig | None) -> FusedMoEMethod:
    chosen = quant_config.get_quant_method(layer, layer.prefix) if quant_config else None
    if chosen is None:
        return UnquantizedFusedMoEMethod()
    if not isinstance(chosen, FusedMoEMethod):
        raise registry.LayerArgumentError(
            f"{type(quant_config).__name__}.get_quant_method returned {chosen!r} for FusedMoE "
            f"{layer.prefix!r}; it must be a FusedMoEMethod, or None for weights as they are."
        )
    return chosen


# The computation of experts in three replaceable steps: prepare, experts, finalize.


class PrepareAndFinalize(Protocol):
    """Sends tokens to the ranks of their experts, and returns the results."""

    def prepare(self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Routed:
        """Quantize and send the tokens; find the experts' places in the weights."""

    def finalize(self, outputs: Tensor, routed: Routed) -> Tensor:
        """Sum the weighted results ``(T, K, hidden)``, and send them back: ``(T, hidden)``."""


class Experts(Protocol):
    """Computes the experts."""

    def apply(self, layer: FusedMoE, routed: Routed) -> Tensor:
        """Return each expert's result for each of its tokens: ``(T, K, hidden)``."""


class LocalPrepareAndFinalize:
    """Keeps tokens on their rank."""

    def prepare(self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Routed:
        on_input = layer.apply_router_weight_on_input
        count = len(layer.placement.local_experts)
        return route(x, topk_weights, topk_ids, count, layer.expert_map, on_input)

    def finalize(self, outputs: Tensor, routed: Routed) -> Tensor:
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if routed.weights is not None:
            wide = wide * routed.weights.to(wide.dtype)[..., None]
        wide = torch.where(routed.valid[..., None], wide, 0.0)
        total: Tensor = ops.moe_sum(wide)
        return total.to(outputs.dtype)


class OpExperts:
    """Computes every pair of token and expert with ``ir.ops.fused_experts``."""

    def apply(self, layer: FusedMoE, routed: Routed) -> Tensor:
        shape = routed.experts.shape
        ids = torch.where(routed.valid, routed.experts, -1).reshape(-1, 1)
        ones = torch.ones_like(ids, dtype=torch.float32)
        outputs = _fused_experts(layer, routed.x.repeat_interleave(shape[1], dim=0), ones, ids)
        return torch.unflatten(outputs, 0, tuple(shape))


class ModularKernel:
    """A kernel in three steps: prepare, experts, finalize.

    Args:
        prepare_finalize: the first and last step; by default, tokens stay on their rank.
        experts: the middle step; by default ``ir.ops.fused_experts``.
    """

    def __init__(
        self, prepare_finalize: PrepareAndFinalize | None = None, experts: Experts | None = None
    ) -> None:
        self.prepare_finalize = prepare_finalize or LocalPrepareAndFinalize()
        self.experts = experts or OpExperts()

    def __call__(
        self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        routed = self.prepare_finalize.prepare(layer, x, topk_weights, topk_ids)
        return self.prepare_finalize.finalize(self.experts.apply(layer, routed), routed)


@CustomOp.register("modular_fused_moe")
class FusedMoEModularMethod(FusedMoEMethod):
    """Applies a :class:`ModularKernel` to the weights of another method.

    Args:
        old_quant_method: the method that created the weights and describes their quantization.
        fused_experts: the kernel; it returns the result of ``ir.ops.fused_experts``.
    """

    def __init__(self, old_quant_method: FusedMoEMethod, fused_experts: ModularKernel) -> None:
        super().__init__()
        self.old_quant_method, self.fused_experts = old_quant_method, fused_experts

    @classmethod
    def make(cls, layer: FusedMoE, kernel: ModularKernel | None = None) -> FusedMoEModularMethod:
        """Return a method to assign to *layer* in place of its current one."""
        return cls(layer.quant_method, kernel or ModularKernel())

    @property
    def method_name(self) -> str:
        return self.old_quant_method.method_name

    @property
    def quant_config(self) -> object | None:
        return self.old_quant_method.quant_config

    def create_weights(self, layer: FusedMoE, shapes: ExpertShapes) -> None:
        """Not supported: the other method creates the weights.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "FusedMoEModularMethod computes with weights that another method has created. Build "
            "the layer with that method, then assign FusedMoEModularMethod.make(layer)."
        )

    def process_weights_after_loading(self, layer: FusedMoE) -> None:
        self.old_quant_method.process_weights_after_loading(layer)

    def forward_native(
        self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """Return this rank's part of the weighted sum; see :class:`FusedMoEMethod`."""
        return self.fused_experts(layer, x, topk_weights, topk_ids)


# Experts with quantized weights, as a checkpoint has them.


def experts_format(method: linear_methods.LinearMethod | None) -> str | None:
    """Return the format of a linear method for ``fused_experts_quant``; None: unsupported.

    Reordered inputs, and static or bounded scales of activations, are not supported.
    """
    if isinstance(method, linear_methods.GroupedInt4Method):
        return None if method.is_ordered else "w4a16"
    if isinstance(method, linear_methods.Weight8Method):
        return "w8a16"
    if isinstance(method, linear_methods.BlockMethod):
        return method.format
    if not isinstance(method, linear_methods.W8A8Method):
        return None
    if method.activations.is_static or method.activations.upper_bound is not None:
        return None
    return "w8a8_ue8m0" if method.activations.use_ue8m0 else "w8a8"


@CustomOp.register("quantized_fused_moe")
class QuantizedFusedMoEMethod(FusedMoEMethod):
    """``ir.ops.fused_experts_quant`` with the layer's weights.

    Parameters: those of the linear methods, with a first dimension of experts, called
    ``w13_weight``, ``w13_scale``, ``w2_weight`` and so on.

    Args:
        w13: the linear method of the gate and up projections.
        w2: the linear method of the down projections.
    """

    def __init__(self, w13: linear_methods.LinearMethod, w2: linear_methods.LinearMethod) -> None:
        super().__init__()
        self.w13, self.w2 = w13, w2
        self.formats = experts_format(w13), experts_format(w2)

    def create_weights(self, layer: FusedMoE, shapes: ExpertShapes) -> None:
        """Create the parameters of all experts of this rank.

        Raises:
            ShardingError: a rank's shard of an expert does not consist of whole groups or blocks.
        """
        hidden, size, whole = shapes.hidden_size, shapes.intermediate_size, layer.intermediate_size
        halves = [size] * (shapes.rows // size)
        self._register(layer, "w13", self.w13, shapes, (hidden, hidden), halves)
        self._register(layer, "w2", self.w2, shapes, (size, whole), [hidden])
        for name in ("w13_bias", "w2_bias"):
            layer.register_parameter(name, None)

    def _register(
        self,
        layer: FusedMoE,
        name: str,
        method: linear_methods.LinearMethod,
        shapes: ExpertShapes,
        inputs: tuple[int, int],
        outputs: list[int],
    ) -> None:
        """Register the parameters of all experts, each of which *method* describes.

        Args:
            inputs: the input features of this rank, and of all ranks together.
            outputs: the output features of this rank.
        """
        one: Any = nn.Module()
        one.prefix = layer.prefix
        with torch.device("meta"):
            local_inputs, all_inputs = inputs
            method.create_weights(
                one, local_inputs, outputs, all_inputs, sum(outputs), shapes.dtype
            )
        for leaf, parameter in one.named_parameters():
            size = (shapes.num_experts, *parameter.shape)
            empty = torch.empty(size, dtype=parameter.dtype, device=shapes.device)
            layer.register_parameter(f"{name}_{leaf}", nn.Parameter(empty, requires_grad=False))

    def forward_native(
        self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """Return this rank's part of the weighted sum; see :class:`FusedMoEMethod`."""
        weights = [
            getattr(layer, f"{name}_{leaf}", None)
            for name in ("w13", "w2")
            for leaf in ("weight", "scale", "offset")
        ]
        output: Tensor = ops.fused_experts_quant(
            x,
            *weights,
            topk_weights,
            topk_ids,
            *self.formats,
            layer.activation,
            layer.expert_map,
            layer.apply_router_weight_on_input,
            **layer.activation_options,
        )
        return output


# Replaces the experts of a transformers model, which has already routed the tokens.


@registry.PluggableLayer.register("transformers_fused_moe")
class TransformersFusedMoE(FusedMoE):
    """:class:`FusedMoE` with the interface of transformers' ``*Experts``, for routed tokens.

    The routing options have no effect.
    """

    def forward(  # type: ignore[override]  # the arguments that transformers gives its own
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, **kwargs: Any
    ) -> Tensor:
        """Return ``(T, hidden_size)`` in the dtype of *hidden_states*.

        Args:
            hidden_states: ``(T, hidden_size)``, the dtype of the weights.
            topk_ids: ``(T, K)``, integer: the experts' ids on all ranks.
            topk_weights: ``(T, K)``, any floating dtype.
            kwargs: other arguments from transformers, which are ignored.
        """
        ids, weights = topk_ids.to(torch.int32), topk_weights.to(torch.float32)
        routed = self.quant_method(self, hidden_states, weights, ids)
        return self._finished(hidden_states, routed)
