"""One command over several machines, launched by torchrun on each: rank 0 runs it, the others work for it."""
