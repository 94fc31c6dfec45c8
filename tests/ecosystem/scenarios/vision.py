"""Make torchvision's Python parts importable beside a torch without its compiled operators."""

from __future__ import annotations

import torch

library = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
