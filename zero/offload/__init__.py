"""Where shards lie: device memory, host memory or a file."""
