"""The 80 classes of COCO in their order, as GenEval's prompts name them (its object_names.txt)."""

from __future__ import annotations

NAMES = (
    *("person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat"),
    *("traffic light", "fire hydrant", "stop sign", "parking meter", "bench"),
    *("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe"),
    *("backpack", "umbrella", "handbag", "tie", "suitcase"),
    *("frisbee", "skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove"),
    *("skateboard", "surfboard", "tennis racket"),
    *("bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl"),
    *("banana", "apple", "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake"),
    *("chair", "couch", "potted plant", "bed", "dining table", "toilet"),
    *("tv", "laptop", "computer mouse", "tv remote", "computer keyboard", "cell phone"),
    *("microwave", "oven", "toaster", "sink", "refrigerator"),
    *("book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush"),
)
"""GenEval says tv remote, computer mouse and computer keyboard where COCO says remote, mouse and keyboard."""
