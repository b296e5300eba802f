"""Device, threads, parallel batches and memory."""
