"""Configuration, stages, artifacts and the runner."""
