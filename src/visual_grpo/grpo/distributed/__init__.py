"""One command by several processes (ranks) on torch.distributed.

Every rank runs the same training with the same seeds, on its own block of prompts. Rank 0 runs ``kedro run``: it alone
scores, tracks, prints and saves, and its decisions are everyone's.
"""
