"""What a training would need on a named GPU: the code of a step itself, run on tensors with shapes but no values."""
