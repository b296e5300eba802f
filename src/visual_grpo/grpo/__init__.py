"""Advantages, losses, the trainer, its checks and several processes, in pure torch.

``config`` is the section ``grpo`` of the parameters here (`GRPOConfig`), and all of them elsewhere (`Parameters`).
"""
