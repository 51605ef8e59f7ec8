"""torchtitan: the routed experts of its MoE layers, computed by mok, through its override registry.

    --override.imports 'mok.integrations.torchtitan.routed_experts={"max_tokens": 8192}'

``max_tokens`` is the most tokens of any expert-parallel rank in a call; without expert parallelism
it may be left out. Router, shared experts, parameters and checkpoints stay torchtitan's own.

Unlike the other modules here this one imports its project: torchtitan itself imports it, by the
name above.
"""

from dataclasses import dataclass

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from mok.autograd import moe
from mok.group import Group, local_group, new_group


class MoKRoutedExperts(RoutedExperts):
    """torchtitan's RoutedExperts, whose token dispatcher stays unused."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        max_tokens: int | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        self._max_tokens = config.max_tokens
        self._group: Group | None = None

    def parallelize(self, parallel_dims) -> None:
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None:
            if self._max_tokens is None:
                raise ValueError("max_tokens: needed with expert parallelism")
            self._group = _group_of(mesh.get_group(), self._max_tokens)

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        if self._group is None:
            self._group = _group_of(None, None)
        experts = self.inner_experts
        topk = topk_expert_ids_BLK.shape[-1]
        # As torchtitan: the products are in bf16, whatever the parameters are.
        y_TD = moe(
            x_BLD.reshape(-1, x_BLD.shape[-1]).bfloat16(), topk_expert_ids_BLK.reshape(-1, topk),
            topk_scores_BLK.reshape(-1, topk).float(), experts.w1_EFD.bfloat16(),
            experts.w3_EFD.bfloat16(), experts.w2_EDF.bfloat16(), group=self._group,
        )  # fmt: skip
        return y_TD.view(x_BLD.shape).type_as(x_BLD)


_groups: dict[tuple, Group] = {}  # one for all layers


def _group_of(process_group, max_tokens: int | None) -> Group:
    key = process_group, max_tokens
    if key not in _groups:
        if process_group is None:
            _groups[key] = local_group()
        else:
            _groups[key] = new_group(process_group, max_tokens=max_tokens)
    return _groups[key]


@override(target=RoutedExperts.Config, description="Routed experts by mok, communication included.")
def routed_experts(
    cfg: RoutedExperts.Config, *, max_tokens: int | None = None
) -> MoKRoutedExperts.Config:
    """The override. Experts of another kind (gpt-oss's, quantised ones) are refused."""
    if type(cfg.inner_experts) is not GroupedExperts.Config:
        kind = type(cfg.inner_experts).__qualname__
        raise ValueError(f"inner_experts: mok computes GroupedExperts, not {kind}")
    return derive(cfg, MoKRoutedExperts.Config, max_tokens=max_tokens)
