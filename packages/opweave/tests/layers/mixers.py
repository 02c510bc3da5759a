"""Mixers of transformers with random weights, and ours with the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    BambaConfig,
    FalconMambaConfig,
    JambaConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
)
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.mamba.modeling_mamba import MambaMixer as HfMamba
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as HfMamba2
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from opweave.layers import MambaMixer, MambaMixer2, Plamo2MambaMixer, ShortConv, StatefulLayer

HIDDEN = 16


class Pair(NamedTuple):
    """A mixer of transformers, and how to build ours."""

    theirs: nn.Module
    make: Callable[..., StatefulLayer]


def _mamba(**options: Any) -> Callable[..., MambaMixer]:
    def make(**more: Any) -> MambaMixer:
        sizes = (HIDDEN, 4, 4, 32, 3)
        return MambaMixer(*sizes, **{"use_conv_bias": True, "use_bias": False, **options}, **more)

    return make


def _mamba2(groups: int, **options: Any) -> Callable[..., MambaMixer2]:
    def make(**more: Any) -> MambaMixer2:
        usual = {"use_conv_bias": True, "use_bias": False, "chunk_size": 4}
        heads = {"n_groups": groups, "num_heads": 8, "head_dim": 4}
        return MambaMixer2(HIDDEN, 5, 4, 32, **{**usual, **heads, **options}, **more)

    return make


SIZES: dict[str, int] = {
    "hidden_size": HIDDEN, "state_size": 4, "num_hidden_layers": 1, "expand": 2, "time_step_rank": 3
}  # fmt: skip


def _hf_mamba() -> Pair:
    return Pair(HfMamba(MambaConfig(**SIZES), 0), _mamba(use_rms_norm=False))


def _biased() -> Pair:
    options = {"use_bias": True, "use_conv_bias": False}
    config = MambaConfig(**SIZES, **options)
    return Pair(HfMamba(config, 0), _mamba(use_rms_norm=False, is_lora_enabled=True, **options))


def _jamba() -> Pair:
    config = JambaConfig(
        hidden_size=HIDDEN, mamba_d_state=4, mamba_expand=2, mamba_dt_rank=3, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-4,
    )  # fmt: skip
    return Pair(JambaMambaMixer(config, 0), _mamba(use_rms_norm=True, rms_norm_eps=1e-4))


def _falcon() -> Pair:
    config = FalconMambaConfig(**SIZES, mixer_rms_eps=1e-4)
    norm = {"use_rms_norm": True, "rms_norm_has_weight": False, "rms_norm_eps": 1e-4}
    return Pair(FalconMambaMixer(config, 0, initialize_mixer_weights=False), _mamba(**norm))


def _hf_mamba2(groups: int) -> Pair:
    config = Mamba2Config(
        hidden_size=HIDDEN, state_size=5, num_hidden_layers=1, expand=2, num_heads=8, head_dim=4,
        n_groups=groups, chunk_size=4,
    )  # fmt: skip
    return Pair(HfMamba2(config, 0), _mamba2(groups))


def _bamba() -> Pair:
    config = BambaConfig(
        hidden_size=HIDDEN, mamba_d_state=5, num_hidden_layers=1, mamba_n_heads=8, mamba_d_head=4,
        mamba_n_groups=1, mamba_chunk_size=4, num_attention_heads=2, num_key_value_heads=1,
        mamba_proj_bias=True, rms_norm_eps=1e-4,
    )  # fmt: skip
    return Pair(BambaMixer(config, 0), _mamba2(1, use_bias=True, rms_norm_eps=1e-4))


def _nemotron() -> Pair:
    config = NemotronHConfig(
        hidden_size=HIDDEN, ssm_state_size=5, mamba_num_heads=8, mamba_head_dim=4, n_groups=2,
        chunk_size=4, time_step_min=0.3, layers_block_type=["mamba"],
    )  # fmt: skip
    return Pair(NemotronHMamba2Mixer(config, 0), _mamba2(2, dt_min=0.3))


def _lfm2(bias: bool) -> Pair:
    config = Lfm2Config(
        hidden_size=HIDDEN, num_hidden_layers=1, conv_L_cache=3, conv_bias=bias,
        num_attention_heads=2, num_key_value_heads=1, layer_types=["conv"],
    )  # fmt: skip
    return Pair(Lfm2ShortConv(config, 0), lambda **more: ShortConv(config, HIDDEN, 0, **more))


PLAMO2 = SimpleNamespace(
    hidden_size=HIDDEN, mamba_d_state=5, mamba_d_conv=4, mamba_num_heads=4, hidden_size_per_head=6,
    mamba_chunk_size=4, rms_norm_eps=1e-4,
)  # fmt: skip


def plamo2(**more: Any) -> Plamo2MambaMixer:
    return Plamo2MambaMixer(PLAMO2, **more)


PAIRS: dict[str, Callable[[], Pair]] = {
    "mamba": _hf_mamba,
    "mamba_biased": _biased,
    "jamba": _jamba,
    "falcon_mamba": _falcon,
    "mamba2": lambda: _hf_mamba2(2),
    "mamba2_one_group": lambda: _hf_mamba2(1),
    "bamba": _bamba,
    "nemotron_h": _nemotron,
    "short_conv": lambda: _lfm2(False),
    "short_conv_biased": lambda: _lfm2(True),
}


def randomized(module: nn.Module) -> nn.Module:
    """Give every parameter values that show in the result."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "A_log" in name:
                parameter.copy_(torch.rand_like(parameter) * 2 - 1)
            elif "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return module.eval()


def load(layer: StatefulLayer, weights: dict[str, torch.Tensor]) -> StatefulLayer:
    """Fill every parameter of *layer* from transformers' tensors, by their loaders."""
    left = dict(layer.named_parameters())
    for name, tensor in weights.items():
        parameter: Any = left.pop(name.replace("A_log", "A"))
        if hasattr(parameter, "weight_loader"):
            parameter.weight_loader(parameter, tensor)
        else:
            parameter.data.copy_(tensor)
    assert not left
    return layer
