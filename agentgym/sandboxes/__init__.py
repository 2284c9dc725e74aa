"""The host side of a box. Never imports environments or rollouts: an environment is handed its box."""
