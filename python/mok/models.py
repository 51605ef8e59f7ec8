"""Presets: the shapes and routers of published models' MoE layers."""

from dataclasses import dataclass

from mok.router import RouterConfig


@dataclass(frozen=True)
class Preset:
    """A layer's shape; `note` says what differs from the published model."""

    hidden: int
    intermediate: int
    experts: int
    topk: int
    router: RouterConfig
    shared_intermediate: int = 0
    shared_gate: bool = False
    swiglu_limit: float | None = None
    note: str = ""


def _sigmoid(scale: float = 1.0, groups: int = 1, topk_groups: int = 1) -> RouterConfig:
    return RouterConfig("sigmoid", True, scale, groups, topk_groups, bias=True)


_SOFTMAX = RouterConfig("softmax")
_GPT_OSS = (
    "plain form: the published model has silu(1.702 g), (u + 1) and biases in each expert, "
    "which this layer does not compute"
)

# Softmax over the chosen logits alone is the same as over all, renormalised.
PRESETS = {
    "mixtral-8x7b": Preset(4096, 14336, 8, 2, _SOFTMAX),
    "olmoe-7b": Preset(2048, 1024, 64, 8, RouterConfig("softmax", renormalise=False)),
    "qwen3-30b-a3b": Preset(2048, 768, 128, 8, _SOFTMAX),
    "qwen3-235b-a22b": Preset(4096, 1536, 128, 8, _SOFTMAX),
    "qwen3.5-35b-a3b": Preset(2048, 512, 256, 8, _SOFTMAX, 512, True),
    "qwen3.5-397b-a17b": Preset(
        4096, 1024, 512, 10, _SOFTMAX, 1024, True, note="shared expert's width not confirmed"
    ),
    "deepseek-v3": Preset(7168, 2048, 256, 8, _sigmoid(2.5, 8, 4), 2048),
    "deepseek-v4-flash": Preset(
        4096, 2048, 256, 6, RouterConfig("sqrt_softplus", True, 1.5), 2048, swiglu_limit=10.0
    ),
    "deepseek-v4-pro": Preset(
        7168, 3072, 384, 6, RouterConfig("sqrt_softplus", True, 2.5), 3072, swiglu_limit=10.0,
        note="router's scale not confirmed",
    ),
    "kimi-k2.5": Preset(7168, 2048, 384, 8, _sigmoid(2.827), 2048),
    "glm-4.5": Preset(5120, 1536, 160, 8, _sigmoid(2.5), 1536),
    "glm-5.2": Preset(6144, 2048, 256, 8, _sigmoid(2.5), 2048),
    "gpt-oss-20b": Preset(2880, 2880, 32, 4, _SOFTMAX, swiglu_limit=7.0, note=_GPT_OSS),
    "gpt-oss-120b": Preset(2880, 2880, 128, 4, _SOFTMAX, swiglu_limit=7.0, note=_GPT_OSS),
    "minimax-m2": Preset(3072, 1536, 256, 8, _sigmoid()),
}  # fmt: skip


def preset(name: str) -> Preset:
    """The preset of that name. Raises ValueError, which lists the names."""
    if name not in PRESETS:
        raise ValueError(f"name: no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
