"""Features extracted once and kept."""
