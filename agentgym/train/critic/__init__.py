"""The critic: a value head beside the policy, and how it learns."""
