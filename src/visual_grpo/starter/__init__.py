"""The defaults of the project, made on the spot: rendered datasets, and small base models pretrained on them."""
