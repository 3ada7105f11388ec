"""Images as they come: files or arrays, decoded one at a time to 8-bit pixels."""
