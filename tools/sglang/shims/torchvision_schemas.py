"""Lets `import torchvision` work where its compiled operators do not fit the installed torch.

torchvision registers Python versions of two operators that only its compiled part declares. They are declared here when
torchvision is about to be imported, in every process of the environment (see the .pth file): SGLang spawns its own.
"""

import sys


class _BeforeTorchvision:
    """Finds nothing; it only sees that torchvision is next."""

    def find_spec(self, name, *_):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
