"""One experiment: configuration, the pipeline of its stages, the cache, jobs and sweeps."""
