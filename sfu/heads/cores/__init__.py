"""Linearised networks: the last layers of a network, replaced by their tangent at weights that saw no user data."""
