"""Declares torchvision's two operators when, and only when, torchvision is about to be imported.

Loaded at every start of this Python by the .pth file beside it, so it must cost nothing: torch is
imported only inside the hook.
"""

import sys


class _BeforeTorchvision:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare()


def _declare():
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.modules[__name__].library = library  # the operators last as long as their library


sys.meta_path.insert(0, _BeforeTorchvision())
