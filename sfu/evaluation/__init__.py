"""What an unlearned head is measured by."""
