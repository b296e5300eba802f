"""Points, masks and the models that turn one into the other."""
