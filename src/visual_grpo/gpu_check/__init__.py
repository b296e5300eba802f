"""Steps of a training on a GPU, measured and compared with the plan."""
