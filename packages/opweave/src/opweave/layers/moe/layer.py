"""A mixture of experts as a layer: routing, experts, shared experts, the sum over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor, nn

from opweave.ir.ops.expert_activation import expert_activation
from opweave.layers.errors import LayerArgumentError, ShardingError, WeightLoadError
from opweave.layers.linear.method import weights_are_deferred
from opweave.layers.moe.grouped_topk import GroupedTopk
from opweave.layers.moe.method import ExpertShapes, FusedMoEMethod, FusedMoEQuantConfig
from opweave.layers.moe.placement import ExpertPlacement
from opweave.layers.moe.router import Router, RoutingFunction
from opweave.layers.moe.unquantized import UnquantizedFusedMoEMethod
from opweave.layers.moe.weights import SHARDS, load_expert
from opweave.layers.parallel import current_tensor_parallel
from opweave.layers.pluggable_layer import PluggableLayer

Mapping = tuple[str, str, int, str]


class ActivationOptions(TypedDict):
    """Constants of the activation; None: the activation's default."""

    alpha: float | None
    beta: float | None
    limit: float | None


@PluggableLayer.register("fused_moe")
class FusedMoE(PluggableLayer):
    """Top-k mixture of experts: routes each token and sums the experts' outputs.

    Routing is an op of :mod:`opweave.ir.ops.routing`. The layer's method computes the experts with
    ``ir.ops.fused_experts``. The layer is sharded over the current tensor-parallel group: each
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
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: FusedMoEQuantConfig | None = None,
        ep_size: int = 1,
        prefix: str = "",
        custom_routing_function: RoutingFunction | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        has_bias: bool = False,
        *,
        alpha: float | None = None,
        beta: float | None = None,
        limit: float | None = None,
        expert_placement_strategy: str = "linear",
        shared_experts: nn.Module | None = None,
        device: torch.device | str | None = None,
    ) -> None:
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
            raise LayerArgumentError(
                f"apply_router_weight_on_input is for top_k=1; this layer has top_k={top_k}."
            )
        self.activation = activation
        self.activation_options = ActivationOptions(alpha=alpha, beta=beta, limit=limit)
        self.grouped_topk = None
        if use_grouped_topk:
            self.grouped_topk = _grouped_topk(
                top_k,
                renormalize,
                num_expert_group,
                topk_group,
                scoring_func,
                routed_scaling_factor,
            )
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
        if quant_config is None and weights_are_deferred():
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
        wanted = (*hidden_states.shape[:-1], self.num_experts)
        if tuple(router_logits.shape) != wanted:
            raise LayerArgumentError(
                f"fused_moe {self.prefix!r}: router_logits must have shape {wanted}, one for each "
                f"token and expert; found {tuple(router_logits.shape)}."
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
            raise WeightLoadError(
                f"{target} of {whose} is loaded with a tensor of shape "
                f"{tuple(loaded_weight.shape)}; it takes {dims} dimensions. expert_id says whether "
                "it is that of one expert."
            )
        loaded = loaded_weight.mT if is_transposed and "weight" in target else loaded_weight
        local = self.placement.local_experts
        if expert_id is None:
            if loaded.shape[0] not in (self.num_experts, len(local)):
                raise WeightLoadError(
                    f"{target} has {loaded.shape[0]} experts in the checkpoint; the layer has "
                    f"{self.num_experts}, of which {len(local)} on this rank."
                )
            whole = loaded.shape[0] == self.num_experts
            sources = {e: loaded[e if whole else place] for place, e in enumerate(local)}
        elif 0 <= expert_id < self.num_experts:
            sources = {expert_id: loaded} if expert_id in local else {}
        else:
            raise LayerArgumentError(
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
        ckpt_gate_proj_name: str,
        ckpt_down_proj_name: str,
        ckpt_up_proj_name: str,
        num_experts: int,
    ) -> list[Mapping]:
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
            raise ShardingError(
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
        for name, own in self.named_parameters(recurse=False):
            if own is not param:
                continue
            shards = SHARDS.get(name.partition("_")[0], ())
            if shard_id not in shards:
                raise LayerArgumentError(
                    f"shard_id={shard_id!r} of {name} is not one of {', '.join(shards)}."
                )
            return name
        raise LayerArgumentError(
            f"a parameter of shape {tuple(param.shape)} is not a parameter of this layer: "
            f"{', '.join(dict(self.named_parameters(recurse=False)))}."
        )


def _grouped_topk(
    top_k: int,
    renormalize: bool,
    num_expert_group: int | None,
    topk_group: int | None,
    scoring_func: str,
    routed_scaling_factor: float,
) -> GroupedTopk:
    if num_expert_group is None or topk_group is None:
        raise LayerArgumentError(
            "use_grouped_topk needs num_expert_group and topk_group; found "
            f"num_expert_group={num_expert_group}, topk_group={topk_group}."
        )
    return GroupedTopk(
        top_k, renormalize, num_expert_group, topk_group, scoring_func, routed_scaling_factor
    )


def _method(layer: FusedMoE, quant_config: FusedMoEQuantConfig | None) -> FusedMoEMethod:
    chosen = quant_config.get_quant_method(layer, layer.prefix) if quant_config else None
    if chosen is None:
        return UnquantizedFusedMoEMethod()
    if not isinstance(chosen, FusedMoEMethod):
        raise LayerArgumentError(
            f"{type(quant_config).__name__}.get_quant_method returned {chosen!r} for FusedMoE "
            f"{layer.prefix!r}; it must be a FusedMoEMethod, or None for weights as they are."
        )
    return chosen
