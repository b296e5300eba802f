"""Promptable segmentation: points and masks, the segmenters, and the answers of policies that place points."""
