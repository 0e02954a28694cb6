"""Where shards and the optimizer's tensors live: device memory, host memory or a file."""
