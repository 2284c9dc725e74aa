"""Policies to upload to servers: adapters and merged weights, packed as requests."""
