"""Rewards that a pretrained model computes in this process; its weights are read when the first sample is scored."""
