"""Comparison methods that need caveats; docs/methods.md gives them."""
