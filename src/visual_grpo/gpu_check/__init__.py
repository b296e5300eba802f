"""The first minutes on a GPU: steps of a training, measured and held against the plan."""
