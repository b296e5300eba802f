"""Types, errors, files, console, devices, processes and images: used by every other package."""
