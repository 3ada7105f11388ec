"""Features of images, extracted once and cached."""
