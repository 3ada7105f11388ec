"""Membership attacks on unlearned heads: what each of them sees, how it scores rows, and what the scores show."""
