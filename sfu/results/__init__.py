"""What runs leave behind, read and written in one place."""
