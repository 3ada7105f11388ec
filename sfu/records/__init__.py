"""Deletion requests that leave a record, and the folders that hold a head with the records of its requests."""
