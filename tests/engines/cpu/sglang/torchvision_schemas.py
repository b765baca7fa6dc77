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
    from torch import library

    declared = library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # The operators last as long as the object that declared them.
    sys.modules[__name__].declared = declared


sys.meta_path.insert(0, _BeforeTorchvision())
