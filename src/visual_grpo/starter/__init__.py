"""The defaults of the project, made on the spot: drawn datasets, and small base models pretrained on them."""
