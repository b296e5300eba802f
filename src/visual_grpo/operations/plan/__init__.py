"""Plans a training without weights or a GPU: one step runs on tensors that have shapes and no values."""
